"""One server for all clients of a session: the command a person types, as a process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.clients.scripted_model import write_scripted_model
from tests.worker.watching import children, is_running, until_now

MAX_RUNNING, MAX_WAITING = 4, 4


class Server:
    """A running ``inferd serve`` and what it tells about itself."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self._log = log

    @property
    def api(self) -> str:
        return self.url + "/v1"

    @property
    def workers(self) -> list[int]:
        return children(self.process.pid)

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def logged(self, request_id: str) -> list[dict[str, Any]]:
        """The access log's lines of one request id: one per HTTP request."""
        lines = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("request_id") == request_id]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that have these labels."""
        total = 0.0
        for line in httpx.get(self.url + "/metrics", timeout=10).text.splitlines():
            match = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
            if match and labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', match[1] or "")).items():
                total += float(match[2])
        return total


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``inferd serve`` on a free port; at the end SIGTERM must end it, with exit code 0 and no trace."""
    folder = write_scripted_model(tmp_path_factory.mktemp("scripted-model"))
    log = tmp_path_factory.mktemp("log") / "stderr"
    flags = ("--name", "scripted", "--port", "0", "--threads", "1")
    limits = ("--max-num-seqs", str(MAX_RUNNING), "--queue-max-requests", str(MAX_WAITING))
    with log.open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "inferd", "serve", str(folder), *flags, *limits],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert process.stdout is not None
    try:
        ready = next((line for line in process.stdout if "is ready at" in line), "")
        assert ready, log.read_text(encoding="utf-8")
        running = Server(process, re.findall(r"http://\S+", ready)[0], log)
        yield running
        workers = running.workers
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert "Traceback" not in running.log()
        until_now(lambda: not any(is_running(pid) for pid in workers), "the workers are gone", 5)
    finally:
        process.kill()
        process.communicate()
