"""Every route and every method under the bytes that cost it most: no turn of the event loop is long.

What is measured is the processor's time of the thread that the loop runs in, from one turn's timer to the next one's,
and that of other threads for a line of Python: such a line may keep the interpreter's lock from the loop. Programs
beside the tests share the processor's caches and its cores, so the time is divided by what they prolong a fixed piece
of work. Another client waits for no more than the turns before its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import pytest
from bench.hostile_bytes import Attack, flood_attacks, grpc_attacks, http1_floods, http_attacks, strike
from tests.gateway.fakes import FakeDoor, Running
from tests.gateway.fakes import running as http_running
from tests.gateway.grpc.client import Client, framed
from tests.gateway.grpc.running import GrpcRunning, PredictingRouter, infer_request
from tests.gateway.grpc.running import running as grpc_running
from tests.heap import freeze_heap, refreeze_heap
from tests.tiers import THOROUGH, sample
from tests.worker.watching import until_now

from inferd.cli.version import is_gateway_compiled
from inferd.gateway.body.decode_cost import MAX_DECODE_COST
from inferd.gateway.body.inflate import decompress
from inferd.gateway.routes import ROUTES
from inferd.tenancy.principal import GRANTABLE, Principal
from inferd.types import End, Output, Prediction, PredictRequest, Timings, Usage

LONGEST_S = 0.05
KEY = "good"


class Computing(PredictingRouter):
    """Answers without a look at what it is asked."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.answer = answered


def answered(request: PredictRequest) -> list[Output]:
    end = End("done", Usage(3), Timings(dispatched=0.001, finished=0.002))
    return [Output(request.id, (), None, end, Prediction(b'{"outputs":[]}'))]


def door() -> FakeDoor:
    return FakeDoor({KEY: Principal(key_id="k", tenant="t", scopes=frozenset(GRANTABLE))})


def model_of(pattern: str) -> str:
    """Of the router's two models the one that is asked in this way."""
    return "digits" if re.search("/infer|/stream|:predict|invocations", pattern) else "tiny"


class Turns:
    """The longest turn of a loop in another thread, in seconds of the processor."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_over = False
        self._last = 0.0
        self.longest_s = 0.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[Turns]:
        self._loop.call_soon_threadsafe(self._begin)
        try:
            yield self
        finally:
            self._is_over = True

    def _begin(self) -> None:
        self._last = time.thread_time()
        self._loop.call_later(0.0005, self._look)

    def _look(self) -> None:
        now = time.thread_time()
        self.longest_s = max(self.longest_s, now - self._last)
        self._last = now
        if not self._is_over:
            self._loop.call_later(0.0005, self._look)


class Lines:
    """The longest line of Python that a thread beside the loop's carries out, in seconds of the processor.

    A line is mostly one call into C, which gives the interpreter's lock back when it is done.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last = threading.local()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """The threads of the pool that begin in the meantime, for as long as they live."""
        threading.settrace(self._begin)
        try:
            yield
        finally:
            threading.settrace(None)

    def _begin(self, frame: FrameType, event: str, argument: object) -> Any:
        if not threading.current_thread().name.startswith(("asyncio", "uvloop")):
            sys.settrace(None)
            return None
        self._last.at = time.thread_time()
        if frame.f_code is getattr(decompress, "__code__", None):  # zlib gives the lock back meanwhile
            return None
        return self._look

    def _look(self, frame: FrameType, event: str, argument: object) -> Any:
        self.longest_s = max(self.longest_s, time.thread_time() - self._last.at)
        self._last.at = time.thread_time()
        return self._look


def work_s() -> float:
    """The processor's seconds for a fixed piece of work."""
    began = time.thread_time()
    found: dict[str, str] = {}
    for number in range(20_000):
        found[f"name-{number}"] = str(number).zfill(9)
    return time.thread_time() - began


class Slowness:
    """How much longer the fixed piece of work takes now than at its quickest."""

    def __init__(self) -> None:
        self._least_s = min(work_s() for _ in range(20))

    def now(self) -> float:
        now_s = min(work_s() for _ in range(3))
        self._least_s = min(self._least_s, now_s)
        return now_s / self._least_s


SLOWNESS = Slowness()


@pytest.fixture(scope="module")
def lines() -> Iterator[Lines]:
    """What was there before is looked through by no collection of garbage, as in a server."""
    watched = Lines()
    freeze_heap()
    with watched.watched():
        yield watched
    refreeze_heap()


@pytest.fixture(scope="module")
def http(lines: Lines) -> Iterator[Running]:
    with http_running(Computing(), door=door()) as started:
        yield started


@pytest.fixture(scope="module")
def grpc(lines: Lines) -> Iterator[GrpcRunning]:
    with grpc_running(Computing(), door=door()) as started:
        yield started


def longest(site: Running | GrpcRunning, attack: Attack, lines: Lines) -> float:
    lines.longest_s = 0.0
    with Turns(site.loop).watched() as turns:
        strike(site.port, attack, flood_s=0.1)
        time.sleep(0.01)
    site.reset()
    longest_s = max(turns.longest_s, lines.longest_s)
    return longest_s / SLOWNESS.now() if longest_s > LONGEST_S else longest_s


def slow(site: Running | GrpcRunning, attacks: Iterable[Attack], lines: Lines) -> list[str]:
    """The attacks that make a turn, or a line, too long; each is tried again, as a collection of garbage may fall into one."""
    found = []
    for attack in attacks:
        seconds = longest(site, attack, lines)
        for _ in range(2):
            if seconds > LONGEST_S:
                seconds = min(seconds, longest(site, attack, lines))
        if seconds > LONGEST_S:
            found.append(f"{attack.door}: {attack.bytes_of}: {1e3 * seconds:.0f} ms")
    return found


NUM_PARTS = 5


@THOROUGH
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", sample(range(NUM_PARTS), 0))
def test_no_request_over_http_makes_others_wait(http: Running, lines: Lines, part: int) -> None:
    """All of them against a compiled gateway, which is what is installed; every third against the interpreted one."""
    attacks = http_attacks(ROUTES[part::NUM_PARTS], model_of, KEY, MAX_DECODE_COST, 4)
    assert not slow(http, itertools.islice(attacks, 0, None, 1 if is_gateway_compiled() else 3), lines)


FLOODS = {attack.bytes_of: attack for attack in http1_floods()}


@pytest.mark.parametrize("flood", sample(FLOODS, *(name for name in FLOODS if name != "refused requests")))
def test_no_connection_of_http1_makes_others_wait(http: Running, lines: Lines, flood: str) -> None:
    assert not slow(http, [FLOODS[flood]], lines)


@pytest.mark.parametrize("size", [1, 64])
def test_a_connection_of_http1_may_not_cost_more_than_it_is_good_for(http: Running, size: int) -> None:
    """Chunks of a byte end the connection, whether or not the request was answered before; larger ones never do."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
    chunk = b"%x\r\n%b\r\n" % (size, b" " * size)
    for more in (b"", b"authorization: Bearer good\r\n"):
        with socket.create_connection(("127.0.0.1", http.port), timeout=30) as connection:
            is_cut = False
            try:
                connection.sendall(head + more + b"\r\n")
                for _ in range(150 if size == 1 else 20):
                    connection.sendall(chunk * 4000)
                connection.sendall(
                    b"0\r\n\r\nGET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
                )
                said = b""
                while piece := connection.recv(65536):
                    said += piece
                is_cut = b'"live"' not in said and b"200 OK" not in said
            except ConnectionError:
                is_cut = True
            assert is_cut == (size == 1), more
    http.reset()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", sample(range(NUM_PARTS), 0))
def test_no_call_of_grpc_makes_others_wait(grpc: GrpcRunning, lines: Lines, part: int) -> None:
    attacks = grpc_attacks(grpc.server.methods, "digits", "tiny", KEY)
    assert not slow(grpc, itertools.islice(attacks, part, None, NUM_PARTS), lines)


@pytest.mark.timeout(300)
def test_no_frames_of_http2_make_others_wait(grpc: GrpcRunning, lines: Lines) -> None:
    assert not slow(grpc, flood_attacks(), lines)


@THOROUGH
@pytest.mark.parametrize("way", ["their deadlines pass together", "their connection is cut"])
def test_a_thousand_calls_that_end_together_do_not_block_the_event_loop(grpc: GrpcRunning, way: str) -> None:
    body = infer_request().SerializeToString()
    found = []
    for _ in range(3):
        grpc.router.answer = None
        client = Client(grpc.port)
        timeout = {"grpc_timeout": "1S"} if "deadlines" in way else {}
        for _ in range(1000):
            client.send(client.begin(authorization=f"Bearer {KEY}", **timeout), framed(body), end_stream=True)
        client.leave()
        for _ in range(1000):
            assert grpc.router.submitted.acquire(timeout=10)
        with Turns(grpc.loop).watched() as turns:
            if not timeout:
                client.close()
            streams = tuple(grpc.router.streams)
            assert all(stream.closed.wait(10) for stream in streams)
            for stream in streams:
                grpc.put(stream, Output(stream.given.id, (), None, End("cancelled")))
            until_now(lambda: not grpc.server._calls._num_open, "every call is closed", 10)
        client.close()
        grpc.reset()
        found.append(turns.longest_s / SLOWNESS.now())
        if found[-1] < LONGEST_S:
            break
    assert min(found) < LONGEST_S
