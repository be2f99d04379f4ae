"""A step of load on a real server whose model may have two replicas, and requests of a model that has none:
``python -m bench.scaling_live``.

    python -m bench.scaling_live --source /models/qwen3-0.6b --tokens 4 --repeat 1

One client asks twice in a second, and then six ask without a pause until a second replica is ready and some answers
more have come. The server's log tells when the second replica was started, when it was ready and when it had its first
token, without a spare worker, with one, and with one that holds the memory of the weights. Then a model with ``min: 0``
is asked while it has no replica, and while it has one: what the first answer took after the log said ready, less what
the second one took, is what starting from zero adds. The times are those of this machine as it is: its load is printed
with them. A row takes 15 s and the model's loading, and waits for the requests that were sent: slow models need few
``--tokens``. Exit status 1: a request failed, or no second replica came.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.report import markdown

ASKED: dict[str, Any] = {"model": "chat", "prompt": "Once", "ignore_eos": True}
CALM_S, BUSY_S, START_S = 12.0, 60.0, 120.0
LEAST_PART_S, IDLE_S, LOOK_S = 0.05, 1.0, 0.2
MORE_ANSWERS = 4  # after the second replica is ready
SPARES: Mapping[str, Mapping[str, bool]] = {
    "no": {"spare": False},
    "yes": {"spare": True},
    "memory": {"spare": True, "spare_memory": True},
}


class Measured(NamedTuple):
    """One run; None: no second replica came, or no token of it. ``parts``: seconds of the parts of its load, by the
    log."""

    decision_s: float | None
    ready_s: float | None
    token_s: float | None
    failed: int
    parts: dict[str, float] = {}


@contextmanager
def served(folder: Path, model: dict[str, object]) -> Iterator[tuple[str, Path]]:
    """A server with one model: its address and its log."""
    log = folder / "log"
    config = {"server": {"port": 0, "log_file": str(log), "reload": False}, "models": {"chat": model}}
    (folder / "inferd.yaml").write_text(json.dumps(config), encoding="utf-8")
    server = subprocess.Popen(
        [sys.executable, "-m", "inferd", "serve", "inferd.yaml"],
        cwd=folder,
        env={**os.environ, "INFERD_STATE__DATA_DIR": str(folder / "state")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
        threading.Thread(target=server.stdout.read, daemon=True).start()
        yield url.rstrip("/.,"), log
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def read(log: Path) -> list[dict[str, Any]]:
    """The whole lines of a log."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()]


def at(line: dict[str, Any]) -> float:
    """When a line of the log was written, in seconds since the epoch."""
    return datetime.datetime.fromisoformat(line["ts"]).timestamp()


def from_zero(folder: Path, source: str, repeat: int) -> list[float]:
    """Milliseconds that first answers took after their model was ready, less what second ones took."""
    scaling = {"min": 0, "max": 1}
    model = {"source": source, "scaling": scaling, "idle_after_s": IDLE_S}
    with served(folder, model) as (url, log), httpx.Client(base_url=url, timeout=START_S) as client:
        for _ in range(repeat):
            for _ in range(2):
                client.post("/v1/completions", json=ASKED | {"max_tokens": 1}).raise_for_status()
            until = time.monotonic() + START_S
            while client.get("/health").json()["models"]["chat"]["state"] == "ready":
                if time.monotonic() > until:
                    raise TimeoutError("the idle model is not unloaded")
                time.sleep(0.2)
    lines = read(log)
    ready = [at(line) for line in lines if line["event"] == "replica" and line["state"] == "ready"]
    asked = [line for line in lines if line["event"] == "http" and line["model"] == "chat"]
    pairs = zip(ready, asked[::2], asked[1::2], strict=True)
    return [1000.0 * (at(first) - ready_at - second["duration_s"]) for ready_at, first, second in pairs]


def measured(folder: Path, source: str, tokens: int, spare: str) -> Measured:
    """A step of load on a server of its own. ``spare``: of ``SPARES``."""
    scaling = {"min": 1, "max": 2, "down_after_s": 600, **SPARES[spare]}
    with served(folder, {"source": source, "scaling": scaling, "scheduler": {"max_num_seqs": 1}}) as (url, log):
        stepped_at, statuses = loaded(url, tokens, lambda: "ready" in second_replica(read(log)))
    lines = read(log)
    second = second_replica(lines)
    failed = sum(status != 200 for status in statuses)
    if "starting" not in second or "ready" not in second:
        return Measured(None, None, None, failed)
    started, ready = at(second["starting"]), at(second["ready"])
    first = first_token_at(lines, ready)
    token_s = None if first is None else first - ready
    return Measured(started - stepped_at, ready - started, token_s, failed, second["ready"]["load_s"])


def second_replica(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The first line of each state of the second replica."""
    return {line["state"]: line for line in reversed(lines) if line["event"] == "replica" and line["replica"] == 1}


def first_token_at(lines: list[dict[str, Any]], ready: float) -> float | None:
    """When the second replica had its first token: that of the first request that came into work after ``ready`` while
    another one was in work. A replica computes one request at a time here."""
    spans = []
    for line in lines:
        if line["event"] == "http" and "scheduled" in line.get("timings", {}):
            begin, timings = at(line) - line["duration_s"], line["timings"]
            spans.append(tuple(begin + timings[name] for name in ("scheduled", "first_token", "finished")))
    spans.sort()
    found = [
        first
        for number, (begin, first, _) in enumerate(spans)
        if begin > ready and any(end > begin for _, _, end in spans[:number])
    ]
    return min(found, default=None)


def loaded(url: str, tokens: int, is_ready: Callable[[], bool]) -> tuple[float, list[int]]:
    """When the step came, and the statuses of all answers, 0: none. ``is_ready``: whether the second replica was."""
    statuses: list[int] = []
    stop = threading.Event()
    # Made before the step: a client takes some tens of milliseconds to be made, which are none of the server's.
    clients = [httpx.Client(base_url=url, timeout=START_S) for _ in range(7)]

    def ask(client: httpx.Client, pause_s: float) -> None:
        with client:
            while not stop.wait(pause_s):
                asked = ASKED | {"max_tokens": tokens}
                try:
                    status = client.post("/v1/completions", json=asked).status_code
                except httpx.TransportError:
                    status = 0
                statuses.append(status)

    threads = [threading.Thread(target=ask, args=(clients[0], 0.5))]
    threads[0].start()
    while not statuses:
        time.sleep(0.1)
    time.sleep(CALM_S)
    stepped_at = time.time()
    threads += [threading.Thread(target=ask, args=(client, 0.0)) for client in clients[1:]]
    for thread in threads[1:]:
        thread.start()
    enough = sys.maxsize
    while len(statuses) < enough and time.time() < stepped_at + BUSY_S:
        time.sleep(LOOK_S)
        if enough == sys.maxsize and is_ready():
            enough = len(statuses) + MORE_ANSWERS
    stop.set()
    for thread in threads:
        thread.join()
    return stepped_at, statuses


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", default="demo")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--repeat", type=int, default=2, help="rows of each kind")
    kinds = "without a spare worker, with one, and with one that holds the memory of weights; all"
    parser.add_argument("--spare", choices=SPARES, action="append", help=kinds)
    given = parser.parse_args(arguments)
    rows, is_held = [], True
    for spare in (given.spare or list(SPARES)) * given.repeat:
        with tempfile.TemporaryDirectory() as folder:
            run = measured(Path(folder), given.source, given.tokens, spare)
        is_held = is_held and run.ready_s is not None and not run.failed
        shown = ["-" if value is None else f"{value:.2f}" for value in (run.decision_s, run.ready_s, run.token_s)]
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in run.parts.items() if seconds >= LEAST_PART_S)
        rows.append([spare, *shown, parts, f"{run.failed}", f"{os.getloadavg()[0]:.0f}"])
    times = ["step to start, s", "start to ready, s", "ready to its first token, s"]
    print(markdown(["spare worker", *times, "of the start, s", "failed", "load of the machine"], rows), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        added_ms = from_zero(Path(folder), given.source, max(2, given.repeat))
    print(f"\nFrom zero, added after ready: {', '.join(f'{ms:.0f}' for ms in added_ms)} ms.")
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
