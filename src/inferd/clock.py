"""The clocks. Other modules take ``now`` as a parameter or read it here."""

from __future__ import annotations

import time
from collections.abc import Callable

now: Callable[[], float] = time.monotonic
"""Seconds on the host's monotonic clock, the same for every process on the host."""

wall: Callable[[], float] = time.time
"""Seconds since the epoch, for display and for ``created`` fields; never for durations."""

computing: Callable[[], float] = time.thread_time
"""Seconds of processor time of the calling thread."""

_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


def since_boot() -> float:
    """Seconds since the machine was booted. Unlike ``now`` it also counts the time during which the machine slept."""
    return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)
