"""The driver around tiny workers, for a real Ray cluster."""

from __future__ import annotations

import sys

from tests.tiny_server import TINY_WORKER

from inferd.nodes.ray.driver import main

if __name__ == "__main__":
    sys.exit(main((TINY_WORKER,)))
