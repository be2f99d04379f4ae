"""The processors and the memory that this process may use: their load, and the time that a container's limit takes.

From /proc and the control groups of Linux, versions 1 and 2.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from inferd.machine.cgroup import cores_allowed, groups_around
from inferd.machine.memory import available_bytes, limit_bytes
from inferd.observe.devices.reading import Reading, Reason

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")


class Processor:
    """One reading, of all processors together."""

    def __init__(self, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        self._proc = proc
        self._groups = groups_around(cgroup, proc / "self" / "cgroup")
        self._group_v1 = _cpu_group_v1(cgroup, proc / "self" / "cgroup")
        self._last: tuple[float, float] | None = None  # seconds that all processors worked, and that passed on all

    def read(self, now: float) -> list[Reading]:
        total = limit_bytes()
        throttled_s = self._throttled_s()
        reasons: dict[Reason, float] = {} if throttled_s is None else {"quota": throttled_s}
        return [
            Reading(
                device="cpu",
                kind="cpu",
                at=now,
                place="cpu",
                duty=self._duty(now),
                memory_used_bytes=max(total - available_bytes(), 0),
                memory_total_bytes=total,
                throttled_s=reasons,
            )
        ]

    def _duty(self, now: float) -> float | None:
        """Of the machine, or of what a control group may use of it where that is less."""
        cores, used_us = cores_allowed(self._groups), _field(self._groups[0] / "cpu.stat", "usage_usec")
        if cores is not None and used_us is not None:
            current = (used_us / 1e6, now * cores)
        else:
            times = (self._proc / "stat").read_text().partition("\n")[0].split()[1:9]  # without guests: in user time
            ticks = [int(text) for text in times]
            whole, tick = sum(ticks), os.sysconf("SC_CLK_TCK")
            current = ((whole - ticks[3] - ticks[4]) / tick, whole / tick)  # idle and waiting for a disk
        before, self._last = self._last, current
        if before is None or current[1] <= before[1]:
            return None
        return min(max((current[0] - before[0]) / (current[1] - before[1]), 0.0), 1.0)

    def _throttled_s(self) -> float | None:
        """Seconds in which the limit of processor time stopped the group, summed over processors."""
        in_us = _field(self._groups[0] / "cpu.stat", "throttled_usec")
        if in_us is not None:
            return in_us / 1e6
        in_ns = None if self._group_v1 is None else _field(self._group_v1 / "cpu.stat", "throttled_time")
        return None if in_ns is None else in_ns / 1e9


def _cpu_group_v1(root: Path, own: Path) -> Path | None:
    """The folder of this process's group of processor time in version 1."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            below = path.lstrip("/")
            for mount in (controllers, "cpu", "cpu,cpuacct"):
                if (root / mount / below / "cpu.stat").is_file():
                    return root / mount / below
    return None


def _field(file: Path, wanted: str) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(" ")
        if name == wanted and value.isdecimal():
            return int(value)
    return None


def find_processor(proc: Path = PROC, cgroup: Path = CGROUP) -> Processor | None:
    """None where the system has no /proc."""
    return Processor(proc, cgroup) if (proc / "stat").is_file() else None
