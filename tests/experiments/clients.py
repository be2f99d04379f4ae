"""Clients that leave, crawl, stall, or speak something else (F20 to F27)."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from tests.experiments.catalogue import experiment
from tests.experiments.client import Stream, exchange, head
from tests.experiments.field import Field, Server, together
from tests.stopwatch import Stopwatch

SLOW = "pace=0.02"
LONG = 5000  # tokens; with SLOW over a minute


@experiment(
    "F20",
    injects="clients leave in the middle of a stream: FIN, RST, and one with n = 3",
    holds="their sequences stop and nothing is in flight within 1 s",
    control="a stream's cancellation does nothing",
    red="still in flight",
    tier="everyday",
)
def leaving_mid_stream(field: Field) -> None:
    with field.serve(defects=("streams_are_never_cancelled",)) as server:
        streams = [Stream(server.client, SLOW, max_tokens=LONG, n=n) for n in (1, 1, 3)]
        for stream in streams:
            stream.first()
        streams[0].leave()
        streams[1].reset()
        streams[2].leave()
        took = _idle_after(server)
        assert took <= 1.0, f"requests of clients that left are still in flight after {took:.1f} s"
        assert server.metrics().sum("inferd_requests_total", outcome="cancelled") == 3


def _idle_after(server: Server, most_s: float = 3.0) -> float:
    """Seconds until nothing is in flight; ``most_s`` where that does not come true."""
    began = Stopwatch()
    while server.metrics().sum("inferd_in_flight") and began.seconds < most_s:
        time.sleep(0.01)
    return began.seconds


@experiment(
    "F21",
    injects="a client leaves while its request waits in the queue",
    holds="the request is never computed",
    control="a stream's cancellation does nothing",
    red="was computed",
    tier="everyday",
)
def leaving_the_queue(field: Field) -> None:
    gate, mark = field.folder / "gate", field.folder / "mark"
    with field.serve(defects=("streams_are_never_cancelled",)) as server:
        with contextlib.ExitStack() as stack:
            # More than the replica is given at once, so that the last one waits in the gateway's queue.
            holders = [stack.enter_context(_asked(server, f"gate={gate}")) for _ in range(12)]
            waiting = stack.enter_context(_asked(server, f"mark={mark}"))
            server.until(lambda: _inside(server) == 13, "everything has arrived")
            waiting.close()
            time.sleep(0.3)  # the loss of a connection has no echo to wait for
            gate.touch()
            for holder in holders:
                assert b"200 OK" in holder.recv(65536)
        server.until(lambda: _inside(server) == 0, "nothing is left")
        assert not mark.exists(), "a request whose client had left the queue was computed"


@contextlib.contextmanager
def _asked(server: Server, prompt: str) -> Iterator[socket.socket]:
    """A unary completion that was sent and not waited for."""
    body = b'{"model": "tiny", "prompt": "%b", "max_tokens": 2}' % prompt.encode()
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        connection.sendall(head("POST", "/v1/completions", "content-type: application/json", body=body))
        server.tally.cut()  # its usage is not read
        yield connection


def _inside(server: Server) -> float:
    page = server.metrics()
    return page.sum("inferd_queue_waiting") + page.sum("inferd_in_flight")


@experiment(
    "F22",
    injects="200 clients ask for long answers and give up after 0.5 s",
    holds="the next short request is answered within 5 s",
    control="a stream's cancellation does nothing",
    red="short request",
)
def giving_up(field: Field) -> None:
    with field.serve(defects=("streams_are_never_cancelled",)) as server:

        def give_up(_: int) -> None:
            with contextlib.suppress(TimeoutError):
                server.client.complete(SLOW, max_tokens=LONG, seconds=0.5)

        together(200, give_up)
        began = Stopwatch()
        try:
            answer = server.client.complete("hello", seconds=8)
        except TimeoutError:
            raise AssertionError("the short request was not answered within 8 s") from None
        took = began.seconds
        assert answer.status == 200
        assert took <= 5.0, f"the short request took {took:.1f} s"


@experiment(
    "F24",
    injects="500 connections that send their headers a byte at a time, or nothing",
    holds="others are answered within 1 s meanwhile, and the slow ones are closed with 408",
    control="the time for headers is an hour",
    red="slow connections are still open",
)
def slow_headers(field: Field) -> None:
    # The limit is 30 s by default; a test waits for a shorter one.
    with field.serve(env={"EXPERIMENT_HEADER_S": field.either("3", "3600")}) as server:
        slow = [socket.create_connection((server.host, server.port), timeout=10) for _ in range(500)]
        try:
            began = time.monotonic()
            for letter in b"POST /v1/completions HTTP/1.1\r\nx-slow: ":
                for connection in slow[::2]:
                    with contextlib.suppress(OSError):
                        connection.send(bytes([letter]))
                asked = Stopwatch()
                assert server.client.complete("hello").status == 200
                assert asked.seconds < 1.0, "others wait for the slow"
                if time.monotonic() - began > 2.0:
                    break
            deadline = time.monotonic() + 8.0
            for connection in slow:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    while connection.recv(4096):
                        pass
                except TimeoutError:
                    raise AssertionError("slow connections are still open after the time for headers") from None
                except ConnectionError:
                    pass
        finally:
            for connection in slow:
                connection.close()


@experiment(
    "F25",
    injects="a connection whose other end may vanish without a word",
    holds="the kernel probes idle connections (keep-alive timer), and a client that takes nothing is cut off",
    control="accepted sockets are not probed",
    red="no keep-alive timer",
    tier="everyday",
)
def half_open(field: Field) -> None:
    with (
        field.serve(defects=("dead_peers_are_not_looked_for",)) as server,
        socket.create_connection((server.host, server.port)) as idle,
    ):
        own = idle.getsockname()[1]
        server.until(lambda: _timer(server.port, own) is not None, "the connection is accepted")
        assert _timer(server.port, own) == "02", "the server's end of an idle connection has no keep-alive timer"


def _timer(local_port: int, remote_port: int) -> str | None:
    """Which timer the kernel runs for a connection (02: keep-alive); None: there is no such connection."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        ports = [int(address.rpartition(":")[2], 16) for address in fields[1:3]]
        if ports == [local_port, remote_port] and fields[3] == "01":
            return fields[5].partition(":")[0]
    return None


@experiment(
    "F26",
    injects="HTTP/1.0, HEAD, Expect: 100-continue, a pipeline of three, a half-closed connection",
    holds="each is answered as its specification says",
    control="a server that closes after the first answer and knows no HEAD",
    red="HEAD|pipelin",
    tier="everyday",
)
def odd_http(field: Field) -> None:
    with field.serve() as server, contextlib.ExitStack() as stack:
        host, port = (server.host, server.port) if not field.is_control else stack.enter_context(_plain_server())
        old = exchange(host, port, b"GET /health/live HTTP/1.0\r\n\r\n")
        assert old.startswith(b"HTTP/1.") and b" 200 " in old, "HTTP/1.0"  # noqa: PT018
        without_body = exchange(host, port, head("HEAD", "/health/live", "connection: close"))
        assert without_body.partition(b"\r\n\r\n")[2] == b"", "HEAD is answered with a body"
        assert b" 200 " in without_body, "HEAD"
        body = b'{"model": "tiny", "prompt": "hello", "max_tokens": 2}'
        lines = (
            "content-type: application/json",
            f"content-length: {len(body)}",
            "expect: 100-continue",
            "connection: close",
        )
        with socket.create_connection((host, port), timeout=10) as connection:
            connection.sendall(head("POST", "/v1/completions", *lines))
            assert b"100 Continue" in connection.recv(4096), "Expect is not answered"
            connection.sendall(body)
            answered = b""
            while chunk := connection.recv(65536):
                answered += chunk
            assert b" 200 " in answered, "the body after 100-continue"
            server.tally.cut()
        get = head("GET", "/health/live")
        several = exchange(host, port, get + get + head("GET", "/health/live", "connection: close"))
        assert several.count(b"HTTP/1.1 200") == 3, "a pipeline of three has other than three answers"
        half = exchange(host, port, head("GET", "/health/live", "connection: close"), half_close=True)
        assert b" 200 " in half, "a client that only closed its sending side is not answered"


@contextlib.contextmanager
def _plain_server() -> Iterator[tuple[str, int]]:
    """One fixed answer to whatever comes, then the connection closes."""
    import threading

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[:2]
        listener.shutdown(socket.SHUT_RDWR)


@experiment(
    "F27",
    injects="HTTP/2 prefaces, a flood of pings, an oversized frame",
    holds="each connection is closed at once, nothing is left of it: this port speaks HTTP/1.1 alone (that of gRPC: tests/gateway/grpc/test_grpc_calls.py)",
    control="the connections are kept open by the client's side of the check",
    red="descriptors",
)
def http2(field: Field) -> None:
    with field.serve() as server:
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        ping = bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + b"inferd!!"
        oversized = bytes([255, 255, 255, 0, 0, 0, 0, 0, 1]) + b"x" * 65536
        for sent in (preface, preface + ping * 5000, preface + oversized):
            for _ in range(10):
                received = exchange(server.host, server.port, sent, seconds=5)
                assert received == b"" or b" 400 " in received or b" 505 " in received, received[:200]
        held = [socket.create_connection((server.host, server.port)) for _ in range(field.either(0, 20))]
        try:
            server.check()
        finally:
            for connection in held:
                connection.close()
