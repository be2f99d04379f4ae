"""Bare sockets: framing, early goodbyes, floods, and methods and paths that do not exist."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from urllib.parse import unquote

import httpx
import pytest
from tests.gateway.fakes import FakeRouter, Running, post, running
from tests.stopwatch import Stopwatch

from inferd.config import ServerConfig
from inferd.errors import ConfigError
from inferd.events import ClientTurnedAway
from inferd.http.limits import MAX_HEADER_BYTES
from inferd.http.listener import MAX_REJECTED, bind
from inferd.http.upgrade import address_of
from inferd.types import Delta, End, Output, PromptReport, Usage

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with running(config=ServerConfig(port=0, grace_s=1, max_body_bytes=64 * 1024)) as started:
        yield started


@pytest.fixture
def server(shared_server: Running) -> Running:
    return shared_server.reset()


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def request(path: str, body: bytes, *extra: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *extra,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        piece = connection.recv(65536)
        if not piece:
            raise AssertionError(f"closed before {mark!r}: {received!r}")
        received += piece
    return received


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


def test_tokens_arrive_when_they_are_made(server: Running) -> None:
    server.router.script = None
    with connect(server) as connection:
        connection.sendall(request("/v1/chat/completions", BODY))
        assert server.router.submitted.acquire(timeout=10)
        stream = server.router.streams[0]
        for number, word in enumerate(["one", "two"]):
            report = PromptReport(1) if number == 0 else None
            server.put(stream, Output(stream.request.id, (Delta(0, word),), report))
            assert b'"content":"%b"' % word.encode() in read_until(connection, word.encode() + b'"}')
        server.put(stream, Output(stream.request.id, (Delta(0, finish_reason="stop"),), end=End("done", Usage(1, 2))))
        tail = read_until(connection, b"0\r\n\r\n")
        assert b"data: [DONE]\n\n" in tail
        assert tail.count(b"finish_reason") == 1


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_client_that_leaves_cancels_its_requests_at_once(server: Running, num_tokens: int, path: str) -> None:
    server.router.script = None
    body = BODY if "chat" in path else json.dumps({"prompt": ["a", "b"], "stream": True, "n": 2}).encode()
    num_streams = 1 if "chat" in path else 2
    with connect(server) as connection:
        connection.sendall(request(path, body))
        for _ in range(num_streams):
            assert server.router.submitted.acquire(timeout=10)
        if num_tokens:
            stream = server.router.streams[0]
            server.put(stream, Output(stream.request.id, (Delta(0, "one"),), PromptReport(1)))
            read_until(connection, b"one")
    watch = Stopwatch()
    assert all(stream.closed.wait(5) for stream in server.router.streams)
    assert watch.seconds < 1.0
    served = server.served()
    assert (served.status, served.outcome, len(server.events)) == (499, "cancelled", 1)


def test_a_client_that_leaves_a_unary_request_cancels_it(server: Running) -> None:
    server.router.script = None
    with connect(server) as connection:
        connection.sendall(request("/v1/completions", b'{"prompt": "a"}'))
        assert server.router.submitted.acquire(timeout=10)
    assert server.router.streams[0].closed.wait(5)
    assert server.served().status == 499


def test_a_client_that_leaves_before_its_body_is_complete_is_noted(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(request("/v1/completions", b'{"prompt": "a"}')[:-3])
    assert server.served().status == 499
    assert server.router.streams == []


def test_a_client_that_does_not_read_is_waited_for_and_not_buffered_for(server: Running) -> None:
    server.router.script = None
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.sendall(request("/v1/chat/completions", BODY))
        assert server.router.submitted.acquire(timeout=10)
        stream = server.router.streams[0]
        big = "x" * 100_000
        for number in range(200):
            server.put(stream, Output(stream.request.id, (Delta(0, big),), PromptReport(1) if number == 0 else None))
        server.put(stream, Output(stream.request.id, (Delta(0, finish_reason="stop"),), end=End("done", Usage(1, 200))))
        assert post(server, "/detokenize", {"tokens": [1]}).status_code == 200  # others are served meanwhile
        pieces: list[bytes] = []
        while not (pieces and pieces[-1].endswith(b"0\r\n\r\n")):
            pieces.append(connection.recv(1 << 20))
            assert pieces[-1], "closed early"
        assert b"".join(pieces).count(big.encode()) == 200


def test_a_client_more_than_there_may_be_is_told_so_and_the_others_are_served() -> None:
    asks = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with running(config=ServerConfig(port=0, grace_s=1, max_connections=2)) as server:
        kept = [connect(server), connect(server)]
        for one in kept:
            one.sendall(asks)
            assert read_until(one, b"}").startswith(b"HTTP/1.1 200")
        for _ in range(MAX_REJECTED + 10):
            with connect(server) as another:
                another.sendall(asks)
                refusal = read_all(another)
                assert refusal.startswith(b"HTTP/1.1 503 ")
                assert b"\r\nretry-after: 1\r\n" in refusal
                assert b"\r\nconnection: close\r\n" in refusal
                assert json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        assert server.events.count(ClientTurnedAway()) == MAX_REJECTED + 10
        kept[0].sendall(asks)
        assert read_until(kept[0], b"}").startswith(b"HTTP/1.1 200")
        kept.pop().close()
        with connect(server) as another:
            another.sendall(asks)
            assert read_until(another, b"}").startswith(b"HTTP/1.1 200")
        server.loop.call_soon_threadsafe(server.server.configure, ServerConfig(max_connections=3))
        assert server.http.get(server.url + "/health").status_code == 200
        kept.pop().close()


def test_several_requests_share_a_connection(server: Running) -> None:
    with httpx.Client() as client:
        for _ in range(3):
            assert client.get(server.url + "/health").status_code == 200
            assert client.post(server.url + "/v1/completions", json={"prompt": "a", "n": 0}).status_code == 400
            assert client.post(server.url + "/v1/completions", json={"prompt": "a"}).status_code == 200


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    with connect(server) as connection:
        first = request("/v1/completions", b'{"prompt": "a"}', "x-request-id: one")
        second = request("/v1/completions", b'{"prompt": "a"}', "x-request-id: two", "connection: close")
        connection.sendall(first + second)
        received = read_all(connection)
    assert received.index(b"x-request-id: one") < received.index(b"x-request-id: two")


def test_a_client_that_sent_ahead_and_left_cancels_what_was_running(server: Running) -> None:
    server.router.script = None
    with connect(server) as connection:
        connection.sendall(request("/v1/chat/completions", BODY) * 3)
        assert server.router.submitted.acquire(timeout=10)
    assert server.router.streams[0].closed.wait(5)
    assert server.served().status == 499
    assert len(server.router.streams) == 1


@pytest.mark.parametrize("at_once", [1, 5, 25])
def test_many_requests_may_be_sent_ahead(server: Running, at_once: int) -> None:
    one = request("/v1/completions", b'{"prompt": "a"}')
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(50 // at_once):
            connection.sendall(one * at_once)
        received = b""
        while received.count(b"HTTP/1.1 200 OK") < 50:
            piece = connection.recv(65536)
            assert piece, received[-500:]
            received += piece


@pytest.mark.parametrize("cut", [0, 40, 10_000])
@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_an_offer_of_another_protocol_is_declined_and_the_request_served(
    server: Running, protocol: str, cut: int
) -> None:
    offer = ("connection: Upgrade, HTTP2-Settings", f"upgrade: {protocol}", "http2-settings: AAA")
    whole = request("/v1/completions", b'{"prompt": "a"}', *offer)
    cut = whole.index(b"\r\n\r\n") + 4 if cut == 0 else cut
    with connect(server) as connection:
        for _ in range(2):
            connection.sendall(whole[:cut])
            connection.sendall(whole[cut:])
            received = read_until(connection, b"Hello world!")
            assert received.startswith(b"HTTP/1.1 200")
            assert b"connection: close" not in received
            while not received.endswith(b"}"):
                received += connection.recv(65536)
    assert [server.served().status for _ in range(2)] == [200, 200]


@pytest.mark.parametrize(
    "framing",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n", b"content-length: 5\r\ncontent-length: 6\r\n",
        b"transfer-encoding: xchunked\r\n", b"transfer-encoding: chunked, identity\r\n", b"host : x\r\n",
        b" folded: x\r\n",
    ],
)  # fmt: skip
def test_requests_that_two_servers_could_read_differently_are_refused(server: Running, framing: bytes) -> None:
    smuggled = b"0\r\n\r\nGET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + framing + b"\r\n" + smuggled)
        received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 400")
    assert received.count(b"\r\n\r\n") == 1


def test_garbage_behind_a_request_is_refused_behind_its_answer(server: Running) -> None:
    server.router.script = None
    with connect(server) as connection:
        connection.sendall(request("/v1/chat/completions", BODY))
        assert server.router.submitted.acquire(timeout=10)
        stream = server.router.streams[0]
        server.put(stream, Output(stream.request.id, (Delta(0, "one"),), PromptReport(1)))
        received = read_until(connection, b"one")
        connection.sendall(b"\x00garbage\r\n\r\n")
        server.put(
            stream, Output(stream.request.id, (Delta(0, "two", finish_reason="stop"),), end=End("done", Usage(1, 2)))
        )
        received += read_all(connection)
    answer, _, refusal = received.partition(b"0\r\n\r\n")
    assert b"[DONE]" in answer
    assert refusal.startswith(b"HTTP/1.1 400 ")
    assert server.served().status == 200


@pytest.mark.parametrize("is_waited_for", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_malformed_chunk_is_a_400_for_the_client_and_in_the_log(
    server: Running, path: str, is_waited_for: bool
) -> None:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", "transfer-encoding: chunked"]
    with connect(server) as connection:
        if is_waited_for:
            connection.sendall("\r\n".join([*lines, "expect: 100-continue", "", ""]).encode())
            read_until(connection, b"100 Continue\r\n\r\n")  # the endpoint reads the body
        else:
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
        connection.sendall(b'3\r\n{"a\r\nzz\r\n')
        received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == 1 + received.count(b"no valid HTTP/1.1")
    assert (served := server.served()).status == 400
    assert (served.route, served.error_code) == (path, "invalid_http")


def test_a_body_announced_too_large_is_refused_unread(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999999999999\r\n\r\n")
        assert b"413" in read_until(connection, b"request_too_large")


def test_a_chunked_body_is_refused_when_it_has_grown_too_large(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
        for _ in range(3):
            connection.sendall(chunk)
        assert b"413" in read_until(connection, b"request_too_large")


def test_a_client_that_writes_a_large_body_first_still_reads_the_refusal(server: Running) -> None:
    reply = post(server, "/v1/completions", b" " * 8_000_000)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
    assert server.served().status == 413


@pytest.mark.parametrize("length", ["abc", "-1", "1e3", ""])
def test_a_content_length_that_is_no_number_is_refused(server: Running, length: str) -> None:
    with connect(server) as connection:
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n".encode()
        )
        connection.shutdown(socket.SHUT_WR)
        received = read_all(connection)
        assert received == b"" or received.startswith(b"HTTP/1.1 400")


def test_bytes_that_are_no_http_get_a_400(server: Running) -> None:
    for garbage in (b"\x16\x03\x01garbage\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET  \r\n\r\n"):
        with connect(server) as connection:
            connection.sendall(garbage)
            assert read_all(connection).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "flood", [b"x: " + b"a" * 1_000_000, b"".join(b"x%d: y\r\n" % i for i in range(20_000))], ids=["one", "many"]
)
def test_a_flood_of_headers_is_refused_and_the_connection_closed(server: Running, flood: bytes) -> None:
    assert len(flood) > MAX_HEADER_BYTES
    with connect(server) as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\n" + flood)
            received = connection.recv(65536)
        except ConnectionError:
            received = b""  # closed while we were still writing
        assert received in (b"",) or b" 431 " in received
    assert server.http.get(server.url + "/health").status_code == 200


def test_headers_below_the_limit_are_taken(server: Running) -> None:
    assert server.http.get(server.url + "/health", headers={"x": "a" * 60_000}).status_code == 200
    assert server.http.get(server.url + "/health", headers={"x": "a" * 70_000}).status_code == 431


def test_head_gives_the_headers_of_get_and_no_body(server: Running) -> None:
    for path in ("/health", "/v1/models", "/openapi.json", "/docs", "/"):
        head, get = server.http.head(server.url + path), server.http.get(server.url + path)
        assert head.status_code == get.status_code == 200
        assert head.headers["content-length"] == get.headers["content-length"]
        assert head.content == b""


def test_options_say_what_is_allowed_and_nothing_of_other_origins(server: Running) -> None:
    reply = server.http.options(
        server.url + "/v1/models", headers={"origin": "http://evil", "access-control-request-method": "GET"}
    )
    assert (reply.status_code, reply.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
    assert not any(name.startswith("access-control") for name in reply.headers)


@pytest.mark.parametrize(("method", "path", "allow"), [
    ("GET", "/v1/chat/completions", "POST, OPTIONS"), ("DELETE", "/v1/models/tiny", "GET, HEAD, OPTIONS"),
    ("PUT", "/health", "GET, HEAD, OPTIONS"), ("TRACE", "/health", "GET, HEAD, OPTIONS"),
    ("PATCH", "/", "GET, POST, HEAD, OPTIONS"),
])  # fmt: skip
def test_a_wrong_method_is_told_the_right_ones(server: Running, method: str, path: str, allow: str) -> None:
    reply = server.http.request(method, server.url + path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allow)
    assert reply.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "path", ["/nope", "/v1", "/v1/", "/v1/models/", "/v1/chat", "/..%2f..%2fetc/passwd", "/%00", "//health", "/%ff"]
)
def test_an_unknown_path_is_a_404_in_the_usual_shape(server: Running, path: str) -> None:
    reply = server.http.get(server.url + path)
    assert reply.status_code == 404
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.headers["x-request-id"]
    event = server.served()
    assert (event.route, event.error_code) == ("unmatched", "route_not_found")
    assert unquote(event.path) == unquote(path).replace("\0", " ")
    assert event.error_text == reply.json()["error"]["message"]


def test_a_model_name_may_have_slashes() -> None:
    with running(FakeRouter("Qwen/Qwen3-0.6B")) as server:
        assert server.http.get(server.url + "/v1/models/Qwen/Qwen3-0.6B").json()["id"] == "Qwen/Qwen3-0.6B"
        assert server.http.get(server.url + "/v1/models/Qwen%2FQwen3-0.6B").json()["max_model_len"] == 128
        assert server.served().route == "/v1/models/{model}"
        assert server.http.get(server.url + "/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_requests_in_flight_may_finish_at_shutdown() -> None:
    router = FakeRouter()
    router.script = None
    with running(router) as server, connect(server) as connection:
        connection.sendall(request("/v1/chat/completions", BODY))
        assert server.router.submitted.acquire(timeout=10)
        stream = server.router.streams[0]
        server.put(stream, Output(stream.request.id, (Delta(0, "one"),), PromptReport(1)))
        read_until(connection, b"one")
        server.loop.call_soon_threadsafe(server.server.stop)
        server.put(
            stream, Output(stream.request.id, (Delta(0, "two", finish_reason="stop"),), end=End("done", Usage(1, 2)))
        )
        assert b"[DONE]" in read_all(connection)


def test_a_port_in_use_is_named_with_the_remedy(server: Running) -> None:
    with pytest.raises(ConfigError, match=f"Port {server.port} on 127.0.0.1 is in use"):
        bind(ServerConfig(port=server.port))
    with pytest.raises(ConfigError, match="Cannot listen on"):
        bind(ServerConfig(host="192.0.2.1", port=0))


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("192.0.2.1", 4711), "192.0.2.1"),
        (("2001:db8::1", 4711, 0, 0), "2001:db8::1"),
        ("/run/client", ""),
        ("", ""),
        ((), ""),
        (None, ""),
    ],
)
def test_the_address_of_a_client_is_without_its_port(peer: object, address: str) -> None:
    assert address_of(asyncio.BaseTransport({"peername": peer})) == address
