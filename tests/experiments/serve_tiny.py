"""A whole server from a configuration file that may change while it serves.

    serve_tiny.py FILE [DEFECT ...]

Around the tiny backend, or with EXPERIMENT_WORKER=real around the real engine. Its address is its first
line on stdout. Defects are broken on purpose before anything starts: the positive
controls of the experiments (``defects.py``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.experiments.defects import inject
from tests.worker.watching import IMPATIENT, TINY_WORKER

from inferd.app.root import Ready, ServeOptions, run
from inferd.app.source import ConfigSource
from inferd.config import Config, ModelConfig, load_config
from inferd.errors import InferdError
from inferd.http.connection import Timeouts


def tell(ready: Ready) -> None:
    print(ready.address, flush=True)


def unknown(name: str, config: ModelConfig, *, free_bytes: int | None = None) -> None:
    """The tiny backend's sources are no folders, so what they take cannot be planned."""


def main() -> int:
    path = Path(sys.argv[1])

    def read() -> Config:
        return load_config(path, os.environ, {})

    seconds = os.environ.get("EXPERIMENT_HEADER_S")
    if seconds is not None:  # the server's own patience with headers is longer than a test's
        Timeouts.__new__.__defaults__ = (float(seconds), *Timeouts()[1:])
    try:
        for name in sys.argv[2:]:
            inject(name)
        source = ConfigSource(path, read)
        if os.environ.get("EXPERIMENT_WORKER") == "real":
            return run(read(), ServeOptions(source, on_ready=tell))
        tiny = ServeOptions(source, on_ready=tell, command=TINY_WORKER, patience=IMPATIENT, plan=unknown)
        return run(read(), tiny)
    except InferdError as error:
        print(f"Error: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
