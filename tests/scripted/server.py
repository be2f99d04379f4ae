"""A whole server whose models answer from scripts, as a script: its argument is a configuration as JSON.

Its address is its first line on stdout, and where it listens for gRPC the second.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from inferd.app.root import ServeOptions, run
from inferd.config import Config
from inferd.errors import InferdError

WORKER = (sys.executable, str(Path(__file__).resolve().parent / "worker.py"))


def main() -> int:
    try:
        config = msgspec.convert(json.loads(sys.argv[1]), Config)
        options = ServeOptions(
            None,
            on_ready=lambda ready: print(ready.address, ready.grpc_address or "", sep="\n", flush=True),
            command=WORKER,
        )
        return run(config, options)
    except InferdError as error:
        print(f"Error: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
