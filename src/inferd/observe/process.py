"""The process's own numbers in Prometheus' text format: memory, processor time, open files."""

from __future__ import annotations

import functools
from collections.abc import Callable


def process_metrics() -> bytes:
    """``process_*`` as they are now."""
    return _renderer()()


@functools.cache
def _renderer() -> Callable[[], bytes]:
    """Made when it is first asked for: the client's import takes longer than most of a server's start."""
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import generate_latest

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return lambda: generate_latest(registry)
