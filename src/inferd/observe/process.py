"""The process's own numbers in Prometheus' text format: memory, processor time, open files.

The metrics are those of every Prometheus client (prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics),
read from /proc (proc(5)). A system without /proc has none.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

from inferd.observe.series import number

_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def process_metrics(proc: Path = Path("/proc")) -> bytes:
    """``process_*`` as they are now. A file that cannot be read takes its metrics away, and no others."""
    return "".join(_times_and_memory(proc) + _files(proc)).encode()


def _times_and_memory(proc: Path) -> list[str]:
    try:
        # The name of the program comes first, in brackets, and may itself contain brackets and blanks.
        fields = (proc / "self" / "stat").read_bytes().rpartition(b")")[2].split()
        booted = (proc / "stat").read_bytes().partition(b"\nbtime ")[2].split()
    except OSError:
        return []
    user, system, started = (int(fields[at]) / _CLOCK_TICKS for at in (11, 12, 19))
    return [
        _metric("virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", int(fields[20])),
        _metric("resident_memory_bytes", "gauge", "Resident memory size in bytes.", int(fields[21]) * _PAGE_BYTES),
        _metric(
            "start_time_seconds",
            "gauge",
            "Start time of the process since unix epoch in seconds.",
            started + int(booted[0]),
        ),
        _metric("cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.", user + system),
    ]


def _files(proc: Path) -> list[str]:
    try:
        num_open = len(os.listdir(proc / "self" / "fd"))
    except OSError:
        return []
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        _metric("open_fds", "gauge", "Number of open file descriptors.", num_open),
        _metric("max_fds", "gauge", "Maximum number of open file descriptors.", most),
    ]


def _metric(name: str, kind: str, text: str, value: float) -> str:
    return f"# HELP process_{name} {text}\n# TYPE process_{name} {kind}\nprocess_{name} {number(value)}\n"
