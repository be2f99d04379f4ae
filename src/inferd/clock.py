"""The one place that asks what time it is. Elsewhere ``now`` is a parameter."""

from __future__ import annotations

import time
from collections.abc import Callable

now: Callable[[], float] = time.monotonic
"""Seconds on the host's monotonic clock, the same for every process on the host."""

wall: Callable[[], float] = time.time
"""Seconds since the epoch, for people and for ``created`` fields; never for durations."""

computing: Callable[[], float] = time.thread_time
"""Seconds that the calling thread has computed: other programs on the host do not count, neither do other threads."""
