"""HTTP/1.1 as it is on the wire: what two programs could read differently is refused.

The oracle is h11, a parser that shares no line with ours: of any bytes we must see the requests that it
sees, or fewer, and never others.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import re
import socket
import struct
import sys
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, cast

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.stopwatch import Stopwatch

from inferd import clock
from inferd.config import ServerConfig
from inferd.errors import InferdError
from inferd.gateway.errors import kind_of
from inferd.http.connection import (
    PIPELINE_AHEAD,
    REQUESTS_PER_TURN,
    SLICE_BYTES,
    WRITE_AHEAD_BYTES,
    Application,
    Connection,
    Timeouts,
)
from inferd.http.exchange import READ_AHEAD_BYTES, ClientLeft, Exchange
from inferd.http.head import HeadCache
from inferd.http.limits import MAX_HEADER_BYTES, MAX_HEADERS
from inferd.http.listener import UNSENT_BYTES, HttpServer
from inferd.http.upgrade import ClientConnection

Seen = tuple[str, bytes, bytes]  # method, target, body


# -- against the oracle ----------------------------------------------------------------------------


class Wire:
    """In a transport's place: what was written, and whether it was closed."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False
        self.is_paused = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def set_write_buffer_limits(self, high: int) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0


class Host:
    """Takes every whole request and answers at once."""

    max_connections = 1

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.timeouts = Timeouts()
        self.is_stopping = False
        self.connections: set[ClientConnection] = set()
        self.heads = HeadCache()
        self.app: Application = self
        self.forward: Callable[[Exchange], object] = self._take

    def serve(self, exchange: Exchange) -> None:
        if exchange.is_body_complete:
            self.forward(exchange)

    def _take(self, exchange: Exchange) -> bool:
        self.seen.append((exchange.head.method, exchange.head.target, exchange.take_body()))
        exchange.answer(200, (), b"ok")
        return True

    def refuse(self, exchange: Exchange, error: InferdError) -> None:
        exchange.answer(kind_of(error).status, (), b"no")

    def spawn(self, serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        raise AssertionError("nothing is served in a task")

    def connection_closed(self, connection: ClientConnection) -> None: ...
    def reject_connection(self, transport: asyncio.Transport) -> None: ...


def ours(data: bytes, cuts: list[int]) -> tuple[list[Seen], Wire]:
    host, wire = Host(), Wire()
    asyncio.run(fed(Connection(host), wire, data, cuts))
    return host.seen, wire


async def fed(connection: Connection, wire: Wire, data: bytes, cuts: list[int]) -> None:
    """Everything has arrived, and has been taken as far as it will be."""
    connection.connection_made(wire)  # type: ignore[arg-type]
    begin = 0
    for cut in [*sorted(cuts), len(data)]:
        if data[begin:cut] and not wire.is_closed:
            connection.data_received(data[begin:cut])
        while wire.is_paused and not wire.is_closed:
            await asyncio.sleep(0)
        begin = cut


def theirs(data: bytes) -> list[Seen]:
    """Empty lines between requests are skipped, as RFC 9112 (2.2) wants of servers; h11 does not."""
    seen = list[Seen]()
    while data:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=2**20)
        connection.receive_data(data.lstrip(b"\r\n"))
        body = b""
        try:
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    method, target = event.method.decode(), bytes(event.target)
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                else:
                    return seen
        except h11.RemoteProtocolError:
            return seen
        seen.append((method, target, body))
        connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        connection.send(h11.EndOfMessage())
        if connection.our_state is h11.MUST_CLOSE:
            return seen
        data = bytes(connection.trailing_data[0])
    return seen


POST = b"POST /a HTTP/1.1\r\nhost: x\r\n"
LINES = [
    b"GET / HTTP/1.1\r\n", b"POST /p HTTP/1.1\r\n", b"HEAD /h HTTP/1.0\r\n", b"host: x\r\n", b"host: y\r\n",
    b"Host : x\r\n",
    b"content-length: 5\r\n", b"content-length: 0\r\n", b"content-length: 5, 5\r\n", b"content-length: +5\r\n",
    b"Content-Length: 0x5\r\n", b"content-length:\r\n", b"content-length: 99999999999999999999\r\n",
    b"transfer-encoding: chunked\r\n", b"Transfer-Encoding: Chunked\r\n", b"transfer-encoding: gzip, chunked\r\n",
    b"transfer-encoding: chunked, chunked\r\n", b"transfer-encoding:\tchunked\r\n", b"transfer-encoding: x\r\n",
    b"transfer-encoding : chunked\r\n", b"transfer_encoding: chunked\r\n", b" folded: 1\r\n", b"\tfolded\r\n",
    b"x: a\rb\r\n",
    b"x: a\nb: c\r\n", b"x: a\x00b\r\n", b"x\x0b: y\r\n", b": empty\r\n", b"no colon\r\n",
    b"connection: close\r\n", b"\r\n",
    b"\n", b"\r", b"hello", b"5\r\nhello\r\n", b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"05\r\nhello\r\n",
    b"5;ext=1\r\nhello\r\n",
    b"5 \r\nhello\r\n", b"0x5\r\nhello\r\n", b"-1\r\n", b"5\nhello\n", b"5\r\nhelloX\r\n", b"ffffffffffffffff0\r\n",
    b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /\x80 HTTP/1.1\r\n", b"GET  / HTTP/1.1\r\n",
    b"GET / HTTP/1.1 \r\n",
    b"GET / HTTP/2.0\r\n", b"GET http://h/p HTTP/1.1\r\n", b"get / HTTP/1.1\r\n", b"GET /a b HTTP/1.1\r\n",
]  # fmt: skip
WHOLE = [
    b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    POST + b"content-length: 5\r\n\r\nhello",
    POST + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(LINES + WHOLE), min_size=1, max_size=8),
    st.lists(st.integers(0, 400), max_size=4),
    st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=2)), max_size=2),
)
@example([POST, b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"\r\n", b"0\r\n\r\n", WHOLE[0]], [], [])
@example([POST, b"content-length: 5\r\n", b"content-length: 0\r\n", b"\r\n", b"hello", WHOLE[0]], [], [])
@example([b"GET /HTTP/1.1\r\nhost: x\r\n\r\n", WHOLE[0]], [], [])
@example([b"HEAD /h HTTP/1.0\r\n", b"transfer-encoding: chunked\r\n", b"\r\n", b"0\r\n\r\n", WHOLE[0]], [], [])
def test_of_any_bytes_we_see_the_requests_that_the_oracle_sees_or_fewer(
    parts: list[bytes], cuts: list[int], changes: list[tuple[int, bytes]]
) -> None:
    data = b"".join(parts)
    for at, new in changes:
        data = data[:at] + new + data[at + 1 :]
    seen, wire = ours(data, [min(cut, len(data)) for cut in cuts])
    expected = theirs(data)
    assert seen == expected[: len(seen)]
    assert wire.written.count(b"HTTP/1.1 200") == len(seen)
    if len(seen) < len(expected):
        assert wire.is_closed, "stricter, but then it ends there"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(WHOLE), min_size=1, max_size=5), st.lists(st.integers(0, 400), max_size=6))
def test_proper_requests_are_all_seen_however_the_network_cuts_them(whole: list[bytes], cuts: list[int]) -> None:
    data = b"".join(whole)
    seen, wire = ours(data, [min(cut, len(data)) for cut in cuts])
    assert seen == theirs(data)
    assert len(seen) == len(whole)
    assert wire.written.count(b"HTTP/1.1 200") == len(whole)
    assert not wire.is_closed


AMBIGUOUS = {
    "both lengths": POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "lengths differ": POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
    "no number": POST + b"content-length: 5x\r\n\r\nhello",
    "signed": POST + b"content-length: +5\r\n\r\nhello",
    "too large": POST + b"content-length: 18446744073709551621\r\n\r\nhello",
    "other coding": POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "coding twice": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding not last": POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "coding in 1.0": b"POST /a HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "space before colon": POST + b"content-length : 5\r\n\r\nhello",
    "folded": POST + b"x: a\r\n b\r\n\r\n",
    "folded first": b"GET / HTTP/1.1\r\n host: x\r\n\r\n",
    "bare CR": POST + b"x: a\rb\r\n\r\n",
    "NUL": POST + b"x: a\x00b\r\n\r\n",
    "bare LF": b"GET / HTTP/1.1\nhost: x\n\n",
    "chunk size": POST + b"transfer-encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "chunk overflow": POST + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\nhello",
    "chunk end": POST + b"transfer-encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n",
    "no version": b"GET /HTTP/1.1\r\nhost: x\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
}


@pytest.mark.parametrize("case", sorted(AMBIGUOUS))
def test_what_could_be_read_in_two_ways_is_refused_and_the_connection_closed(case: str) -> None:
    seen, wire = ours(AMBIGUOUS[case] + b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n", [])
    assert seen == []
    assert wire.written.startswith(b"HTTP/1.1 400 ")
    assert wire.written.count(b"\r\n\r\n") == 1
    assert b"connection: close" in wire.written
    assert wire.is_closed


@pytest.mark.parametrize("count", [64, 65, 66, 1000, 20_000])
@pytest.mark.parametrize(
    "one", [WHOLE[0], WHOLE[2], b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"]
)
def test_any_number_of_requests_in_one_read_is_answered(count: int, one: bytes) -> None:
    count = min(count, 2**18 // len(one))  # what one read brings at most
    seen, wire = ours(one * count, [])
    assert len(seen) == count
    assert wire.written.count(b"HTTP/1.1 200") == count
    assert not wire.is_closed


def test_one_turn_of_the_loop_begins_a_bounded_number_of_requests() -> None:
    host, wire = Host(), Wire()
    counts = list[int]()

    async def main() -> None:
        feeding = asyncio.ensure_future(fed(Connection(host), wire, WHOLE[0] * 5000, []))
        while not feeding.done():
            await asyncio.sleep(0)
            counts.append(len(host.seen))

    asyncio.run(main())
    begun = [after - before for before, after in itertools.pairwise([0, *counts])]
    assert max(begun) <= REQUESTS_PER_TURN + SLICE_BYTES // len(WHOLE[0])
    assert len(host.seen) == 5000


def test_what_is_raised_in_a_later_turn_ends_the_connection() -> None:
    host, wire = Host(), Wire()

    def take(exchange: Exchange) -> bool:
        if len(host.seen) == 3 * REQUESTS_PER_TURN:
            raise ZeroDivisionError("a defect")
        return host._take(exchange)

    host.forward = take
    asyncio.run(fed(Connection(host), wire, WHOLE[0] * 1000, []))
    assert len(host.seen) == 3 * REQUESTS_PER_TURN
    assert wire.is_closed


def test_requests_behind_one_that_takes_its_time_wait_unread() -> None:
    host, wire = Host(), Wire()
    answered = list[Exchange]()

    def take(exchange: Exchange) -> bool:
        answered.append(exchange)
        return True

    host.forward = take

    async def main() -> None:
        connection = Connection(host)
        connection.connection_made(wire)  # type: ignore[arg-type]
        connection.data_received(WHOLE[0] * 5000)
        assert len(connection._queue) <= PIPELINE_AHEAD + SLICE_BYTES // len(WHOLE[0])
        assert wire.is_paused
        for number in range(5000):
            while len(answered) <= number:
                await asyncio.sleep(0)
            answered[number].take_body()
            answered[number].answer(200, (), b"ok")
            assert len(connection._queue) <= PIPELINE_AHEAD + SLICE_BYTES // len(WHOLE[0])
        while wire.is_paused:
            await asyncio.sleep(0)
        assert wire.written.count(b"HTTP/1.1 200") == 5000

    asyncio.run(main())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(WHOLE), max_size=100),
    st.sampled_from(
        [*AMBIGUOUS.values(), b"\x00garbage\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"x" * (2 * MAX_HEADER_BYTES)]
    ),
    st.lists(st.integers(0, 6000), max_size=4),
)
def test_the_requests_before_bytes_that_are_none_are_answered_and_then_comes_one_refusal(
    whole: list[bytes], bad: bytes, cuts: list[int]
) -> None:
    data = b"".join(whole) + bad
    seen, wire = ours(data, [min(cut, len(data)) for cut in cuts])
    assert len(seen) == len(whole)
    answers = re.findall(rb"HTTP/1\.1 (\d+)", wire.written)
    assert answers[:-1] == [b"200"] * len(whole)
    assert answers[-1] in (b"400", b"431")
    assert wire.is_closed


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(WHOLE), max_size=5),
    st.sampled_from(WHOLE),
    st.binary(max_size=40) | st.sampled_from([*WHOLE, *AMBIGUOUS.values()]),
    st.lists(st.integers(0, 400), max_size=4),
)
def test_bytes_behind_a_request_that_is_its_clients_last_change_nothing(
    whole: list[bytes], last: bytes, behind: bytes, cuts: list[int]
) -> None:
    data = b"".join(whole) + last.replace(b"host: x\r\n", b"host: x\r\nconnection: close\r\n") + behind
    seen, wire = ours(data, [min(cut, len(data)) for cut in cuts])
    assert seen == theirs(data)
    assert len(seen) == len(whole) + 1
    assert re.findall(rb"HTTP/1\.1 (\d+)", wire.written) == [b"200"] * len(seen)
    assert wire.is_closed


# -- over real sockets -------------------------------------------------------------------------------


async def echo(exchange: Exchange) -> None:
    """Answers with method, path and body; to ``/pieces`` in pieces, to ``/none`` with no body."""
    body, is_last = b"", False
    while not is_last:
        part, is_last = await exchange.read()
        body += part
    path = exchange.head.path
    said = b"%b %b %b" % (exchange.head.method.encode(), path.encode(), body)
    if path == "/none":
        exchange.begin(204, (), None)
        exchange.finish()
    elif path == "/pieces":
        exchange.begin(200, (), None)
        for piece in (said, b"!"):
            exchange.write(piece)
            await exchange.drained()
        exchange.finish()
    else:
        exchange.answer(200, (), said)


class InTasks:
    """Serves each request in a task."""

    def __init__(self, app: Callable[[Exchange], Awaitable[None]]) -> None:
        self._app = app

    def serve(self, exchange: Exchange) -> None:
        exchange.spawn(self._serve(exchange))

    async def _serve(self, exchange: Exchange) -> None:
        with contextlib.suppress(ClientLeft):
            await self._app(exchange)

    def refuse(self, exchange: Exchange, error: InferdError) -> None:
        exchange.answer(kind_of(error).status, (), b"no")


class Taking:
    """Serves each request by a function."""

    def __init__(self, take: Callable[[Exchange], object]) -> None:
        self._take = take

    def serve(self, exchange: Exchange) -> None:
        self._take(exchange)

    def refuse(self, exchange: Exchange, error: InferdError) -> None:
        exchange.answer(kind_of(error).status, (), b"no")


class Socket:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def until(self, mark: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(mark), 10)

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), 10)


@contextlib.asynccontextmanager
async def socket_to(server: HttpServer) -> AsyncIterator[Socket]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield Socket(reader, writer)
    finally:
        writer.close()


def served(
    then: Callable[[HttpServer], Awaitable[None]],
    app: Callable[[Exchange], Awaitable[None]] = echo,
    **timeouts: float,
) -> None:
    async def main() -> None:
        server = HttpServer(InTasks(app), ServerConfig(port=0, grace_s=1), timeouts=Timeouts(**timeouts))
        async with server.running():
            await then(server)
        assert not server.connections

    asyncio.run(main())


def test_each_kind_of_request_gets_an_answer_framed_for_it() -> None:
    async def then(server: HttpServer) -> None:
        async with socket_to(server) as one:
            one.writer.write(b"GET /pieces HTTP/1.1\r\nhost: x\r\n\r\n")
            head = await one.until(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head
            assert await one.until(b"0\r\n\r\n") == b"c\r\nGET /pieces \r\n1\r\n!\r\n0\r\n\r\n"
            one.writer.write(b"HEAD /pieces HTTP/1.1\r\nhost: x\r\n\r\nGET /none HTTP/1.1\r\nhost: x\r\n\r\n")
            await one.until(b"\r\n\r\n")
            head = await one.until(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 204")
            assert b"content-length" not in head
            one.writer.write(b"HEAD /x%20y?q=1 HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"content-length: 10\r\n" in await one.until(b"\r\n\r\n")
            one.writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
            assert await one.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            one.writer.write(b"hello")
            await one.until(b"POST /a hello")
            one.writer.write(b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await one.rest()).endswith(b"\r\n\r\nGET /last ")

    served(then)


def test_an_old_client_gets_an_answer_that_ends_with_the_connection() -> None:
    async def then(server: HttpServer) -> None:
        async with socket_to(server) as one:
            one.writer.write(b"GET /pieces HTTP/1.0\r\n\r\n")
            head, _, body = (await one.rest()).partition(b"\r\n\r\n")
            assert b"connection: close" in head
            assert b"chunked" not in head
            assert body == b"GET /pieces !"

    served(then)


def test_500_clients_that_never_finish_their_headers_delay_no_other_and_are_cut_off() -> None:
    async def then(server: HttpServer) -> None:
        async with contextlib.AsyncExitStack() as stack:
            slow = [await stack.enter_async_context(socket_to(server)) for _ in range(500)]
            for one in slow:
                one.writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx-a: ")
            watch = Stopwatch()
            async with socket_to(server) as other:
                other.writer.write(b"GET /quick HTTP/1.1\r\nhost: x\r\n\r\n")
                await other.until(b"GET /quick ")
            assert watch.seconds < 1.0
            answers = await asyncio.gather(*(one.rest() for one in slow))
            assert {answer.split(b"\r\n")[0] for answer in answers} == {b"HTTP/1.1 408 Request Timeout"}
            async with socket_to(server) as other:
                other.writer.write(b"GET /after HTTP/1.1\r\nhost: x\r\n\r\n")
                await other.until(b"GET /after ")

    served(then, header_s=0.5)


def test_an_idle_connection_is_closed_after_a_while() -> None:
    async def then(server: HttpServer) -> None:
        async with socket_to(server) as one:
            one.writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n\r\n")
            assert (await one.rest()).endswith(b"GET /a ")

    served(then, keep_alive_s=0.2)


def test_the_rest_of_a_refused_body_is_read_for_a_while_only() -> None:
    async def refusing(exchange: Exchange) -> None:
        exchange.answer(413, (), b"")

    async def then(server: HttpServer) -> None:
        async with socket_to(server) as one:
            one.writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 999999\r\n\r\n")
            await one.until(b"\r\n\r\n")
            end = asyncio.ensure_future(one.rest())
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(10):
                    while not end.done():
                        one.writer.write(b"x")
                        await asyncio.wait((end,), timeout=0.02)
                assert end.result() == b""

    served(then, refusing, discard_s=0.3)


def test_a_client_that_takes_nothing_is_cut_off_and_the_application_learns_of_it() -> None:
    class Learns:
        is_disconnected = False

        def disconnected(self) -> None:
            self.is_disconnected = True

        def writable_changed(self, is_writable: bool) -> None: ...

    async def endless(exchange: Exchange) -> None:
        await exchange.read()
        exchange.begin(200, (), None)
        exchange.listener = listener = Learns()
        while not listener.is_disconnected:
            exchange.write(b"x" * 65_536)
            await exchange.drained()
            await asyncio.sleep(0)
        gone.set()

    gone = asyncio.Event()

    async def then(server: HttpServer) -> None:
        async with socket_to(server) as one:
            one.writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.wait_for(gone.wait(), 10)

    served(then, endless, send_s=0.3)


def test_a_defect_in_the_application_is_a_500_and_the_end_of_the_connection() -> None:
    async def broken(exchange: Exchange) -> None:
        raise KeyError("secret")

    async def then(server: HttpServer) -> None:
        async with socket_to(server) as one:
            one.writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
            received = await one.rest()
            assert received.startswith(b"HTTP/1.1 500 ")
            assert b"secret" not in received

    served(then, broken)


def test_headers_that_are_just_small_enough_are_taken_in_any_pieces() -> None:
    value = b"a" * (MAX_HEADER_BYTES - 100)
    data = b"GET /a HTTP/1.1\r\nhost: x\r\nx: " + value + b"\r\n\r\n"
    for cuts in ([], [10, 40_000], [len(data) - 3]):
        seen, _ = ours(data, cuts)
        assert seen == [("GET", b"/a", b"")]
    seen, wire = ours(data.replace(value, value + b"a" * 200), [])
    assert seen == []
    assert b" 431 " in wire.written


def with_headers(count: int, offered: bytes = b"") -> bytes:
    """A request of so many headers. ``offered``: the protocol that it offers to go on with."""
    offers = b"upgrade: %b\r\nconnection: upgrade\r\n" % offered if offered else b""
    rest = count - 1 - offers.count(b"\n")
    return b"GET /a HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * rest + offers + b"\r\n"


@pytest.mark.parametrize("offered", [b"", b"h2c", b"websocket"])
@pytest.mark.parametrize("cuts", [[], [100, 1000], [-1]])
def test_the_number_of_a_requests_headers_is_bounded(cuts: list[int], offered: bytes) -> None:
    for count in (MAX_HEADERS, MAX_HEADERS + 1, 20 * MAX_HEADERS):
        data = b"GET /first HTTP/1.1\r\nhost: x\r\n\r\n" + with_headers(count, offered)
        seen, wire = ours(data, [cut % len(data) for cut in cuts])
        first = ("GET", b"/first", b"")
        assert seen == ([first, ("GET", b"/a", b"")] if count <= MAX_HEADERS else [first])
        if count > MAX_HEADERS:
            assert wire.is_closed
            assert wire.written.count(b"HTTP/1.1 ") == 2
            assert b"HTTP/1.1 431 Request Header Fields Too Large\r\n" in wire.written
            assert b"The request has more than 512 headers; send fewer." in wire.written


CHUNKED = b"POST /a HTTP/1.1\r\nhost: x\r\nkept: yes\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n"


@pytest.mark.parametrize("cuts", [[], [len(CHUNKED)], [len(CHUNKED) + 3, len(CHUNKED) + 20]])
def test_a_trailer_is_never_taken_for_a_header(cuts: list[int]) -> None:
    headers = list[tuple[bytes, bytes]]()
    host = Host()

    def take(exchange: Exchange) -> bool:
        headers.extend(exchange.head.headers)
        return host._take(exchange)

    host.forward = take
    sent = CHUNKED + b"authorization: Bearer stolen\r\nkept: no\r\n\r\n"
    asyncio.run(fed(Connection(host), Wire(), sent, cuts))
    assert host.seen == [("POST", b"/a", b"hi")]
    assert headers == [(b"host", b"x"), (b"kept", b"yes"), (b"transfer-encoding", b"chunked")]


@pytest.mark.parametrize(
    "endless", [b"a: b\r\n" * 1000, b"a: " + b"b" * 4096, b"1;" + b"e" * 4096], ids=["trailers", "trailer", "extension"]
)
def test_what_comes_with_a_body_and_is_none_is_bounded(endless: bytes) -> None:
    host, wire = Host(), Wire()
    connection = Connection(host)
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.data_received(CHUNKED.removesuffix(b"0\r\n") if endless.startswith(b"1;") else CHUNKED)
    num_bytes = 0
    while not wire.is_closed:
        connection.data_received(endless if not num_bytes or b"\n" in endless else endless[-1:] * 4096)
        num_bytes += len(endless)
        assert num_bytes < 2 * MAX_HEADER_BYTES
    assert wire.written.startswith(b"HTTP/1.1 431 ")


def test_a_body_in_many_small_chunks_is_a_body() -> None:
    seen, wire = ours(
        CHUNKED.removesuffix(b"0\r\n") + b"1;x=y\r\n.\r\n" * MAX_HEADER_BYTES + b"0\r\n\r\n", [70, 300_000, 600_000]
    )
    assert [len(body) for _, _, body in seen] == [2 + MAX_HEADER_BYTES]
    assert not wire.is_closed


def test_a_request_that_comes_in_two_parts_behind_others_is_read_to_its_end() -> None:
    first = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        if exchange.head.path == "/first":
            await first.wait()
        await echo(exchange)

    async def then(server: HttpServer) -> None:
        async with socket_to(server) as one:
            for path in (b"/first", *[b"/next"] * (PIPELINE_AHEAD - 1)):
                one.writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path)
            one.writer.write(b"POST /second HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n")
            while not any(cast(Connection, one)._is_read_paused for one in server.connections):
                await asyncio.sleep(0.01)
            one.writer.write(b"hello")
            first.set()
            await one.until(b"GET /first ")
            await one.until(b"POST /second hello")

    served(then, slow)


def test_a_body_that_nothing_reads_is_read_past_when_its_request_is_answered() -> None:
    may_answer = asyncio.Event()

    async def unread(exchange: Exchange) -> None:
        await may_answer.wait()
        exchange.answer(200, (), exchange.head.path.encode())

    async def then(server: HttpServer) -> None:
        async with socket_to(server) as one:
            size = 4 * READ_AHEAD_BYTES
            one.writer.write(b"POST /first HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
            one.writer.write(bytes(size))
            while not any(cast(Connection, one)._is_read_paused for one in server.connections):
                await asyncio.sleep(0.01)
            may_answer.set()
            await one.until(b"/first")
            one.writer.write(b"GET /second HTTP/1.1\r\nhost: x\r\n\r\n")
            await one.until(b"/second")

    served(then, unread)


def test_half_of_a_head_behind_a_request_does_not_cut_its_answer() -> None:
    async def slow(exchange: Exchange) -> None:
        if exchange.head.path == "/slow":
            await given_up.wait()
        await echo(exchange)

    given_up = asyncio.Event()

    async def then(server: HttpServer) -> None:
        async with socket_to(server) as one:
            one.writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\nGET /half HTTP/1.1\r\nho")
            while not any(cast(Connection, one)._final_refusal for one in server.connections):
                await asyncio.sleep(0.01)
            given_up.set()
            received = await one.rest()
            assert received.startswith(b"HTTP/1.1 200")
            assert received.index(b"GET /slow ") < received.index(b"HTTP/1.1 408")

    served(then, slow, header_s=0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says whose process a Unix socket's client is")
def test_the_client_of_a_unix_socket_is_a_user_and_that_of_tcp_is_not() -> None:
    seen: list[int | None] = []

    async def asked(accepted: socket.socket, client: socket.socket) -> None:
        host, answered = Host(), asyncio.Event()

        def forward(exchange: Exchange) -> None:
            seen.append(exchange.peer_uid)
            answered.set()

        host.forward = forward
        with client:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(lambda: Connection(host), accepted)
            client.sendall(WHOLE[0])
            await answered.wait()
            transport.abort()

    async def main() -> None:
        await asked(*socket.socketpair(socket.AF_UNIX))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            client = socket.create_connection(listening.getsockname())
            await asked(listening.accept()[0], client)

    asyncio.run(main())
    assert seen == [os.getuid(), None]


def test_the_headers_of_a_request_that_waits_unread_are_not_too_slow() -> None:
    host, wire = Host(), Wire()
    answered = list[Exchange]()
    host.forward = answered.append

    async def main() -> None:
        connection = Connection(host)
        connection.connection_made(wire)  # type: ignore[arg-type]
        connection.data_received(WHOLE[0] * (PIPELINE_AHEAD + 1) + WHOLE[0][:10])
        assert wire.is_paused
        for _ in range(3):
            connection.check_timeouts(clock.now() + 2 * host.timeouts.header_s)
        for number in range(PIPELINE_AHEAD + 1):
            answered[number].take_body()
            answered[number].answer(200, (), b"ok")
            await asyncio.sleep(0)  # the next one is begun in a turn of its own
        connection.data_received(WHOLE[0][10:])
        assert len(answered) == PIPELINE_AHEAD + 2
        assert not wire.is_closed

    asyncio.run(main())


def test_a_client_that_takes_no_answers_is_answered_no_further() -> None:
    host, wire = Host(), Wire()

    async def main() -> None:
        connection = Connection(host)
        connection.connection_made(wire)  # type: ignore[arg-type]
        connection.data_received(WHOLE[0])
        connection.pause_writing()
        connection.data_received(WHOLE[0] * 5000)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(host.seen) == 1
        assert wire.is_paused
        connection.resume_writing()
        while wire.is_paused:
            await asyncio.sleep(0)
        assert wire.written.count(b"HTTP/1.1 200") == 5001
        assert not wire.is_closed

    asyncio.run(main())


def test_a_client_that_takes_no_answers_is_answered_no_further_over_a_socket() -> None:
    async def then(server: HttpServer) -> None:
        def take(exchange: Exchange) -> bool:
            exchange.take_body()
            exchange.answer(200, (), b"x" * 1024)
            return True

        server.app = Taking(take)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        for _ in range(64):  # 3.4 MB, whose answers are 100 MB
            writer.write(WHOLE[0] * 2000)
        while not server.connections:
            await asyncio.sleep(0.01)
        (one,) = server.connections
        connection = cast(Connection, one)
        while not connection._is_read_paused or connection.is_writable:
            await asyncio.sleep(0.01)
        assert connection._transport.get_write_buffer_size() <= 2 * WRITE_AHEAD_BYTES
        received = 0
        tail = b""
        while received < 64 * 2000:
            piece = tail + await reader.read(2**16)
            received += piece.count(b"HTTP/1.1 200")
            tail = piece[-11:]  # shorter than what is counted
        writer.close()

    served(then)


def test_a_request_sent_ahead_may_take_longer_than_a_connection_may_be_idle() -> None:
    host, wire = Host(), Wire()
    begun = list[Exchange]()
    host.forward = begun.append

    async def main() -> None:
        connection = Connection(host)
        connection.connection_made(wire)  # type: ignore[arg-type]
        connection.data_received(2 * WHOLE[0])
        begun[0].take_body()
        begun[0].answer(200, (), b"ok")
        await asyncio.sleep(0)
        assert len(begun) == 2
        connection.check_timeouts(clock.now() + host.timeouts.keep_alive_s + 1)
        assert not wire.is_closed

    asyncio.run(main())


def test_a_client_may_be_seen_to_leave_whose_last_request_came_behind_many() -> None:
    host, wire = Host(), Wire()
    last = list[Exchange]()

    def take(exchange: Exchange) -> bool:
        if exchange.keep_alive:
            return host._take(exchange)
        last.append(exchange)
        return True

    host.forward = take

    async def main() -> None:
        connection = Connection(host)
        connection.connection_made(wire)  # type: ignore[arg-type]
        closing = WHOLE[0].replace(b"host: x\r\n", b"host: x\r\nconnection: close\r\nx: %b\r\n" % (b"y" * SLICE_BYTES))
        connection.data_received(WHOLE[0] * REQUESTS_PER_TURN + closing)  # which is read in a turn of its own
        while not last:
            assert wire.is_paused
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not wire.is_paused

    asyncio.run(main())


def test_a_client_that_reads_nothing_holds_little_of_the_kernels_memory() -> None:
    async def endless(exchange: Exchange) -> None:
        exchange.begin(200, (), None)
        for _ in range(1024):
            exchange.write(b"x" * 16_384)
            await exchange.drained()
            if exchange.is_disconnected:
                return
        took_all.append(True)

    took_all: list[bool] = []

    async def then(server: HttpServer) -> None:
        raw = socket.create_connection(("127.0.0.1", server.port))
        with raw:
            raw.sendall(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
            while not server.connections:
                await asyncio.sleep(0.01)
            (one,) = server.connections
            connection = cast(Connection, one)
            before = -1
            while before != (unsent := unsent_bytes(connection)) or connection.is_writable:
                before = unsent
                await asyncio.sleep(0.05)
            assert unsent <= 2 * UNSENT_BYTES
            assert connection._transport.get_write_buffer_size() <= 2 * WRITE_AHEAD_BYTES
            assert not took_all, "16 MiB were taken, and nothing was read"

    served(then, endless)


def unsent_bytes(connection: Connection) -> int:
    """What the kernel holds of what was written: not sent, or sent and not acknowledged."""
    given = fcntl.ioctl(connection._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, b"\0" * 4)
    (count,) = struct.unpack("i", given)
    return int(count)
