"""Servers whose model answers from a script, as processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.clients.scripted_model import write_scripted_model
from tests.scripted import Rule, write_scripted_answers


class ScriptedServer:
    """A running server with one model. ``url`` has no path; ``grpc`` is empty where it does not listen for gRPC."""

    def __init__(self, process: subprocess.Popen[str], url: str, grpc: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.grpc = grpc
        self._log = log

    @property
    def api(self) -> str:
        return self.url + "/v1"

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def lines(self) -> list[dict[str, Any]]:
        """The access log: one line for each request that has ended."""
        lines = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == "http"]


@contextlib.contextmanager
def serving(
    folder: Path,
    rules: Sequence[Rule],
    *,
    name: str = "scripted",
    max_positions: int = 65536,
    reasons: bool = False,
    reads_tools: bool = False,
    data_dir: Path | None = None,
    state: dict[str, Any] | None = None,
    has_grpc: bool = False,
    drift: Mapping[str, object] | None = None,
) -> Iterator[ScriptedServer]:
    """Serve a model with these rules, whose checkpoint and log are written to ``folder``.

    ``data_dir``: of the server's state; None: the folder that the environment names. ``state``: further settings of it.
    ``drift``: of the model.
    """
    model = folder / "model"
    model.mkdir(parents=True)
    write_scripted_model(model, max_positions=max_positions, reasons=reasons, reads_tools=reads_tools)
    write_scripted_answers(model, rules)
    config: dict[str, Any] = {
        "server": {"host": "127.0.0.1", "port": 0},
        "models": {name: {"source": str(model), "threads": 1, "drift": {**(drift or {})}}},
    }
    if has_grpc:
        config["server"]["grpc_port"] = 0
    if data_dir is not None:
        config["state"] = {**(state or {}), "data_dir": str(data_dir)}
    log = folder / "stderr"
    with log.open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.scripted.server", json.dumps(config)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert process.stdout is not None
    try:
        url, grpc = process.stdout.readline().strip(), process.stdout.readline().strip()
        assert url, log.read_text(encoding="utf-8")
        yield ScriptedServer(process, url, grpc, log)
        process.terminate()
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.communicate()
