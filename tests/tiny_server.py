"""A whole server around the tiny backend, as a script: the flags are JSON of the server's section and
of the model's; its address is its first line on stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from inferd.app.root import run
from inferd.config import Config
from inferd.errors import InferdError

TINY_WORKER = (sys.executable, str(Path(__file__).resolve().parent / "worker" / "tiny_backend.py"))


def main() -> int:
    config = msgspec.convert(json.loads(sys.argv[1]), Config)
    try:
        return run(config, on_ready=lambda ready: print(ready.address, flush=True), command=TINY_WORKER)
    except InferdError as error:
        print(f"Error: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
