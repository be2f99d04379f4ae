"""Heads of requests that come again are found by their bytes: they are served as if they had been read."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.gateway.fakes import FakeDoor, Running, running
from tests.http.test_http_framing import Host, Wire
from tests.tiers import THOROUGH

from inferd.config import Config, ServerConfig
from inferd.head_pattern import SplitHead
from inferd.http.connection import Connection
from inferd.http.exchange import Exchange
from inferd.http.head import MAX_CACHED_HEAD_BYTES, MAX_CACHED_HEADS, HeadCache, RequestHead
from inferd.tenancy.principal import Principal
from inferd.types import Chat

LINES = [
    b"Content-Length: %d",
    b"content-length: %d",
    b"content-length:%d",
    b"content-length: 0%d",
    b"x-length: 9",
    b"x-content-length: 3",
    b"Inference-Header-Content-Length: 5",
    b"accept: ength: 7",
    b"connection: close",
    b"connection: keep-alive",
    b"expect: 100-continue",
    b"transfer-encoding: chunked",
    b"trailer: a",
    b"te: trailers",
    b"upgrade: h2c",
    b"a: b",
    b"a:  c ",
    b"A: d",
]
FIRST = [
    b"POST /a?b HTTP/1.1",
    b"POST /%61 HTTP/1.1",
    b"GET /length: HTTP/1.1",
    b"POST /a?length:%205 HTTP/1.1",
    b"POST /a HTTP/1.0",
    b"HEAD /a HTTP/1.1",
]


def message(first: bytes, lines: list[bytes], body: bytes) -> bytes:
    filled = [line.replace(b"%d", b"%d" % len(body)) for line in lines]
    end = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if b"transfer-encoding: chunked" in lines and body else body
    return b"\r\n".join([first, b"host: a", *filled]) + b"\r\n\r\n" + end


class Noting(Host):
    """Writes down all that an application can see of a request, and answers at once."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.heads = HeadCache()
        self.forward = self._note

    def _note(self, exchange: Exchange) -> bool:
        head, body = exchange.head, exchange.take_body()
        headers = [(name, value) for name, value in head.headers if name != b"content-length"]
        self.found.append(
            (
                head.method,
                head.path,
                head.query,
                head.http_version,
                headers,
                body,
                exchange.keep_alive,
                head.count(b"a"),
            )
        )
        exchange.answer(200, (), body)
        return True


def heard(messages: list[bytes], cuts: list[int], *, knows: bool) -> tuple[list[Any], bytes]:
    """What the application saw, and what the client, of messages in pieces of these sizes."""

    async def main() -> tuple[list[Any], bytes]:
        host, wire = Noting(), Wire()
        connection = Connection(host)
        connection.connection_made(cast(asyncio.Transport, wire))
        turn = 0
        for one in messages:
            at = 0
            if not knows:
                connection._heads = HeadCache()
            while at < len(one) and not wire.is_closed:
                size = cuts[turn % len(cuts)]
                turn += 1
                connection.data_received(one[at : at + size])
                at += size
            await asyncio.sleep(0)
        said = bytes(wire.written)
        connection.connection_lost(None)
        return host.found, said

    return asyncio.run(main())


def without_dates(said: bytes) -> list[bytes]:
    return [line for line in said.split(b"\r\n") if not line.startswith(b"date: ")]


HEADS = st.tuples(
    st.sampled_from([FIRST[0], *FIRST]), st.lists(st.sampled_from([LINES[0], LINES[1], *LINES]), max_size=4)
)
BODIES = st.lists(st.sampled_from([0, 0, 1, 3, 5, 7, 9, 12]).map(bytes), min_size=1, max_size=3)  # lines name some


@THOROUGH
@settings(max_examples=400, deadline=None)
@given(
    st.lists(HEADS, min_size=1, max_size=3),
    BODIES,
    st.lists(st.sampled_from([1, 7, 30, 10_000, 10_000, 10_000]), min_size=1, max_size=4),
)
@example([(FIRST[0], [b"accept: ength: 7", b"x-length: 9"])], [b"", bytes(9)], [10_000])
@example([(FIRST[0], [b"accept: ength: 7", LINES[0]])], [bytes(12), bytes(7)], [10_000])
def test_a_known_head_is_served_as_one_that_is_read(
    some: list[tuple[bytes, list[bytes]]], bodies: list[bytes], cuts: list[int]
) -> None:
    often = [message(*one, body) for one in some for body in (bodies[0], *bodies)]
    found, said = heard(often, cuts, knows=True)
    expected, told = heard(often, cuts, knows=False)
    assert found == expected
    assert without_dates(said) == without_dates(told)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(LINES[2:]), max_size=3),
    st.lists(st.integers(0, 300).map(bytes), min_size=2, max_size=5),
)
def test_bodies_of_every_length_have_one_known_head(lines: list[bytes], bodies: list[bytes]) -> None:
    messages = [message(FIRST[0], [LINES[0], *lines], body) for body in bodies]
    assert heard(messages, [10_000], knows=True)[0] == heard(messages, [10_000], knows=False)[0]


def head_of(number: int, length: int = 2) -> tuple[bytes, RequestHead]:
    raw = b"POST /%d HTTP/1.1\r\nhost: a\r\ncontent-length: %d" % (number, length)
    headers = [(b"host", b"a"), (b"content-length", b"%d" % length)]
    return raw, RequestHead("POST", b"/%d" % number, headers, "1.1")


def test_heads_that_never_come_again_do_not_drive_out_those_that_do() -> None:
    known = HeadCache()
    raw, head = head_of(0)
    known.add(raw, head)
    for number in range(1, 6 * MAX_CACHED_HEADS):
        known.add(*head_of(number))
        if number % (MAX_CACHED_HEADS // 2) == 0:
            assert known.find(raw + b"\r\n\r\nok") == (head, b"ok")
    found = [
        number for number in range(6 * MAX_CACHED_HEADS) if known.find(head_of(number)[0] + b"\r\n\r\nok") is not None
    ]
    assert found[0] == 0
    assert len(found) <= 2 * MAX_CACHED_HEADS + 1
    assert 6 * MAX_CACHED_HEADS - 1 in found


def test_a_head_is_found_only_with_all_of_its_body_and_nothing_behind() -> None:
    known = HeadCache()
    raw, head = head_of(0)
    known.add(raw, head)
    for length in (0, 1, 9, 10, 12345):
        found = head_of(0, length)[0] + b"\r\n\r\n" + bytes(length)
        assert known.find(found) == (head, bytes(length))
        assert known.find(found + b"x") is None
        if length:
            assert known.find(found[:-1]) is None
    assert known.find(head_of(1)[0] + b"\r\n\r\nok") is None
    assert known.find(raw) is None


@pytest.mark.parametrize(
    "line", ["expect: 100-continue", "upgrade: h2c", "transfer-encoding: chunked", "http2-settings: x", "trailer: a"]
)
def test_a_head_whose_meaning_is_not_in_its_bytes_alone_is_not_kept(line: str) -> None:
    known = HeadCache()
    name, _, value = line.partition(": ")
    raw, plain = head_of(0)
    raw += b"\r\n" + line.encode()
    known.add(raw, RequestHead("POST", b"/0", [*plain.headers, (name.encode(), value.encode())], "1.1"))
    assert known.find(raw + b"\r\n\r\nok") is None


def test_a_large_head_is_served_and_not_kept() -> None:
    large = b"x: " + b"y" * MAX_CACHED_HEAD_BYTES
    messages = [message(FIRST[0], [LINES[0], large], b"ok")] * 3
    assert heard(messages, [10_000], knows=True)[0] == heard(messages, [10_000], knows=False)[0]


# -- what the gateway notes about a head -------------------------------------------------------------

CHAT = b'{"messages": [{"role": "user", "content": "hi"}]}'
KEY = "authorization: Bearer good"
PATH = "/v1/chat/completions"


class Client:
    """One connection, on which each request is written in one piece."""

    def __init__(self, server: Running) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        self._file = self._socket.makefile("rb")

    def ask(
        self, body: bytes, *headers: str, path: str = PATH, method: str = "POST"
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers, and the answer's JSON."""
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", *headers, f"content-length: {len(body)}"]
        self._socket.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        status = int(self._file.readline().split()[1])
        found: dict[str, str] = {}
        while line := self._file.readline().strip():
            name, _, value = line.decode().partition(": ")
            found[name] = value
        answer = self._file.read(int(found["content-length"]))
        return status, found, json.loads(answer) if answer else None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()


def test_a_key_that_is_revoked_is_refused_at_once_where_its_head_is_known() -> None:
    door = FakeDoor({"good": Principal(tenant="t", key_id="k")})
    with running(door=door) as server, Client(server) as client:
        for _ in range(3):
            assert client.ask(CHAT, KEY)[0] == 200
        principal = door.keys.pop("good")
        for _ in range(2):
            status, _, answer = client.ask(CHAT, KEY)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
        door.keys["good"] = principal
        assert client.ask(CHAT, KEY)[0] == 200
        assert door.asked == ["good"] * 6


def test_what_a_key_may_do_is_asked_for_every_request() -> None:
    door = FakeDoor({"good": Principal(tenant="t", key_id="k")})
    with running(door=door) as server, Client(server) as client:
        for _ in range(3):
            assert client.ask(CHAT, KEY)[0] == 200
        door.keys["good"] = Principal(tenant="t", key_id="k", scopes=frozenset({"metrics"}))
        assert client.ask(CHAT, KEY)[0] == 403


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
def test_what_needs_no_key_needs_none_where_its_head_is_known(path: str) -> None:
    """Also where it comes with a body's length."""
    door = FakeDoor({})
    with running(door=door) as server, Client(server) as client:
        statuses = [client.ask(b"", path=path, method="GET")[0] for _ in range(4)]
        assert statuses == [200] * 4
        assert door.asked == []


def test_a_reload_applies_to_cached_heads_as_well() -> None:
    with running() as server, Client(server) as client:

        def cors_headers() -> str | None:
            status, headers, _ = client.ask(CHAT, "origin: https://page.example")
            return headers.get("access-control-allow-origin") if status == 200 else f"{status}"

        def configure(*origins: str) -> None:
            async def change() -> None:
                server.app.configure(Config(server=ServerConfig(cors_origins=origins), models={}))

            asyncio.run_coroutine_threadsafe(change(), server.loop).result(10)

        for _ in range(2):
            configure("https://page.example")
            assert [cors_headers() for _ in range(3)] == ["https://page.example"] * 3
            configure()
            assert [cors_headers() for _ in range(3)] == ["403"] * 3


def test_a_known_head_has_its_own_body_and_its_own_name() -> None:
    with running() as server, Client(server) as client:
        names = set()
        for number in range(4):
            content = "x" * (100 * number)
            body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
            status, headers, _ = client.ask(body)
            assert status == 200
            names.add(headers["x-request-id"])
            prompt = server.router.last.prompt
            assert isinstance(prompt, Chat)
            assert prompt.messages[0]["content"] == content
        assert len(names) == 4


@given(st.lists(st.sampled_from([b"a: b", b"x: " + b"c" * 30]), max_size=2), st.integers(0, 120), st.integers(0, 120))
@example([], 8, 0)  # fewer bytes, by twice the length of what follows the number
def test_a_known_head_is_found_again_where_its_whole_body_is_there(after: list[bytes], length: int, came: int) -> None:
    lines = b"".join(b"\r\n" + line for line in after)
    known = SplitHead(b"POST / HTTP/1.1\r\ncontent-length: 7" + lines)
    head = b"POST / HTTP/1.1\r\ncontent-length: %d" % length + lines + b"\r\n\r\n"
    assert known.body_at(head + b"x" * came) == (len(head) if came == length else -1)
    assert known.body_at(head.replace(b"POST", b"HEAD") + b"x" * came) == -1
