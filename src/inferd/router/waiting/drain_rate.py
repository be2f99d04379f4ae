"""How fast a model's queue empties, measured while it does. Pure: time is an argument.

Ends that happen while nobody waits say how fast requests come, not how fast they can be served. So only
a stretch of time in which somebody always waited counts, and a new stretch begins from nothing.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW_S = 30.0
SOUND_ENDS = 8
"""With fewer ends than this in a stretch there is no estimate."""


class DrainRate:
    __slots__ = ("_ends", "_latest")

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=512)
        self._latest: deque[float] = deque(maxlen=64)  # also those while nobody waited

    def ended(self, now: float, *, has_waiting: bool) -> None:
        """A request left a replica."""
        self._latest.append(now)
        if has_waiting:
            self._ends.append(now)
        else:
            self._ends.clear()

    def paused(self) -> None:
        """No request waits, and none has ended."""
        self._ends.clear()

    def per_s(self, now: float) -> float | None:
        """Ends per second, a pause until now included; None: not known well enough."""
        ends = self._ends
        while ends and ends[0] < now - WINDOW_S:
            ends.popleft()
        if len(ends) < SOUND_ENDS or now <= ends[0]:
            return None
        return (len(ends) - 1) / (now - ends[0])

    def wait_s(self, num_ahead: int, now: float) -> float | None:
        """How long until so many have left; None: not known well enough."""
        rate = self.per_s(now)
        return num_ahead / rate if rate else None

    def roughly_wait_s(self, num_ahead: int, now: float) -> float | None:
        """Likewise, for advice: from two ends on, and not shorter than requests have come so far."""
        wait_s = self.wait_s(num_ahead, now)
        if wait_s is not None:
            return wait_s
        recent = [at for at in self._latest if at > now - WINDOW_S]
        if len(recent) < 2 or recent[-1] <= recent[0]:
            return None
        return num_ahead * (recent[-1] - recent[0]) / (len(recent) - 1)

    def surely_longer_than(self, seconds: float, num_ahead: int, now: float) -> bool:
        """Whether the wait is longer even if the rate is better than measured by its standard error
        (that of a Poisson count)."""
        wait_s = self.wait_s(num_ahead, now)
        return wait_s is not None and wait_s / (1 + 1 / math.sqrt(len(self._ends))) > seconds
