"""Which of the machine's cores this process may use: all of them, or what taskset, a container or a service manager left."""

from __future__ import annotations

import os


def usable_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def num_threads(replicas: int) -> int:
    """Compute threads of one of ``replicas`` copies of a model: these cores, shared out."""
    return max(1, len(usable_cores()) // replicas)
