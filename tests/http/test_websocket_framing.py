"""The server's half of RFC 6455, byte by byte, and what offers of a WebSocket leave of HTTP."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import os
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.windows.window_site import SUM, Site, floats

from inferd import clock
from inferd.http.websocket import CLOSE_S, MAX_MESSAGE_BYTES, PING_EVERY_S, PONG_S, READ_BYTES, WebSocket

TEXT, BINARY, CONT, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10
KEY = base64.b64encode(bytes(16)).decode()
ACCEPT = base64.b64encode(hashlib.sha1((KEY + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()).decode()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("framing"))
    yield site
    site.stop()


def frame(
    opcode: int, data: bytes = b"", *, fin: bool = True, masked: bool = True, rsv: int = 0, size: int = -1
) -> bytes:
    """A client's frame; ``size`` is what it claims."""
    size = len(data) if size < 0 else size
    head = bytes([fin << 7 | rsv << 4 | opcode])
    if size < 126:
        head += bytes([masked << 7 | size])
    elif size < 1 << 16:
        head += bytes([masked << 7 | 126]) + struct.pack("!H", size)
    else:
        head += bytes([masked << 7 | 127]) + struct.pack("!Q", size)
    if not masked:
        return head + data
    mask = b"\x37\xfa\x21\x3d"
    return head + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))


def close(code: int = 1000) -> bytes:
    return frame(CLOSE, struct.pack("!H", code))


class Raw:
    """A client that writes bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self._within(self.reader.readuntil(b"\r\n\r\n"))).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), headers

    async def frame(self) -> tuple[int, bytes]:
        first, second = await self._within(self.reader.readexactly(2))
        assert first & 0x80, "the server sends no fragments"
        assert not second & 0x80, "the server masks nothing"
        size = second
        if size == 126:
            (size,) = struct.unpack("!H", await self.reader.readexactly(2))
        return first & 15, await self.reader.readexactly(size)

    async def answer(self) -> dict[str, Any]:
        opcode, data = await self.frame()
        assert opcode == TEXT, (opcode, data)
        found: dict[str, Any] = json.loads(data)
        return found

    async def closed(self) -> int:
        """The close's code; then the server ends the connection."""
        opcode, data = await self.frame()
        assert opcode == CLOSE, (opcode, data)
        return int.from_bytes(data[:2], "big")

    async def end(self) -> bytes:
        return await self._within(self.reader.read())

    async def _within(self, reading: Coroutine[Any, Any, bytes]) -> bytes:
        return await asyncio.wait_for(reading, 10)


def handshake(query: str = SUM, model: str = "sum", *lines: str, method: str = "GET", version: str = "1.1") -> bytes:
    usual = ("connection: Upgrade", "upgrade: websocket", f"sec-websocket-key: {KEY}", "sec-websocket-version: 13")
    head = [f"{method} /v2/models/{model}/stream?{query} HTTP/{version}", "host: localhost", *(lines or usual)]
    return "\r\n".join(head).encode() + b"\r\n\r\n"


@contextlib.asynccontextmanager
async def raw(site: Site, first: bytes) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
    writer.write(first)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def opened(site: Site, more: bytes = b"", query: str = SUM, model: str = "sum") -> AsyncIterator[Raw]:
    async with raw(site, handshake(query, model) + more) as client:
        status, headers = await client.head()
        assert status == 101
        assert headers["sec-websocket-accept"] == ACCEPT.lower()
        assert (headers["upgrade"], headers["connection"]) == ("websocket", "upgrade")
        assert not {"sec-websocket-extensions", "sec-websocket-protocol", "content-length"} & set(headers)
        assert headers["x-request-id"]
        yield client


def y(answer: dict[str, Any]) -> float:
    found: float = answer["outputs"][0]["data"][0]
    return found


def test_fragments_are_one_message_and_a_ping_between_them_is_answered(site: Site) -> None:
    async def then() -> None:
        data = floats(1, 2)
        async with opened(site) as client:
            client.writer.write(frame(BINARY, data[:3], fin=False) + frame(CONT, fin=False) + frame(PING, b"!"))
            assert await client.frame() == (PONG, b"!")
            client.writer.write(frame(CONT, data[3:]))
            assert [y(await client.answer()) for _ in range(2)] == [1, 3]
            client.writer.write(frame(PONG, b"unasked") + frame(TEXT, b'{"samp', fin=False) + frame(CONT, b'les":[4]}'))
            assert y(await client.answer()) == 7
            client.writer.write(close())
            assert await client.closed() == 1000
            assert await client.end() == b""

    site.talk(then)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.booleans())
def test_bytes_mean_the_same_however_they_arrive(site: Site, cuts: list[int], with_handshake: bool) -> None:
    said = frame(BINARY, floats(1)[:1], fin=False) + frame(CONT, floats(1)[1:]) + frame(TEXT, b'{"samples":[2,3]}')
    said += frame(PING) + frame(TEXT, b'{"end":true}')

    async def then() -> None:
        async with opened(site, said[:9] if with_handshake else b"") as client:
            at = 9 if with_handshake else 0
            for cut in cuts:
                client.writer.write(said[at : at + cut])
                await asyncio.sleep(0)
                at += cut
            client.writer.write(said[at:])
            texts = []
            while True:
                opcode, data = await client.frame()
                if opcode == CLOSE:
                    break
                if opcode == TEXT:
                    texts.append(json.loads(data))
            assert [y(text) for text in texts[:-1]] == [1, 3, 6]
            assert texts[-1] == {"type": "end", "windows": 3}
            assert data[:2] == b"\x03\xe8"

    site.talk(then)


@pytest.mark.parametrize(
    ("said", "code", "says"),
    [
        (frame(BINARY, floats(1), masked=False), 1002, "masking"),
        (frame(BINARY, size=MAX_MESSAGE_BYTES + 1), 1009, "limit"),
        (frame(BINARY, bytes(MAX_MESSAGE_BYTES // 2), fin=False) + frame(CONT, size=MAX_MESSAGE_BYTES), 1009, "limit"),
        (frame(TEXT, b"\xff\xfe"), 1007, "UTF-8"),
        (frame(3), 1002, "opcode"),
        (frame(BINARY, floats(1), rsv=4), 1002, "reserved"),
        (frame(CONT, floats(1)), 1002, "continuation"),
        (frame(BINARY, fin=False) + frame(BINARY), 1002, "continuation"),
        (frame(PING, fin=False), 1002, "control"),
        (frame(PING, bytes(126)), 1002, "control"),
        (close(1005), 1002, "status code"),
    ],
)
def test_a_connection_that_breaks_the_protocol_gets_an_error_and_a_close(
    site: Site, said: bytes, code: int, says: str
) -> None:
    async def then() -> None:
        async with opened(site) as client:
            client.writer.write(said + frame(BINARY, floats(1)))  # what comes after counts no more
            told = await client.answer()
            assert told["type"] == "error"
            assert says in told["error"]["message"]
            assert await client.closed() == code
            assert await client.end() == b""
        await site.until(lambda: not site.gateway.connections)

    site.talk(then)
    assert not site.windows()


def test_a_flood_of_small_frames_is_looked_at_bit_by_bit(site: Site) -> None:
    async def then() -> None:
        async with opened(site) as client:
            (socket,) = site.gateway.connections
            assert isinstance(socket, WebSocket)
            flood = frame(BINARY) * 20_000
            socket.data_received(flood)
            assert len(socket._unread) == len(flood)
            client.writer.write(frame(BINARY, floats(1)))
            for turn in range(3):
                await asyncio.sleep(0)
                assert len(socket._unread) >= len(flood) - (turn + 2) * READ_BYTES
            assert y(await client.answer()) == 1
            assert not socket._unread
            client.writer.write(close())
            assert await client.closed() == 1000

    site.talk(then)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.builds(
                frame,
                st.integers(0, 15),
                st.one_of(st.binary(max_size=12), st.just(floats(1)), st.just(b'{"samples":[1]}')),
                fin=st.booleans(),
                rsv=st.sampled_from([0, 0, 0, 1]),
            ),
        ),
        max_size=12,
    )
)
def test_no_bytes_are_a_defect_of_the_server(site: Site, said: list[bytes]) -> None:
    failed: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:
                failed.append(record.getMessage())

    async def then() -> None:
        async with opened(site) as client:
            client.writer.write(b"".join(said))
            client.writer.write_eof()
            heard = await client.end()
            assert b'"internal_error"' not in heard
        await site.until(lambda: not site.gateway.connections)

    listening = Listening()
    logging.getLogger().addHandler(listening)
    try:
        site.talk(then)
    finally:
        logging.getLogger().removeHandler(listening)
    assert failed == []


def test_a_close_is_answered_with_its_code_and_nothing_after_it_counts(site: Site) -> None:
    async def then() -> None:
        for said, code in ((close(1001), 1001), (frame(CLOSE), 0)):
            async with opened(site) as client:
                client.writer.write(said + frame(BINARY, floats(1)))
                assert await client.closed() == code
                assert await client.end() == b""

    site.talk(then)
    assert not site.windows()


def test_a_connection_that_ends_without_a_close_is_removed(site: Site) -> None:
    async def then() -> None:
        async with opened(site) as client:
            client.writer.write(frame(BINARY, floats(1)))
            assert y(await client.answer()) == 1
            client.writer.write_eof()
            await client.end()
            await site.until(lambda: not site.gateway.connections and not site.states())

    site.talk(then)


def test_a_connection_that_does_not_answer_the_close_is_cut_off(site: Site) -> None:
    async def then() -> None:
        async with opened(site) as client:
            client.writer.write(frame(TEXT, b"nonsense"))
            assert (await client.answer())["type"] == "error"
            assert await client.closed() == 1007
            (socket,) = site.gateway.connections
            assert isinstance(socket, WebSocket)
            socket.check_timeouts(clock.now() + CLOSE_S - 1)
            assert socket in site.gateway.connections
            socket.check_timeouts(clock.now() + CLOSE_S + 1)
            await site.until(lambda: not site.gateway.connections)

    site.talk(then)


def test_a_silent_connection_is_pinged_and_is_cut_off_where_nothing_follows(site: Site) -> None:
    async def then() -> None:
        async with opened(site) as client:
            (socket,) = site.gateway.connections
            assert isinstance(socket, WebSocket)

            async def is_heard() -> bool:
                client.writer.write(frame(PONG) + frame(PING, b"heard"))
                return await client.frame() == (PONG, b"heard")

            socket.check_timeouts(clock.now() + PING_EVERY_S - 5)
            assert await is_heard(), "no ping came before its time"
            for waits_s in (PONG_S - 1, PONG_S + 1):
                silent = clock.now() + PING_EVERY_S + 1
                socket.check_timeouts(silent)
                assert (await client.frame())[0] == PING
                socket.check_timeouts(silent + waits_s)
                if waits_s < PONG_S:
                    assert await is_heard()
            await site.until(lambda: not site.gateway.connections)

    site.talk(then)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (handshake(SUM, "sum", "connection: Upgrade", "upgrade: websocket", "sec-websocket-version: 13"), 400),
        (handshake(SUM, "sum", "connection: Upgrade", "upgrade: websocket", f"sec-websocket-key: {KEY}"), 400),
        (
            handshake(
                *(SUM, "sum", "connection: Upgrade", "upgrade: websocket", "sec-websocket-version: 13"),
                "sec-websocket-key: AAAA",
            ),
            400,
        ),
        (
            handshake(
                *(SUM, "sum", "connection: Upgrade", "upgrade: websocket", "sec-websocket-version: 8"),
                f"sec-websocket-key: {KEY}",
            ),
            400,
        ),
        (handshake(SUM, "sum", "connection: Upgrade", "upgrade: h2c"), 426),
        (handshake(SUM, "sum", "connection: Upgrade", "upgrade: websocket", "content-length: 0"), 426),
        (handshake(SUM, "sum", "connection: close"), 426),
        (handshake(SUM, "sum", "connection: close", method="HEAD"), 426),
        (handshake(version="1.0"), 426),
        (handshake(method="POST"), 405),
    ],
)
def test_what_is_no_handshake_is_answered_as_http(site: Site, head: bytes, status: int) -> None:
    async def then() -> None:
        async with raw(site, head) as client:
            found, headers = await client.head()
            assert found == status
            if found == 426:
                assert headers["upgrade"] == "websocket"
            if not head.startswith(b"HEAD"):
                assert json.loads(await client.reader.readexactly(int(headers["content-length"])))["error"]

    site.talk(then)


def test_an_upgrade_of_another_route_is_an_ordinary_request_and_the_last_one(site: Site) -> None:
    """Whatever follows might be no HTTP: it is not read."""

    async def then() -> None:
        head = handshake().replace(b"/v2/models/sum/stream?" + SUM.encode(), b"/health/live")
        smuggled = b"POST /v2/models/sum/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
        async with raw(site, head + smuggled) as client:
            status, headers = await client.head()
            assert (status, headers["connection"]) == (200, "close")
            await client.end()

    site.talk(then)
    assert len(site.events) == 1


def test_a_websocket_follows_requests_that_came_before_it(site: Site) -> None:
    async def then() -> None:
        before = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2
        async with raw(site, before + handshake() + frame(BINARY, floats(1))) as client:
            for _ in range(2):
                status, headers = await client.head()
                assert status == 200
                await client.reader.readexactly(int(headers["content-length"]))
            assert (await client.head())[0] == 101
            assert y(await client.answer()) == 1

    site.talk(then)


def test_nothing_of_it_is_imported_before_the_first_one_comes() -> None:
    code = "import sys, inferd.gateway.server, inferd.http.listener; sys.exit('websockets' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
