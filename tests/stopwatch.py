"""Seconds for tests that hold a promise in seconds, on machines that other programs share.

Time in which a thread had to wait for a processor is not counted: it is the machine's. Sleeps, blocking calls and
timeouts of a program are counted to the last millisecond.
"""

from __future__ import annotations

import time
from pathlib import Path

_PRESSURE = Path("/proc/pressure/cpu")
LONGEST_S = 90.0
"""The longest wait on a machine that is always crowded: less than the limit of a test."""


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._began = time.monotonic(), _crowded_s()

    @property
    def seconds(self) -> float:
        began, crowded_s = self._began
        return time.monotonic() - began - (_crowded_s() - crowded_s)

    def is_past(self, seconds: float) -> bool:
        """Whether a wait of so many seconds is over."""
        return self.seconds > seconds or time.monotonic() - self._began[0] > max(seconds, LONGEST_S)


def _crowded_s() -> float:
    """Since the machine's start: as Linux's pressure stall information tells it; 0 where it does not."""
    try:
        some = _PRESSURE.read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return 0.0
    return int(some.rpartition("total=")[2]) / 1e6
