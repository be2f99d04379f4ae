"""How far a replica is utilized while it computes: the part of its time in which full steps would have done the same
work."""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 5.0
"""Seconds of steps after which an older one counts by a third."""


class Utilization:
    """The mean over the latest steps, each by its seconds: long steps and short ones may be utilized differently."""

    __slots__ = ("_seconds", "_used_s")

    def __init__(self) -> None:
        self._seconds = self._used_s = 0.0

    def add(self, seconds: float, part: float) -> None:
        kept = math.exp(-seconds / MEMORY_S)
        self._seconds = kept * self._seconds + seconds
        self._used_s = kept * self._used_s + seconds * part

    @property
    def mean(self) -> float:
        """Between 0 and 1; 1 before the first step."""
        return self._used_s / self._seconds if self._seconds > 0.0 else 1.0
