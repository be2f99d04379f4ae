"""Limits that a container or a service manager sets for this process, read from its control groups (Linux, version 2).

A process belongs to one group, which lies in other groups up to the visible root. The smallest limit among them holds.
A CPU limit is time, not cores: no affinity mask shows it. A process that starts one thread per visible core is then
stopped in the middle of its work for the rest of each period. https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def groups_around(root: Path = _ROOT, own: Path = _OWN) -> list[Path]:
    """The folders of the groups, the innermost first. ``own``: the kernel's file that names the process's group."""
    lines = _text(own).splitlines()
    inside = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    found = root / inside
    return [found, *(folder for folder in found.parents if folder == root or root in folder.parents)]


def memory_left(groups: Sequence[Path]) -> int | None:
    """Bytes until the first limit is reached; None: there is no limit.

    The page cache counts as free, because the kernel reclaims it before it refuses memory. Otherwise a checkpoint that
    was just read would count twice.
    """
    least: int | None = None
    for group in groups:
        limit, used = _text(group / "memory.max"), _text(group / "memory.current")
        if not limit.isdecimal() or not used.isdecimal():  # "max", or no such group
            continue
        files = 0
        for line in _text(group / "memory.stat").splitlines():
            name, _, size = line.partition(" ")
            files += int(size) if name in ("active_file", "inactive_file") else 0
        left = max(int(limit) - max(int(used) - files, 0), 0)
        least = left if least is None else min(least, left)
    return least


def memory_limit(groups: Sequence[Path]) -> int | None:
    """Bytes of the smallest limit; None: there is no limit."""
    limits = [int(text) for group in groups if (text := _text(group / "memory.max")).isdecimal()]
    return min(limits, default=None)


def cores_allowed(groups: Sequence[Path]) -> float | None:
    """Seconds of processor time per second, by the smallest limit; None: there is no limit."""
    least: float | None = None
    for group in groups:
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = int(quota) / int(period)
            least = cores if least is None else min(least, cores)
    return least


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
