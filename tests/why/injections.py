"""The fifteen causes, each injected into a real server. An injection returns the records of the affected requests."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.experiments.client import JSON
from tests.experiments.upstream import Asked, Upstream, failing, well
from tests.why.lab import Lab, at_once, lab, meanwhile, text_of

from inferd.observe.why.causes import LEAST_TEXT_S

Inject = Callable[[], list[JSON]]
INJECTIONS: Final[dict[str, Inject]] = {}


def injection(cause: str) -> Callable[[Inject], Inject]:
    def enter(function: Inject) -> Inject:
        INJECTIONS[cause] = function
        return function

    return enter


def demo(**settings: object) -> JSON:
    return {"demo": {"source": "demo", **settings}}


def warmed(lab: Lab, number: int = 20, max_tokens: int = 20, **options: str) -> None:
    """Requests alone on the server, so that something is usual and the cost of steps is fitted."""
    for place in range(number):
        lab.ask(text_of(15, place), max_tokens, name="usual", **options)  # type: ignore[arg-type]


def slower(records: list[JSON], factor: float = 1.5) -> list[JSON]:
    """Those that took longer than usual, by more than the least time that any cause explains: a fault of the machine
    does not meet every request."""
    return [
        record
        for record in records
        if record["usual_s"] and record["total_s"] > max(factor * record["usual_s"], record["usual_s"] + LEAST_TEXT_S)
    ]


@injection("queue_other_tenant")
def queue_flood() -> list[JSON]:
    with lab(demo(scheduler={"max_num_seqs": 1}), tenants=("team-a", "team-b")) as server:
        warmed(server, 40)  # more than the affected requests, which are not usual

        def flood(over: threading.Event) -> None:
            at_once(40, lambda n: server.ask(text_of(10, n), 400, tenant="team-b", name="flood"))

        found: list[str] = []
        for _ in range(2):
            with meanwhile(flood):
                time.sleep(0.2)
                found += [server.ask(text_of(15, n), 20, name="victim") for n in range(10)]
        return slower([server.explain(victim) for victim in found])


@injection("long_neighbour_prefill")
def long_prefill() -> list[JSON]:
    with lab(demo(scheduler={"prefix_caching": False})) as server:
        warmed(server, 20, 40)
        found: list[str] = []
        for number in range(20):
            neighbour = threading.Thread(target=server.ask, args=(text_of(1300, number), 1), kwargs={"name": "long"})
            neighbour.start()
            time.sleep(0.01)
            found.append(server.ask(text_of(15, number), 40, name="victim"))
            neighbour.join()
        return slower([server.explain(victim) for victim in found])


@injection("preemption")
def preemption() -> list[JSON]:
    with lab(demo(kv_cache={"num_blocks": 48}, scheduler={"prefix_caching": False}, max_model_len=700)) as server:
        for number in range(12):
            server.ask(text_of(10, number), 500, name="usual")
        found: list[str] = []
        for _ in range(3):
            found += at_once(6, lambda n: server.ask(text_of(10, n), 500, name="crowd"))
        return slower([record for one in found if (record := server.explain(one))["num_preemptions"]])


@injection("cold_load")
def cold_load() -> list[JSON]:
    with lab(demo(load="on_demand")) as server:
        found: list[str] = []
        for number in range(8):
            found.append(server.ask(text_of(15, number), name="cold"))
            for again in range(2):
                server.ask(text_of(15, again), name="warm")
            assert server.server.operator.post("/admin/models/demo/unload").status == 200
        return [server.explain(cold) for cold in found]


@injection("worker_restart")
def worker_restart() -> list[JSON]:
    with lab(demo()) as server:
        warmed(server, 12)
        found: list[str] = []
        for number in range(6):
            os.kill(server.worker(), signal.SIGKILL)
            time.sleep(0.1)
            found += at_once(2, lambda n, seed=number: server.ask(text_of(15, n + seed), name="victim"))  # type: ignore[misc]
            server.server.until(server.server.is_ready, "ready again", 30)
        return [server.explain(victim) for victim in found]


def read_late(server: Lab, request_id: str, after_s: float) -> str:
    """A stream of about a megabyte, of which the client reads nothing for a while."""
    options = {"ignore_eos": True, "stream": True, "logprobs": 5, "return_token_ids": True}
    body = json.dumps({"model": "demo", "prompt": "Once", "max_tokens": 400, "n": 8, **options}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((server.server.host, server.server.port))
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"connection: close\r\nx-request-id: %b\r\ncontent-length: %d\r\n\r\n%b"
            % (request_id.encode(), len(body), body)
        )
        time.sleep(after_s)
        while client.recv(65536):
            pass
    return request_id


@injection("slow_reader")
def slow_reader() -> list[JSON]:
    with lab(demo()) as server:
        warmed(server, 12)
        found = [read_late(server, f"slow-{number}", 3.0) for number in range(8)]
        time.sleep(0.2)
        return [server.explain(one) for one in found]


@injection("cache_miss")
def cache_miss() -> list[JSON]:
    with lab(demo()) as server:
        prefix = text_of(1200, 1)
        for number in range(24):
            server.ask(f"{prefix} {text_of(5, number)}", 4, name="hit")
        found = [server.ask(f"{number} {text_of(1200, number + 5)}", 4, name="miss") for number in range(8)]
        return [server.explain(miss) for miss in found]


def _slow_steps(server: Lab, over: threading.Event) -> None:
    """Lets the worker run for a third of the time, as a slower clock does."""
    worker = server.worker()
    with contextlib.suppress(ProcessLookupError):
        while not over.wait(0.004):
            os.kill(worker, signal.SIGSTOP)
            time.sleep(0.012)
            os.kill(worker, signal.SIGCONT)
        os.kill(worker, signal.SIGCONT)


@injection("throttled_device")
def throttled_device() -> list[JSON]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "devices.json"

        def write(share: float) -> None:
            one = {"device": "sim0", "kind": "cpu", "place": "cpu", "throttled": {"thermal": share}}
            beside = file.with_suffix(".new")
            beside.write_text(json.dumps({"devices": [one]}))
            beside.rename(file)

        write(0.0)
        with lab(demo(), devices={"simulated": str(file), "interval_s": 1}) as server:
            warmed(server, 40, 200)
            write(1.0)
            time.sleep(2.5)
            with meanwhile(lambda over: _slow_steps(server, over)):
                found = [server.ask(text_of(15, number), 200, name="hot") for number in range(40)]
                time.sleep(1.2)
                found += [server.ask(text_of(15, number), 200, name="hot") for number in range(10)]
            return slower([server.explain(hot) for hot in found])


BURST_S: Final = 0.03
PAUSE_S: Final = 0.01
BURNERS: Final = 8
"""On each core, where none may be preferred."""


def _burn(core: int, number: int, seconds: float) -> None:
    """Takes three quarters of a core, before all ordinary processes. Without the right to that, every burner takes what
    it is given all the time."""
    os.sched_setaffinity(0, {core})
    is_preferred = True
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        is_preferred = False
    until = time.monotonic() + seconds
    while time.monotonic() < until and (number == 0 or not is_preferred):
        over = time.monotonic() + BURST_S
        while time.monotonic() < over:
            pass
        if is_preferred:
            time.sleep(PAUSE_S)


@injection("stolen_cpu")
def stolen_cpu() -> list[JSON]:
    with lab(demo(), yields=True) as server:
        warmed(server, 40, 200)
        burners = [
            multiprocessing.Process(target=_burn, args=(core, number, 16.0), daemon=True)
            for core in os.sched_getaffinity(0)
            for number in range(BURNERS)
        ]
        for burner in burners:
            burner.start()
        time.sleep(2.0)  # evidence is read once a second
        until = time.monotonic() + 13.0
        found: list[str] = []
        while time.monotonic() < until:
            found.append(server.ask(text_of(15, len(found)), 200, name="starved"))
        for burner in burners:
            burner.join()
        time.sleep(0.5)
        server.ask(name="after")
        return slower([server.explain(starved) for starved in found])


def late_failure(connection: socket.socket, asked: Asked) -> bool:
    time.sleep(0.2)
    return failing(connection, asked)


@injection("failover")
def failover() -> list[JSON]:
    with Upstream(well) as good, Upstream(late_failure) as bad:
        remote = {"probe": False}
        far = {
            "source": bad.source,
            "remote": remote,
            "remotes": [{"url": good.url, **remote}],
            "breaker": {"enabled": False},
            "retry": {"budget": 1.0},
        }
        with lab({"demo": {"source": "demo"}, "far": far}) as server:
            found = [server.ask("hello", 4, model="far", name="far") for _ in range(40)]
            return [record for one in found if (record := server.explain(one))["attempts"] > 1]


@injection("retry")
def retry() -> list[JSON]:
    with Upstream(late_failure) as bad:
        remotes = [{"url": bad.url, "probe": False}]
        with lab(demo(remotes=remotes, breaker={"enabled": False}, retry={"budget": 1.0})) as server:
            found = [server.ask("hello", 4) for _ in range(40)]
            return [record for one in found if (record := server.explain(one))["attempts"] > 1]


@injection("batch_job")
def batch_job() -> list[JSON]:
    with lab(demo(scheduler={"max_num_seqs": 4})) as server:
        warmed(server, 20, 100)

        def job(over: threading.Event) -> None:
            at_once(12, lambda n: server.ask(text_of(20, n), 1800, priority="batch", name="job"))

        found: list[str] = []
        for _ in range(4):
            with meanwhile(job):
                time.sleep(0.3)
                found += [server.ask(text_of(15, n), 100, name="victim") for n in range(5)]
        return slower([server.explain(victim) for victim in found])


@injection("tokenizer_storm")
def tokenizer_storm() -> list[JSON]:
    with lab(demo()) as server:
        warmed(server, 20)
        texts = [text_of(60_000, number) for number in range(12)]

        def storm(over: threading.Event) -> None:
            at_once(12, lambda n: server.ask(texts[n], 1, name="huge", truncate_prompt_tokens=16))

        found: list[str] = []
        for _ in range(4):
            with meanwhile(storm):
                time.sleep(0.1)
                found += at_once(6, lambda n: server.ask(text_of(15, n), name="victim", after_s=0.05 * n))
        return slower([server.explain(victim) for victim in found], 4.0)


@injection("batch_window")
def batch_window() -> list[JSON]:
    batching = {"mode": "static", "max_batch_size": 4}
    with lab({"digits": {"source": "demo-digits", "batching": batching}}) as server:
        body = {"inputs": [{"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": [1.0] * 64}]}

        def infer(request_id: str, after_s: float) -> str:
            time.sleep(after_s)
            server.server.client.post("/v2/models/digits/infer", body, headers={"x-request-id": request_id})
            return request_id

        found: list[str] = []
        for turn in range(12):
            ids = at_once(4, lambda n, turn=turn: infer(f"d{turn}-{n}", 0.1 * (n == 3)))  # type: ignore[misc]
            found += [one for one in ids if not one.endswith("-3")]  # the fourth fills the batch
        return [server.explain(one) for one in found]


@injection("oversized_input")
def oversized_input() -> list[JSON]:
    with lab(demo()) as server:
        warmed(server, 80, 4)
        found = [server.ask(text_of(1300, number), 4, name="huge") for number in range(12)]
        return [server.explain(huge) for huge in found]


def idle() -> list[JSON]:
    """Requests one after the other, of several sizes, on a server with nothing else to do."""
    with lab(demo()) as server:
        sizes = [(15, 20), (60, 40), (20, 100), (120, 10)]
        found = [server.ask(text_of(sizes[n % 4][0], n), sizes[n % 4][1], name="idle") for n in range(300)]
        return [server.explain(one) for one in found]
