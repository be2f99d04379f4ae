"""A spike of 1x to 4x on real servers, of which each has another rule for its number of replicas:
``python -m bench.scaling_spike``.

Three servers run at the same time, with the same Poisson arrivals: 2 in a second, then 8 for 45 s, then 2. A request
takes a worker 0.2 s, in which it sleeps: the processor is nearly idle, so one run does not slow the others. One server
has inferd's rule. The others have the rules of ``bench.scaling_rules`` in its place: the horizontal pod autoscaler on
CPU use, and Knative's. They see what inferd's rule sees, and start and drain the same workers in the same way. The time
in which a worker computes stands for its CPU use. Every server begins with one replica and may have four.

The responses are those to the requests that come in the spike and in the 15 s after it. Prints a table in Markdown.
Exit status 1: a request failed, or the p95 with inferd's rule is not 60 % lower than with the rule on CPU use.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from bench.report import markdown
from bench.scaling_rules import HpaOnCpu, Knative
from inferd import clock
from inferd.app import root
from inferd.app.root import ServeOptions
from inferd.autoscale.controller import Autoscaler
from inferd.autoscale.simulate import Controller, View, quantile
from inferd.config import Config

BASE: Final = 2.0
SECONDS: Final = 0.2
SPIKE: Final = (45.0, 90.0)
END: Final = 105.0
MOST: Final = 4
RULES: Final[Mapping[str, Controller | None]] = {"inferd": None, "HPA on CPU": HpaOnCpu(), "Knative": Knative()}
MODEL: Final = f"""
import time

class Model:
    def predict(self, x: float) -> float:
        time.sleep({SECONDS})
        return x
"""
ASKED: Final = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}]}


class Rival(Autoscaler):
    """Has the server's replicas follow another rule."""

    rule: Controller

    def look(self) -> None:
        for name, demand in self._replicas.demands().items():
            current = demand.ready + demand.starting
            view = View(
                now=clock.now(),
                accepted=demand.accepted,
                ended=demand.ended,
                waiting=demand.waiting,
                in_flight=demand.in_flight,
                busy=demand.busy,
                ready=demand.ready,
                starting=demand.starting,
                oldest_wait_s=demand.oldest_wait_s,
                idle_s=demand.idle_s,
                slots=1,
                ready_s=demand.ready_s or 0.0,
                limit=MOST,
                work_s=0.0,
            )
            count, _ = self.rule(view)
            if count != current and not demand.is_changing and name not in self._tasks:
                self._tasks[name] = asyncio.get_running_loop().create_task(self._set(name, count))

    async def _set(self, name: str, count: int) -> None:
        try:
            await self._replicas.scale(name, count)
        finally:
            del self._tasks[name]


def serve(name: str, folder: Path) -> int:
    """Be the server with this rule until a signal comes."""
    rule = RULES[name]
    if rule is not None:
        Rival.rule = staticmethod(rule)
        root.Autoscaler = Rival  # type: ignore[misc]
    scaling = {"min": 1, "max": MOST}
    # The time of a sleeping worker stands for that of a device: the number of cores is no limit.
    model = {"source": f"{folder}/model.py:Model", "allow_code": True, "device": "cuda", "scaling": scaling}
    model["batching"] = {"max_batch_size": 1}
    server = {"port": 0, "log_file": str(folder / "log"), "reload": False}
    config = {"server": server, "state": {"data_dir": str(folder / "state")}, "models": {"m": model}}
    ready = ServeOptions(on_ready=lambda ready: print(ready.address, flush=True))
    return root.run(msgspec.convert(config, Config), ready)


class Served(NamedTuple):
    """A server of a rule."""

    name: str
    folder: Path
    process: subprocess.Popen[str]
    url: str


def start(name: str, folder: Path) -> Served:
    folder.mkdir()
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.scaling_spike", "--serve", name, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "INFERD_LOG": "warning"},
    )
    assert process.stdout is not None
    return Served(name, folder, process, process.stdout.readline().strip())


def arrivals() -> list[float]:
    """Seconds from the beginning."""
    found: list[float] = []
    drawn, now = random.Random(0), 0.0
    while True:
        now += drawn.expovariate(BASE * (4.0 if SPIKE[0] <= now < SPIKE[1] else 1.0))
        if now >= END:
            return found
        found.append(now)


async def asked(servers: Sequence[Served], times: Sequence[float]) -> dict[str, list[tuple[float, float, int]]]:
    """Of every server the requests: when each came in seconds since the epoch, its seconds, its status (0: none)."""
    found: dict[str, list[tuple[float, float, int]]] = {one.name: [] for one in servers}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=120.0, limits=limits) as client, asyncio.TaskGroup() as tasks:

        async def ask(one: Served) -> None:
            at, began = time.time(), time.perf_counter()
            try:
                status = (await client.post(f"{one.url}/v2/models/m/infer", json=ASKED)).status_code
            except httpx.TransportError:
                status = 0
            found[one.name].append((at, time.perf_counter() - began, status))

        begun = time.perf_counter()
        for at in times:
            await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
            for one in servers:
                tasks.create_task(ask(one))
    return found


def started_s(log: Path, step_at: float) -> float | None:
    """Seconds from the step until a replica was started; None: none was."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    times = [
        datetime.datetime.fromisoformat(line["ts"]).timestamp() - step_at
        for line in lines
        if line["event"] == "replica" and line["state"] == "starting"
    ]
    return min((one for one in times if one >= 0), default=None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--serve", nargs=2, metavar=("RULE", "FOLDER"), help="be one of the servers")
    given = parser.parse_args(arguments)
    if given.serve is not None:
        return serve(given.serve[0], Path(given.serve[1]))
    rows, p95s, failed = [], {}, 0
    with tempfile.TemporaryDirectory() as folder:
        servers = [start(name, Path(folder) / str(number)) for number, name in enumerate(RULES)]
        try:
            found = asyncio.run(asked(servers, arrivals()))
        finally:
            for one in servers:
                one.process.send_signal(signal.SIGTERM)
            for one in servers:
                one.process.wait(60)
        for one in servers:
            requests = found[one.name]
            first = min(at for at, _, _ in requests)
            step_at = first - arrivals()[0] + SPIKE[0]
            times = [took for at, took, _ in requests if at >= step_at]
            bad = sum(status != 200 for _, _, status in requests)
            after = started_s(one.folder / "log", step_at)
            failed += bad
            p95s[one.name] = quantile(times, 0.95)
            shown = [f"{quantile(times, part):.2f}" for part in (0.5, 0.95, 0.99)]
            rows.append([one.name, "-" if after is None else f"{after:.2f}", *shown, f"{bad}"])
    print(markdown(["rule", "step to a start, s", "p50, s", "p95, s", "p99, s", "failed"], rows))
    lower = 1 - p95s["inferd"] / p95s["HPA on CPU"]
    print(
        f"\np95: {100 * lower:.0f} % lower than with the rule on CPU use. Load of the machine: {os.getloadavg()[0]:.0f}"
    )
    return 0 if lower >= 0.6 and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
