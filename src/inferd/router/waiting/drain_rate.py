"""The rate at which a model's queue drains, in requests per second. Pure: time is an argument.

While no request waits, the rate of ends is the rate of arrivals and not the capacity. So only the ends in a period in
which requests waited all the time are counted. Each such period is measured anew.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW_S = 30.0
SOUND_ENDS = 8
"""Ends in one period below which there is no estimate."""


class DrainRate:
    """The drain rate of one model's queue. Times are of the monotonic clock, in seconds."""

    __slots__ = ("_ends", "_latest")

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=512)
        self._latest: deque[float] = deque(maxlen=64)  # also the ends while no request waited

    def ended(self, now: float, *, has_waiting: bool) -> None:
        """Note that a replica served a request. ``has_waiting``: whether requests wait in the queue now."""
        self._latest.append(now)
        if has_waiting:
            self._ends.append(now)
        else:
            self._ends.clear()

    def paused(self) -> None:
        """Note that no request waits any more, without an end of a served request."""
        self._ends.clear()

    def per_s(self, now: float) -> float | None:
        """Ends per second up to ``now``; None: fewer than ``SOUND_ENDS`` were measured."""
        ends = self._ends
        while ends and ends[0] < now - WINDOW_S:
            ends.popleft()
        if len(ends) < SOUND_ENDS or now <= ends[0]:
            return None
        return (len(ends) - 1) / (now - ends[0])

    def wait_s(self, num_ahead: int, now: float) -> float | None:
        """Seconds until ``num_ahead`` requests have been served; None: fewer than ``SOUND_ENDS`` ends were measured."""
        rate = self.per_s(now)
        return num_ahead / rate if rate else None

    def roughly_wait_s(self, num_ahead: int, now: float) -> float | None:
        """A less certain estimate of the same, for ``Retry-After``: measured from two ends on, also without a queue."""
        wait_s = self.wait_s(num_ahead, now)
        if wait_s is not None:
            return wait_s
        recent = [at for at in self._latest if at > now - WINDOW_S]
        if len(recent) < 2 or recent[-1] <= recent[0]:
            return None
        return num_ahead * (recent[-1] - recent[0]) / (len(recent) - 1)

    def surely_longer_than(self, seconds: float, num_ahead: int, now: float) -> bool:
        """Whether the wait is longer than ``seconds``, even if the rate is higher by the standard error of a Poisson
        count."""
        wait_s = self.wait_s(num_ahead, now)
        return wait_s is not None and wait_s / (1 + 1 / math.sqrt(len(self._ends))) > seconds
