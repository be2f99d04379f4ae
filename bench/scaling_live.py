"""A step of load on a real server whose model may have two replicas, and requests of a model that has none:
``python -m bench.scaling_live``.

One client asks twice in a second, and then six ask without a pause. The server's log tells when the second replica was
started, and when it was ready, with a spare worker and without one. Then a model with ``min: 0`` is asked while it has
no replica, and while it has one: what the first answer took after the log said ready, less what the second one took,
is what starting from zero adds. The times are those of this machine as it is: its
load is printed with them. Exit status 1: a request failed, or no second replica came.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.report import markdown

ASKED = {"model": "chat", "prompt": "Once", "max_tokens": 24, "ignore_eos": True}
CALM_S, BUSY_S, START_S = 12.0, 30.0, 120.0
LEAST_PART_S, IDLE_S = 0.05, 1.0


class Measured(NamedTuple):
    """One run; None: no second replica came. ``parts``: seconds of the parts of its load, by the log."""

    decision_s: float | None
    ready_s: float | None
    failed: int
    parts: dict[str, float] = {}


@contextmanager
def served(folder: Path, model: dict[str, object]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server with one model: its address, and a list that has the lines of its log when it has ended."""
    log = folder / "log"
    config = {"server": {"port": 0, "log_file": str(log), "reload": False}, "models": {"chat": model}}
    (folder / "inferd.yaml").write_text(json.dumps(config), encoding="utf-8")
    lines: list[dict[str, Any]] = []
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
        yield url.rstrip("/.,"), lines
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    lines += [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def at(line: dict[str, Any]) -> float:
    """When a line of the log was written, in seconds since the epoch."""
    return datetime.datetime.fromisoformat(line["ts"]).timestamp()


def from_zero(folder: Path, source: str, repeat: int) -> list[float]:
    """Milliseconds that first answers took after their model was ready, less what second ones took."""
    scaling = {"min": 0, "max": 1}
    model = {"source": source, "scaling": scaling, "idle_after_s": IDLE_S}
    with served(folder, model) as (url, lines), httpx.Client(base_url=url, timeout=START_S) as client:
        for _ in range(repeat):
            for _ in range(2):
                client.post("/v1/completions", json=ASKED | {"max_tokens": 1}).raise_for_status()
            until = time.monotonic() + START_S
            while client.get("/health").json()["models"]["chat"]["state"] == "ready":
                if time.monotonic() > until:
                    raise TimeoutError("the idle model is not unloaded")
                time.sleep(0.2)
    ready = [at(line) for line in lines if line["event"] == "replica" and line["state"] == "ready"]
    asked = [line for line in lines if line["event"] == "http" and line["model"] == "chat"]
    pairs = zip(ready, asked[::2], asked[1::2], strict=True)
    return [1000.0 * (at(first) - ready_at - second["duration_s"]) for ready_at, first, second in pairs]


def measured(folder: Path, source: str, *, spare: bool) -> Measured:
    """A step of load on a server of its own."""
    scaling = {"min": 1, "max": 2, "spare": spare, "down_after_s": 600}
    with served(folder, {"source": source, "scaling": scaling, "scheduler": {"max_num_seqs": 1}}) as (url, lines):
        stepped_at, statuses = loaded(url)
    second = {
        line["state"]: (at(line), line.get("load_s", {}))
        for line in reversed(lines)
        if line["event"] == "replica" and line["replica"] == 1
    }
    failed = sum(status != 200 for status in statuses)
    if "starting" not in second or "ready" not in second:
        return Measured(None, None, failed)
    started, (ready, parts) = second["starting"][0], second["ready"]
    return Measured(started - stepped_at, ready - started, failed, parts)


def loaded(url: str) -> tuple[float, list[int]]:
    """When the step came, and the statuses of all answers."""
    statuses: list[int] = []
    stop = threading.Event()

    def ask(pause_s: float) -> None:
        with httpx.Client(base_url=url, timeout=START_S) as client:
            while not stop.wait(pause_s):
                statuses.append(client.post("/v1/completions", json=ASKED).status_code)

    threads = [threading.Thread(target=ask, args=(0.5,))]
    threads[0].start()
    while not statuses:
        time.sleep(0.1)
    time.sleep(CALM_S)
    stepped_at = time.time()
    threads += [threading.Thread(target=ask, args=(0.0,)) for _ in range(6)]
    for thread in threads[1:]:
        thread.start()
    time.sleep(BUSY_S)
    stop.set()
    for thread in threads:
        thread.join()
    return stepped_at, statuses


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", default="demo")
    parser.add_argument("--repeat", type=int, default=2)
    given = parser.parse_args(arguments)
    rows, is_held = [], True
    for spare in (False, True) * given.repeat:
        with tempfile.TemporaryDirectory() as folder:
            run = measured(Path(folder), given.source, spare=spare)
        is_held = is_held and run.ready_s is not None and not run.failed
        shown = ["-" if value is None else f"{value:.2f}" for value in (run.decision_s, run.ready_s)]
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in run.parts.items() if seconds >= LEAST_PART_S)
        rows.append(["yes" if spare else "no", *shown, parts, f"{run.failed}", f"{os.getloadavg()[0]:.0f}"])
    head = ["spare worker", "step to start, s", "start to ready, s", "of it, s", "failed", "load of the machine"]
    print(markdown(head, rows))
    with tempfile.TemporaryDirectory() as folder:
        added_ms = from_zero(Path(folder), given.source, max(2, given.repeat))
    print(f"\nFrom zero, added after ready: {', '.join(f'{ms:.0f}' for ms in added_ms)} ms.")
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
