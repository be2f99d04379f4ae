"""Another program as a process: started, watched, ended. Knows neither models nor loads."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]


class PeerFailed(Exception):
    """An engine did not do what was asked; the message says which and shows its last words."""


def tree_rss(pid: int) -> int:
    """Resident bytes of a process and all below it; pages that two of them share count twice."""
    total = 0
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


class PeakMemory(threading.Thread):
    """Watches a process tree until told to stop."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.done = pid, 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.5):
            self.peak = max(self.peak, tree_rss(self.pid))

    def stop(self) -> int:
        """The largest resident set seen."""
        self.done.set()
        self.join()
        return max(self.peak, tree_rss(self.pid))


def metric(url: str, name: str) -> float:
    """Sum of a metric's series."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def await_answer(probe: str, limit_s: float) -> None:
    """Of a server that runs. Raises PeerFailed."""
    until = time.perf_counter() + limit_s
    while not answers(probe):
        if time.perf_counter() > until:
            raise PeerFailed(f"{probe} was not answered within {limit_s:.0f} s")
        time.sleep(0.02)


@contextmanager
def serving(
    command: Sequence[str | Path], environment: Mapping[str, str], probe: str, log: Path, limit_s: float
) -> Iterator[tuple[int, float]]:
    """(process id, seconds until the probe said yes). The whole process group ends with the block, stopped or not."""
    with log.open("w") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=tempfile.gettempdir(),
        )
        try:
            while not answers(probe):
                if process.poll() is not None or time.perf_counter() - began > limit_s:
                    words = " ".join(map(str, command))
                    raise PeerFailed(f"{words} was not ready after {time.perf_counter() - began:.0f} s; see {log}")
                time.sleep(0.02)
            yield process.pid, time.perf_counter() - began
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)
            for stop, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
                if process.poll() is None:
                    os.killpg(process.pid, stop)
                    try:
                        process.wait(patience)
                    except subprocess.TimeoutExpired:
                        continue
