"""Processor cores that this process may use, and how many threads should compute on them."""

from __future__ import annotations

import os

from inferd.machine.cgroup import cores_allowed, groups_around


def usable_cores() -> tuple[int, ...]:
    """All cores, or those that taskset, a container's cpuset or a service manager left."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def num_threads(replicas: int) -> int:
    """Compute threads for one of ``replicas`` copies of a model.

    The cores are divided among the copies, and a CPU limit is rounded down. A limit of 3.5 cores gives three threads: a
    fourth would be stopped for part of each period, and the other threads would wait for it.
    """
    cores, allowed = len(usable_cores()), cores_allowed(groups_around())
    return max(1, (cores if allowed is None else min(cores, int(allowed))) // replicas)
