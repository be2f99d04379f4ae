"""How long is waited: for a model that loads, and for a client that does not read."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator

import openai
import pytest
from tests.gateway.fakes import FakeDoor, FakeRouter, Running, post, running, sse
from tests.stopwatch import Stopwatch

from inferd.config import ServerConfig
from inferd.errors import Unavailable
from inferd.events import HttpServed
from inferd.tenancy.principal import LOCAL
from inferd.types import Delta, End, GenerateRequest, Output, PromptReport, Usage

CHAT = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'


def head(body: bytes) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body)
    ) + body


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        piece = connection.recv(65536)
        assert piece, received
        received += piece
    return received


# -- a model that loads --------------------------------------------------------------------------


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr("inferd.gateway.generation.sse.HEARTBEAT_S", 0.05)
    router = FakeRouter()
    router.script = None
    router.statuses[0].replicas_ready = 0
    router.statuses[0].state = "loading"
    with running(router) as started:
        yield started


def deliver_whole_answer(server: Running) -> None:
    stream = server.router.streams[-1]
    end = End("done", Usage(1, 1))
    server.put(stream, Output(stream.request.id, (Delta(0, "here", (1,), None, "stop"),), PromptReport(1), end))


def test_a_stream_for_a_model_that_loads_is_kept_alive_by_comments(loading: Running) -> None:
    with connect(loading) as connection:
        connection.sendall(head(CHAT))
        begun = read_until(connection, b": the model is loading\n\n")
        assert begun.startswith(b"HTTP/1.1 200")
        read_until(connection, b": the model is loading\n\n")
        deliver_whole_answer(loading)
        assert b'"content":"here"' in read_until(connection, b"data: [DONE]\n\n")


def test_openais_client_reads_past_the_comments(loading: Running) -> None:
    client = openai.OpenAI(base_url=loading.url + "/v1", api_key="x", max_retries=0)
    with client.completions.create(model="tiny", prompt="x", stream=True) as chunks:
        deliver_whole_answer(loading)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "here"
    client.close()


def test_what_goes_wrong_after_a_comment_is_an_event(loading: Running) -> None:
    with connect(loading) as connection:
        connection.sendall(head(CHAT))
        read_until(connection, b": the model is loading\n\n")
        loading.put(loading.router.streams[0], Unavailable("It could not be loaded."))
        rest = read_until(connection, b"0\r\n\r\n")
    assert b'"message":"It could not be loaded."' in rest
    assert b"[DONE]" not in rest
    assert loading.served().error_code == "unavailable"


def test_what_goes_wrong_before_is_a_status(loading: Running) -> None:
    loading.router.script = lambda request: [Unavailable("It could not be loaded.")]
    assert post(loading, "/v1/completions", {"prompt": "x", "stream": True}).status_code == 503


def test_a_client_that_leaves_while_the_model_loads_is_forgotten(loading: Running) -> None:
    with connect(loading) as connection:
        connection.sendall(head(CHAT))
        read_until(connection, b": the model is loading\n\n")
    assert loading.router.streams[0].closed.wait(5)
    assert loading.served().status == 499


def test_a_model_that_is_ready_sends_no_comments(loading: Running) -> None:
    loading.router.statuses[0].replicas_ready = 1
    with connect(loading) as connection:
        connection.sendall(head(CHAT))
        assert loading.router.submitted.acquire(timeout=10)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10)
        deliver_whole_answer(loading)
        assert b"loading" not in read_until(connection, b"data: [DONE]\n\n")


def test_the_text_of_a_patient_answer_is_an_ordinary_stream(loading: Running) -> None:
    loading.router.script = FakeRouter().script
    reply = post(loading, "/v1/completions", {"prompt": "x", "stream": True})
    assert sse(reply.text)[-1] == "data: [DONE]"


# -- a client that sends slowly --------------------------------------------------------------------


def test_a_body_that_only_drips_is_refused_when_its_time_is_over() -> None:
    with running(config=ServerConfig(port=0, grace_s=1, body_timeout_s=0.4)) as server, connect(server) as connection:
        connection.sendall(head(b" " * 1_000_000)[:-999_000])
        received = b""
        began = time.monotonic()
        while not received and time.monotonic() - began < 10:
            connection.sendall(b" ")
            if select.select([connection], [], [], 0.02)[0]:
                received = connection.recv(65536)
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                received += piece
        assert received.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close\r\n" in received
        assert b"server.body_timeout_s" in received
        event = server.served()
        assert (event.status, event.error_code) == (408, "request_timeout")


def test_a_large_body_has_more_time_as_it_arrives() -> None:
    with running(config=ServerConfig(port=0, grace_s=1, body_timeout_s=0.2)) as server, connect(server) as connection:
        whole = head(CHAT + b" " * 500_000)  # is worth half a minute
        connection.sendall(whole[:-10])
        assert not select.select([connection], [], [], 0.6)[0], connection.recv(65536)
        connection.sendall(whole[-10:])
        read_until(connection, b"data: [DONE]\n\n")


# -- a client that does not read -----------------------------------------------------------------


def flood(request: GenerateRequest) -> list[Output]:
    """Much more than any buffer between here and the client."""
    pieces = [Output(request.id, (Delta(0, "x" * 100_000, (1,)),), PromptReport(1)) for _ in range(100)]
    end = Output(request.id, (Delta(0, finish_reason="stop"),), None, End("done", Usage(1, 100)))
    return [*pieces, end]


def received_of(connection: socket.socket) -> int:
    """Bytes until the connection ends, politely or not."""
    num_bytes = 0
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 20):
            num_bytes += len(piece)
    return num_bytes


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_takes_nothing_is_cut_off(stream: bool) -> None:
    door = FakeDoor({})
    door.authenticate = lambda token: LOCAL  # type: ignore[method-assign]
    body = CHAT if stream else CHAT.replace(b"true", b"false")
    with running(config=ServerConfig(port=0, grace_s=1, send_timeout_s=0.3), door=door) as server:
        server.router.script = flood
        with connect(server) as connection:
            connection.sendall(head(body))
            event = server.served()
            assert (event.status, event.response_bytes < 9_000_000) == (499, True)
            assert received_of(connection) < 9_000_000  # and then the connection's end
        assert server.router.streams[0].closed.is_set()
        (permit,) = door.permits
        assert permit.over.wait(10)


def test_slow_readers_delay_no_other_request_and_lose_their_places() -> None:
    with running(config=ServerConfig(port=0, grace_s=1, send_timeout_s=0.5)) as server:
        server.router.script = flood
        readers = [connect(server) for _ in range(20)]
        for reader in readers:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.sendall(head(CHAT))
        for _ in readers:
            assert server.router.submitted.acquire(timeout=10)
        server.router.script = FakeRouter().script
        watch = Stopwatch()
        assert post(server, "/v1/completions", {"prompt": "x"}).status_code == 200
        assert watch.seconds < 0.5
        for reader in readers:
            reader.recv(10)  # a few bytes now and then do not keep a place
        for _ in range(len(readers) + 1):
            assert server.emitted.acquire(timeout=10)
        statuses = sorted(event.status for event in server.events)  # type: ignore[union-attr]
        assert statuses == [200] + [499] * 20
        for reader in readers:
            reader.close()


def test_a_reader_that_is_only_slow_gets_everything() -> None:
    with running(config=ServerConfig(port=0, grace_s=1, send_timeout_s=2)) as server:
        server.router.script = lambda request: flood(request)[60:]
        with connect(server) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            connection.sendall(head(CHAT))
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                piece = connection.recv(65536)
                assert piece, len(received)
                received += piece
        assert received.count(b"x" * 100_000) == 40


def test_a_call_tells_how_long_its_reader_kept_it_waiting() -> None:
    with running(config=ServerConfig(port=0, grace_s=1, send_timeout_s=10)) as server:
        server.router.script = lambda request: flood(request)[60:]
        with connect(server) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            connection.sendall(head(CHAT))
            assert server.router.submitted.acquire(timeout=10)
            time.sleep(0.3)  # the answer waits meanwhile
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                piece = connection.recv(1 << 20)
                assert piece, len(received)
                received += piece
        assert server.emitted.acquire(timeout=10)
        server.router.script = FakeRouter().script
        assert post(server, "/v1/completions", {"prompt": "x"}).status_code == 200
        assert server.emitted.acquire(timeout=10)
        slow, quick = (event for event in server.events if isinstance(event, HttpServed))
        assert 0.2 < slow.blocked_s <= slow.duration_s
        assert quick.blocked_s == 0.0
        for event in (slow, quick):
            assert event.received_s is not None
            assert event.submitted_s is not None
            assert 0 <= event.received_s <= event.submitted_s <= event.duration_s
            assert event.end is not None
            assert event.started_at > 0
