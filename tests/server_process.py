"""A whole server around the tiny backend as a process, for tests that send it signals, files and requests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
from tests.worker.watching import children, is_running, until_now

SCRIPT = Path(__file__).resolve().parent / "tiny_server.py"


class Server:
    """A server process and its address."""

    def __init__(
        self,
        server: Mapping[str, object] | None = None,
        source: str = "tiny",
        *,
        data_dir: Path | None = None,
        file: Path | None = None,
    ) -> None:
        """``file``: serve this configuration file, and follow it, instead of one model."""
        config: dict[str, object] = {
            "server": {"port": 0, "grace_s": 10, **(server or {})},
            "models": {"tiny": {"source": source}},
        }
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        if data_dir is not None:
            env["INFERD_STATE__DATA_DIR"] = str(data_dir)
            config["state"] = {"data_dir": str(data_dir)}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(config) if file is None else str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.workers: list[int] = []

    def await_ready(self) -> Server:
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, self.end()[1]
        self.workers = children(self.process.pid)
        assert self.workers
        return self

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = 20.0) -> tuple[int, str]:
        """Exit code and stderr; a process group member left behind is a failure."""
        _, errors = self.process.communicate(timeout=seconds)
        until_now(lambda: not any(is_running(pid) for pid in self.workers), "the workers are gone", 10)
        return self.process.returncode, errors

    def status(self, path: str) -> int:
        return httpx.get(self.url + path, timeout=10).status_code

    def stream(self, prompt: str, max_tokens: int) -> contextlib.AbstractContextManager[httpx.Response]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        return httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=30)


@contextlib.contextmanager
def running(
    server: Mapping[str, object] | None = None,
    source: str = "tiny",
    *,
    data_dir: Path | None = None,
    file: Path | None = None,
) -> Iterator[Server]:
    made = Server(server, source, data_dir=data_dir, file=file)
    try:
        yield made.await_ready()
    finally:
        workers = {*made.workers, *(children(made.process.pid) if made.process.poll() is None else ())}
        made.process.kill()
        made.process.communicate()
        until_now(lambda: not any(is_running(pid) for pid in workers), "the workers are gone", 10)
