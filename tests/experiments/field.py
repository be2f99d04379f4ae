"""Where an experiment happens: servers of its own, real processes, with the books checked before they leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from tests.experiments.books import Page, Tally, Vitals
from tests.experiments.client import JSON, Client
from tests.stopwatch import Stopwatch
from tests.worker.watching import children, is_running, until_now

SCRIPT = Path(__file__).resolve().parent / "serve_tiny.py"
GOLDEN = "golden"
T = TypeVar("T")


class Server:
    """One server process, its configuration file, its log and its clients' books."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        defects: tuple[str, ...],
        env: Mapping[str, str],
        log: IO[bytes] | None = None,
        has_session: bool = False,
    ) -> None:
        """``has_session``: the processes are in a session of their own, which the kernel schedules as a group."""
        self.folder = folder
        self.file = folder / "inferd.yaml"
        self.config: JSON = {
            "server": {"port": 0, "grace_s": 10, "auth": "off", **config.get("server", {})},
            "state": {"data_dir": str(folder / "data"), **config.get("state", {})},
            **{name: section for name, section in config.items() if name not in ("server", "state")},
        }
        self.config.setdefault("models", {"tiny": {"source": "tiny"}})
        self.write(self.config)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - read after the process too
        weakref.finalize(self, self._log.close)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("INFERD_")}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(self.file), *defects],
            stdout=subprocess.PIPE,
            stderr=self._log if log is None else log,
            text=True,
            env={**clean, "PYTHONPATH": os.pathsep.join(sys.path), **env},
            start_new_session=has_session,
        )
        self.tally = Tally()
        self.workers: set[int] = set()

    def write(self, config: Mapping[str, Any]) -> None:
        """Replace the configuration file, whole."""
        beside = self.file.with_suffix(".new")
        beside.write_text(json.dumps(config))  # JSON is YAML
        beside.rename(self.file)

    @property
    def log(self) -> str:
        self._log.flush()
        return os.pread(self._log.fileno(), 64_000_000, 0).decode(errors="replace")

    def await_ready(self) -> None:
        assert self.process.stdout is not None
        address = self.process.stdout.readline().strip()
        assert address, f"the server did not start: {self.log[-400:]}"
        parts = urlsplit(address)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host, self.port = parts.hostname, parts.port
        self.client = Client(self.host, self.port, self.tally)
        socket = Path(self.config["state"]["data_dir"]) / "run" / f"{self.port}.sock"
        self.operator = Client(str(socket), 0, self.tally)

    def begin(self) -> None:
        """Take down how things are before anything is injected."""
        self.golden = self.golden_answers()
        self.before = Vitals.of(self.process.pid)
        self.page = self.metrics()
        self.workers |= set(children(self.process.pid))

    def allow(self, *, descriptors: int) -> None:
        """So many more descriptors at the end are no leak."""
        self.before = replace(self.before, descriptors=self.before.descriptors + descriptors)

    def golden_answers(self) -> dict[str, str]:
        """What every local model says when nothing is wrong."""
        names = [
            n
            for n, m in self.config["models"].items()
            if not str(m["source"]).startswith("openai:") and m.get("load") != "on_demand"
        ]
        return {name: self.client.complete(GOLDEN, model=name, max_tokens=5, temperature=0).text for name in names}

    def metrics(self) -> Page:
        return Page(self.client.get("/metrics").body.decode())

    def status(self) -> JSON:
        return self.client.get("/health/ready").json

    @property
    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def worker_pids(self) -> list[int]:
        pids = children(self.process.pid)
        self.workers |= set(pids)
        return pids

    def key(self, tenant: str, **spec: Any) -> str:
        """A new key's text."""
        made = self.operator.post("/admin/keys", {"tenant": tenant, **spec})
        assert made.status == 201, made
        text: str = made.json["key"]
        return text

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = 30.0) -> tuple[int, float]:
        """Send a signal and wait: the exit code, and how long it took."""
        began = Stopwatch()
        self.worker_pids()
        self.process.send_signal(number)
        return self.ended(seconds), began.seconds

    def ended(self, seconds: float = 30.0) -> int:
        """The exit code of a server that is leaving. It may leave no worker behind."""
        until_now(lambda: self.process.poll() is not None, f"the server did not exit within {seconds} s", seconds)
        code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        until_now(lambda: not any(map(is_running, self.workers)), "I3: a worker outlived its server", 10)
        return code

    def is_ready(self) -> bool:
        return self.client.get("/health/ready").status == 200

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 20.0) -> float:
        """Wait for something outside this process; how long it took."""
        began = Stopwatch()
        until_now(condition, what, seconds)
        return began.seconds

    def check(self) -> None:
        """The invariants, once the server is idle."""
        until_now(self.is_ready, "I8: ready again after the experiment", 30)
        problems = self._unbalanced()
        watch = Stopwatch()
        while problems and not watch.is_past(5.0):
            time.sleep(0.05)  # gauges and processes that are on their way
            problems = self._unbalanced()
        problems += self.tally.wrong
        if self.golden_answers() != self.golden:
            problems.append("I9: golden answers differ from those before")
        log, page = self.log, self.metrics()
        problems += [f"counters: {fallen}" for fallen in page.decreased(self.page)]
        if "Traceback" in log and not (
            page.sum("inferd_errors_total")
            or page.sum("inferd_replica_faults_total")
            or page.sum("inferd_observer_failures_total")
        ):
            problems.append(f"I10: a traceback without a metric: {log[log.index('Traceback') :][:2000]}")
        assert not problems, "\n".join(problems)

    def _unbalanced(self) -> list[str]:
        page = self.metrics()
        problems = [
            f"I2: {name} is {page.sum(name)} when idle"
            for name in ("inferd_queue_waiting", "inferd_in_flight", "inferd_running")
            if page.sum(name)
        ]
        if page.sum("inferd_kv_blocks", state="used"):
            problems.append("I1: blocks are in use when idle")
        problems += [f"I3: {above}" for above in Vitals.of(self.process.pid).above(self.before)]
        routes = ("/v1/completions", "/v1/chat/completions")
        ok = sum(page.sum("inferd_http_requests_total", route=route, status="200") for route in routes)
        done = page.sum("inferd_requests_total", outcome="done")
        ended = page.sum("inferd_requests_total")
        if done > ok:  # streams that fail after the head are 200 as well, and clients that left are 499
            problems.append(f"I4: {done} requests done, {ok} answered with 200")
        by_outcome = sum(
            page.sum("inferd_requests_total", outcome=o) for o in ("done", "failed", "cancelled", "refused")
        )
        if by_outcome != ended:
            problems.append(f"I4: {ended} ended, {by_outcome} with a known outcome")
        for name, seen in (
            ("inferd_prompt_tokens_total", self.tally.prompt_tokens),
            ("inferd_generation_tokens_total", self.tally.completion_tokens),
        ):
            counted = page.sum(name)
            if counted < seen or (counted > seen and not self.tally.num_cut):
                problems.append(f"I5: {name} is {counted}, the clients were told {seen}")
        return problems

    def stop(self) -> tuple[int, str]:
        """SIGTERM; the exit code and the log. No worker may be left behind."""
        if self.process.poll() is None:
            return self.end()[0], self.log
        return self.ended(), self.log

    def kill(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.worker_pids()
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        for pid in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._log.close()


class Field:
    """What an experiment gets: a folder, servers, and whether this is its control."""

    def __init__(self, folder: Path, defect: str | None = None) -> None:
        self.folder = folder
        self.defect = defect
        self.stack = contextlib.ExitStack()
        self._num_servers = 0

    @property
    def is_control(self) -> bool:
        return self.defect is not None

    def either(self, sound: T, broken: T) -> T:
        """What is used in the experiment, and in its control."""
        return broken if self.is_control else sound

    @contextlib.contextmanager
    def serve(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        defects: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
        checked: bool = True,
        wait: bool = True,
    ) -> Iterator[Server]:
        """A server for the length of the block; ``defects`` are broken in the control alone. At the end of
        a block that went well the books must balance, unless it is not to be ``checked``: it has left by
        then, or is not whole on purpose. ``wait``: until it is ready."""
        self._num_servers += 1
        folder = self.folder / f"server{self._num_servers}"
        folder.mkdir(parents=True)
        server = Server(folder, config or {}, defects if self.is_control else (), env or {}, log)
        try:
            if wait:
                server.await_ready()
                server.begin()
            yield server
            if checked and wait:
                server.check()
                code, said = server.stop()
                assert code == 0, f"exit code {code}: {said[-2000:]}"
        finally:
            server.kill()


def together(count: int, work: Callable[[int], T]) -> list[T]:
    """So many threads at once, one call each; the results in order. A failure in one is raised."""
    results: dict[int, T] = {}
    failures: list[BaseException] = []
    barrier = threading.Barrier(count)

    def one(number: int) -> None:
        try:
            barrier.wait(30)
            results[number] = work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if failures:
        raise failures[0]
    return [results[number] for number in range(count)]
