"""A whole server around the tiny backend, as a script: its argument is a configuration as JSON, or a YAML file
that is followed. Its address is its first line on stdout, and where it listens for gRPC the second."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec

from inferd.app.root import ServeOptions, run
from inferd.app.source import ConfigSource
from inferd.config import Config, ModelConfig, load_config
from inferd.errors import InferdError

TINY_WORKER = (sys.executable, str(Path(__file__).resolve().parent / "worker" / "tiny_backend.py"))


def unknown(name: str, config: ModelConfig, *, free_bytes: int | None = None) -> None:
    """The tiny backend's sources are no folders, so what they take cannot be planned."""


def main() -> int:
    source = None
    try:
        if sys.argv[1].endswith(".yaml"):
            path = Path(sys.argv[1])
            source = ConfigSource(path, lambda: load_config(path, os.environ, {}))
            config = source.read()
        else:
            config = msgspec.convert(json.loads(sys.argv[1]), Config)
        options = ServeOptions(
            source,
            on_ready=lambda ready: print(ready.address, ready.grpc_address or "", sep="\n", flush=True),
            command=TINY_WORKER,
            plan=unknown,
        )
        return run(config, options)
    except InferdError as error:
        print(f"Error: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
