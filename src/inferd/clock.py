"""The one place that asks what time it is. Elsewhere ``now`` is a parameter."""

from __future__ import annotations

import time


def now() -> float:
    """Seconds on the host's monotonic clock, the same for every process on the host."""
    return time.monotonic()


def wall() -> float:
    """Seconds since the epoch, for people and for ``created`` fields; never for durations."""
    return time.time()
