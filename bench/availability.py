"""How many requests of well-behaved users succeed while a server meets one fault after another.

    python -m bench.availability --minutes 120 --users 200 --out build/availability
    python -m bench.availability --minutes 3 --every 10

Starts ``inferd serve`` with two replicas of the bundled chat model and of the classifier of intents. Each user asks, reads
the answer and pauses, for an exponentially distributed time. Every ``--every`` seconds one of these faults happens: a
worker is killed; a worker is stopped (SIGSTOP) and continued after ten seconds; the configuration file is changed while it
is served; 50 clients send broken JSON; 50 clients ask for long streams and leave.

A request succeeds when its whole answer has come within ``--patience`` seconds, by its first attempt: a status of 200, and
of a stream ``[DONE]`` without an error. Everything else is a failure, refusals for overload too; OpenAI's clients would
try again. The availability has its exact 95 % interval (Clopper & Pearson 1934), which takes failures as independent; those
of one fault are not, so the table names the failures of every minute beside its faults.

Each minute is a line of OUT.jsonl as soon as it is over, and a row of the table at the end. Exit status 1 where the
availability is below ``--least``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from scipy.stats import binomtest  # type: ignore[import-untyped]

from bench.report import markdown
from bench.soak import CHAT, call, chat
from inferd.benchmark.stats import percentile

STOPPED_S: Final = 10.0
CROWD: Final = 50
CONFIG: Final = """server: {{port: {port}, access_log: false}}
state: {{data_dir: {folder}/state}}
models:
  demo:
    source: demo
    replicas: 2
    resume_streams: true
    queue: {{timeout_s: {timeout_s}}}
  intents:
    source: demo-intents
    replicas: 2
"""


class Minute(msgspec.Struct, kw_only=True):
    """One minute of the run. ``answer_s``: seconds until the end of each answer that was whole."""

    number: int
    asked: int = 0
    failed: int = 0
    answer_s: list[float] = msgspec.field(default_factory=list)
    causes: Counter[str] = msgspec.field(default_factory=Counter)
    faults: list[str] = msgspec.field(default_factory=list)

    def told(self) -> dict[str, object]:
        """The line of the file."""
        ordered = sorted(self.answer_s)
        return {
            "minute": self.number,
            "asked": self.asked,
            "failed": self.failed,
            "causes": dict(self.causes),
            "faults": self.faults,
            "p50_s": round(percentile(ordered, 50), 4),
            "p95_s": round(percentile(ordered, 95), 4),
        }


class Run:
    """The server, its users and its faults."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.random = random.Random(options.seed)
        self.file = folder / "inferd.yaml"
        self.changes = 0
        self.began = 0.0
        self.minutes: list[Minute] = []
        self._write()
        with (folder / "server.log").open("wb") as log:
            command = [sys.executable, "-m", "inferd", "serve", str(self.file)]
            self.server = subprocess.Popen(command, stdout=log, stderr=log)

    def _write(self) -> None:
        written = self.folder / "written.yaml"
        text = CONFIG.format(port=self.options.port, folder=self.folder, timeout_s=30 + self.changes)
        written.write_text(text)
        written.replace(self.file)

    async def ready(self) -> None:
        """Wait until every replica can be used."""
        deadline = time.monotonic() + 120.0
        while time.monotonic() < deadline:
            if self.server.poll() is not None:
                raise SystemExit(f"the server ended with {self.server.returncode}; its log is {self.folder}/server.log")
            try:
                status, _ = await call(self.options.port, "GET", "/health/ready")
            except OSError:
                status = 0
            if status == 200 and len(self.workers()) == 4:
                return
            await asyncio.sleep(0.2)
        raise SystemExit(f"the server was not ready within two minutes; its log is {self.folder}/server.log")

    def workers(self) -> list[int]:
        """The processes of the replicas."""
        found = []
        for pid in Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                if b"inferd.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
        return found

    def minute(self) -> Minute:
        """The one that runs; those that are over are written."""
        last = math.ceil(self.options.minutes)  # that of answers that come after the end too
        number: int = min(last, int((time.monotonic() - self.began) / 60.0) + 1)
        while len(self.minutes) < number:
            self.minutes.append(Minute(number=len(self.minutes) + 1))
        return self.minutes[number - 1]

    async def user(self, rng: random.Random, stop: asyncio.Event) -> None:
        """Ask, read and pause until the run is over."""
        while not await _over(stop, rng.expovariate(1.0 / self.options.pause)):
            minute, began = self.minute(), time.monotonic()
            minute.asked += 1
            try:
                async with asyncio.timeout(self.options.patience):
                    cause = await self._ask(rng)
            except TimeoutError:
                cause = f"no whole answer within {self.options.patience:g} s"
            except OSError as error:
                cause = f"connection: {error.strerror or type(error).__name__}"
            except (ValueError, IndexError):
                cause = "an answer that is no HTTP"
            if cause:
                minute.failed += 1
                minute.causes[cause] += 1
            else:
                minute.answer_s.append(time.monotonic() - began)

    async def _ask(self, rng: random.Random) -> str:
        """One request; why it failed, empty where it succeeded."""
        text = f"Tell me a story about a {rng.choice(['dragon', 'fox', 'robot'])} number {rng.randrange(10**6)}."
        kind = rng.choices(["stream", "whole", "predict"], [3, 1, 1])[0]
        if kind == "predict":
            body = {"instances": [{"text": text}]}
            status, data = await call(self.options.port, "POST", "/v1/models/intents:predict", body)
            whole = b'"predictions"' in data
        else:
            status, data = await call(self.options.port, "POST", CHAT, chat(text, stream=kind == "stream"))
            whole = (
                b"data: [DONE]" in data and b'"error"' not in data if kind == "stream" else b'"finish_reason"' in data
            )
        if status != 200:
            return f"{kind}: status {status}"
        return "" if whole else f"{kind}: the answer is not whole"

    async def faults(self, stop: asyncio.Event) -> None:
        """One fault after another."""
        kinds: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("kill", self._kill),
            ("stop", self._stop),
            ("change", self._change),
            ("broken", self._broken),
            ("leave", self._leave),
        ]
        while not await _over(stop, self.random.uniform(0.5, 1.5) * self.options.every):
            name, fault = self.random.choice(kinds)
            self.minute().faults.append(name)
            await fault()

    async def _kill(self) -> None:
        self._signal(self._any_worker(), signal.SIGKILL)

    async def _stop(self) -> None:
        pid = self._any_worker()
        self._signal(pid, signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        self._signal(pid, signal.SIGCONT)

    def _any_worker(self) -> int:
        """0: there is none."""
        found = self.workers()
        return self.random.choice(found) if found else 0

    def _signal(self, pid: int, number: signal.Signals) -> None:
        """Send the signal, unless the worker has ended or was replaced."""
        if pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def _change(self) -> None:
        self.changes += 1
        self._write()

    async def _broken(self) -> None:
        await asyncio.gather(*(self._crowd(b'{"model": "demo", "messages": [', None) for _ in range(CROWD)))

    async def _leave(self) -> None:
        body = chat("Tell me all.", stream=True, max_tokens=400, ignore_eos=True)
        await asyncio.gather(*(self._crowd(body, 400) for _ in range(CROWD)))

    async def _crowd(self, body: object, leave_after: int | None) -> None:
        try:
            await call(self.options.port, "POST", CHAT, body, leave_after=leave_after)
        except OSError:
            self.minute().causes["(a client of the crowd was refused)"] += 1

    async def run(self) -> None:
        """The whole run; OUT.jsonl grows by a line a minute."""
        await self.ready()
        self.began, stop = time.monotonic(), asyncio.Event()
        length, written = 60.0 * self.options.minutes, 0
        with self.options.out.with_suffix(".jsonl").open("w", encoding="utf-8") as lines:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self.options.users):
                    tasks.create_task(self.user(random.Random(self.random.random()), stop))
                tasks.create_task(self.faults(stop))
                while (since := time.monotonic() - self.began) < length:
                    await asyncio.sleep(min(1.0, length - since))
                    if self.server.poll() is not None:
                        raise SystemExit(f"the server ended with {self.server.returncode}; see OUT.log")
                    self.minute()
                    for minute in self.minutes[written:-2]:  # answers of the last two may still be to come
                        print(json.dumps(minute.told()), file=lines, flush=True)
                        written += 1
                    asked, failed = self.totals()
                    left = length - (time.monotonic() - self.began)
                    if sys.stdout.isatty():
                        print(f"\r{max(0.0, left):6.0f} s left, {asked} asked, {failed} failed ", end="", flush=True)
                stop.set()
            for minute in self.minutes[written:]:
                print(json.dumps(minute.told()), file=lines, flush=True)

    def totals(self) -> tuple[int, int]:
        """Requests, and those that failed."""
        return sum((each.asked for each in self.minutes), 0), sum((each.failed for each in self.minutes), 0)

    def end(self) -> int:
        """The exit status of the server."""
        self.server.send_signal(signal.SIGTERM)
        return self.server.wait(timeout=120)


async def _over(stop: asyncio.Event, seconds: float) -> bool:
    """Whether the run ends within these seconds, which pass otherwise."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return False
    return True


def table(minutes: Sequence[Minute]) -> str:
    """A row a minute."""
    rows = []
    for minute in minutes:
        told = minute.told()
        rows.append(
            [
                *(str(told[name]) for name in ("minute", "asked", "failed", "p50_s", "p95_s")),
                " ".join(minute.faults),
                "; ".join(f"{count} x {cause}" for cause, count in minute.causes.most_common()),
            ]
        )
    return markdown(["minute", "asked", "failed", "p50 s", "p95 s", "faults", "failures"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.availability", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--pause", type=float, default=20.0, metavar="SECONDS", help="mean of a user's pauses")
    parser.add_argument("--patience", type=float, default=30.0, metavar="SECONDS", help="of a user, for an answer")
    parser.add_argument("--every", type=float, default=30.0, metavar="SECONDS", help="about how often a fault happens")
    parser.add_argument("--least", type=float, default=0.999, help="the availability that is promised")
    parser.add_argument("--port", type=int, default=8766)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("availability"), help="OUT.jsonl and OUT.md are written")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), options)
        try:
            asyncio.run(run.run())
        finally:
            status = run.end()
            options.out.with_suffix(".log").write_bytes((Path(folder) / "server.log").read_bytes())
    options.out.with_suffix(".md").write_text(table(run.minutes))
    asked, failed = run.totals()
    if not asked:
        raise SystemExit("no user has asked within the run; make it longer")
    share = 1.0 - failed / asked
    low, high = binomtest(asked - failed, asked).proportion_ci(0.95, "exact")
    faults = Counter(fault for minute in run.minutes for fault in minute.faults)
    print(f"{asked} requests of {options.users} users, {failed} failed: {share:.4%} ({low:.4%} to {high:.4%})")
    print(f"faults: {', '.join(f'{count} x {name}' for name, count in faults.most_common())}")
    for cause, count in sum((minute.causes for minute in run.minutes), Counter()).most_common():
        print(f"  {count} x {cause}")
    if status != 0:
        print(f"FAILED: the server ended with exit status {status}")
    return 0 if share >= options.least and status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
