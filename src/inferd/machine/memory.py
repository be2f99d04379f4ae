"""The memory that a process holds, and the memory that is still available on the machine.

The module imports little, because every worker reads it at its start.
"""

from __future__ import annotations

import os
from pathlib import Path

from inferd.machine.cgroup import groups_around, memory_left, memory_limit


def rss_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process; 0 where the system does not report it, or the process is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def limit_bytes() -> int:
    """Memory that processes here may take together: the machine's, or less where a control group says so."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit(groups_around())
    return whole if limit is None else min(whole, limit)


def available_bytes() -> int:
    """Memory this process may still take: the kernel's estimate, or less where a control group says so."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    left = memory_left(groups_around())
    return max(free if left is None else min(free, left), 0)
