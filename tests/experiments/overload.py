"""More work than can be done (F45, F46)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from tests.experiments.catalogue import experiment
from tests.experiments.client import Answer, head
from tests.experiments.field import Field
from tests.stopwatch import Stopwatch

PACE_S = 0.005
TOKENS = 5
PEAK = 1 / (PACE_S * TOKENS)  # requests per second: each sequence of a step takes its pace
PATIENCE_S = 1.0  # an answer that comes later is worth nothing to its client


def open_loop(rate: float, seconds: float, ask: Callable[[], Answer]) -> list[tuple[int, float]]:
    """Requests at a rate, whether or not earlier ones were answered; status and seconds of each."""
    results: list[tuple[int, float]] = []

    def one() -> None:
        began = Stopwatch()
        status = 0
        with contextlib.suppress(OSError):
            status = ask().status
        results.append((status, began.seconds))

    began = time.monotonic()
    threads: list[threading.Thread] = []
    while (due := len(threads) / rate) < seconds:
        time.sleep(max(0.0, began + due - time.monotonic()))
        threads.append(threading.Thread(target=one, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    return results


def goodput(results: list[tuple[int, float]], seconds: float) -> float:
    return sum(status == 200 and took <= PATIENCE_S for status, took in results) / seconds


@experiment(
    "F45",
    injects="one, five, and again one times the load that can be served, open loop",
    holds="goodput at 5x is at least 90 % of the peak, refusals come in 100 ms (p99), latency is back after it",
    control="a queue without a bound",
    red="goodput",
)
def five_times(field: Field) -> None:
    queue = {"max_requests": field.either(8, 100_000), "max_wait_s": field.either(10.0, 600.0)}
    with field.serve({"models": {"tiny": {"source": "tiny", "queue": queue}}}) as server:

        def ask() -> Answer:
            return server.client.complete(f"pace={PACE_S}", max_tokens=TOKENS, seconds=30)

        before = open_loop(0.8 * PEAK, 4.0, ask)
        peak = goodput(before, 4.0)
        assert peak > 0.6 * PEAK, f"goodput was {peak:.0f}/s before the overload, so nothing is shown"
        over = open_loop(5 * PEAK, 8.0, ask)
        kept = goodput(over, 8.0)
        assert kept >= 0.9 * peak, f"goodput fell from {peak:.0f} to {kept:.0f} per second at 5x"
        # By the server's own log: the machine is the clients' as well, and they are many.
        lines = [json.loads(line) for line in server.log.splitlines()]
        refusals = sorted(line["duration_s"] for line in lines if line["event"] == "http" and line["status"] == 503)
        assert refusals, "nothing was refused at 5x"
        p99 = refusals[int(len(refusals) * 0.99)]
        assert p99 < 0.1, f"refusals took {p99:.3f} s (p99)"
        assert {status for status, _ in over} <= {200, 503}
        again = open_loop(0.8 * PEAK, 3.0, ask)
        assert goodput(again, 3.0) >= 0.9 * peak, "goodput did not come back"


@experiment(
    "F46",
    injects="500 connections within 100 ms, at a server that has just begun",
    holds="every one is answered, and the model they all want is loaded once",
    control="the kernel's queue of connections is short",
    red="lost",
)
def thundering_herd(field: Field) -> None:
    models = {"tiny": {"source": "tiny"}, "late": {"source": "tiny", "load": "on_demand"}}
    with field.serve({"models": models}, defects=("the_backlog_is_short",)) as server:
        body = b'{"model": "late", "prompt": "hello", "max_tokens": 2}'
        request = head("POST", "/v1/completions", "content-type: application/json", "connection: close", body=body)
        # Busy with something else while they come, as at a start.
        os.kill(server.process.pid, signal.SIGSTOP)
        sockets: list[socket.socket] = []
        try:
            for _ in range(500):
                connection = socket.socket()
                connection.setblocking(False)
                connection.connect_ex((server.host, server.port))
                sockets.append(connection)
            time.sleep(0.1)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        answered = 0
        try:
            for connection in sockets:
                connection.settimeout(field.either(20.0, 0.5))
                with contextlib.suppress(OSError):
                    connection.sendall(request)
            for connection in sockets:
                with contextlib.suppress(OSError):
                    answered += b" 200 " in connection.recv(4096)
        finally:
            for connection in sockets:
                connection.close()
        server.tally.cut()
        assert answered == 500, f"{500 - answered} of 500 connections were lost"
        assert server.metrics().sum("inferd_replica_restarts_total", model="late") == 0
        assert server.operator.post("/admin/models/late/unload").status == 200
