"""What a process holds of the machine's memory. A file of its own, as every worker needs it and nothing else."""

from __future__ import annotations

import os


def rss_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process; 0 where the system does not say, or the process is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
