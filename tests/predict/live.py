"""A whole server with real workers, from a configuration: what an operator runs."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml


class Address(NamedTuple):
    """Where a server listens."""

    url: str
    grpc: str
    pid: int


@contextlib.contextmanager
def serving(
    folder: Path, models: Mapping[str, Mapping[str, Any]], *, inferd: Sequence[str] = ("-m", "inferd"), **server: object
) -> Iterator[Address]:
    """``inferd serve`` with these models and settings, once each model is ready, has failed or waits for a node.
    ``folder`` is for its configuration, state and log. ``inferd``: the arguments of Python that run it."""
    file, log = folder / "inferd.yaml", folder / "log"
    file.write_text(yaml.safe_dump({"server": {"port": 0, "reload": False, **server}, "models": {**models}}))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "INFERD_STATE__DATA_DIR": str(folder / "state")}
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, *inferd, "serve", str(file)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=env,
        )
        try:
            assert process.stdout is not None
            found = None
            for line in process.stdout:
                found = re.search(r"inferd (?:is ready|listens) at (https?://[^\s,]+)(?:, gRPC at (\S+))?", line)
                if found is not None:
                    break
            assert found is not None, log.read_text()[-3000:]
            yield Address(found[1], found[2] or "", process.pid)
        finally:
            process.terminate()
            process.communicate(timeout=30)
