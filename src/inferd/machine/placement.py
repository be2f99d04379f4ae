"""Which of the machine's cores this process may use, and how many threads should compute on them."""

from __future__ import annotations

import os

from inferd.machine.cgroup import cores_allowed, groups_around


def usable_cores() -> tuple[int, ...]:
    """All of them, or what taskset, a container's cpuset or a service manager left."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def num_threads(replicas: int) -> int:
    """Compute threads of one of ``replicas`` copies of a model: these cores, shared out, and no more than a CPU limit pays
    for. Of 3.5 cores three: threads that are stopped for a while keep the others waiting."""
    cores, allowed = len(usable_cores()), cores_allowed(groups_around())
    return max(1, (cores if allowed is None else min(cores, int(allowed))) // replicas)
