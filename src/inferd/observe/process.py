"""The process's own numbers: memory, processor time, open files.

The metrics are those of every Prometheus client (prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics),
read from /proc (proc(5)). A system without /proc has none.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

from inferd.observe import metrics as m
from inferd.observe.metrics import Metric

_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def process_age_s(proc: Path = Path("/proc")) -> float:
    """Seconds since this process began, in steps of the system's clock tick. 0: the system does not say."""
    try:
        fields = (proc / "self" / "stat").read_bytes().rpartition(b")")[2].split()
        up_s = float((proc / "uptime").read_bytes().split()[0])
    except OSError:
        return 0.0
    return max(0.0, up_s - int(fields[19]) / _CLOCK_TICKS)


def process_metrics(proc: Path = Path("/proc")) -> dict[Metric, float]:
    """``process_*`` as they are now. A file that cannot be read takes its metrics away, and no others."""
    return _times_and_memory(proc) | _files(proc)


def _times_and_memory(proc: Path) -> dict[Metric, float]:
    try:
        # The name of the program comes first, in brackets, and may itself contain brackets and blanks.
        fields = (proc / "self" / "stat").read_bytes().rpartition(b")")[2].split()
        booted = (proc / "stat").read_bytes().partition(b"\nbtime ")[2].split()
    except OSError:
        return {}
    user, system, started = (int(fields[at]) / _CLOCK_TICKS for at in (11, 12, 19))
    return {
        m.PROCESS_VIRTUAL: int(fields[20]),
        m.PROCESS_RESIDENT: int(fields[21]) * _PAGE_BYTES,
        m.PROCESS_START: started + int(booted[0]),
        m.PROCESS_CPU: user + system,
    }


def _files(proc: Path) -> dict[Metric, float]:
    try:
        num_open = len(os.listdir(proc / "self" / "fd"))
    except OSError:
        return {}
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {m.PROCESS_FILES: num_open, m.PROCESS_MAX_FILES: most}
