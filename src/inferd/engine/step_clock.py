"""Measures where a step's time goes. Knows the clock and the names of the parts."""

from __future__ import annotations

from inferd import clock
from inferd.types import STEP_PARTS, StepParts


class StepClock:
    """``lap`` adds the time since the last call to a part of the step; a part may occur more than once."""

    __slots__ = ("_at", "_seconds")

    def __init__(self) -> None:
        self._at = clock.now()
        self._seconds = dict.fromkeys(STEP_PARTS, 0.0)

    def resume(self) -> None:
        """Leave out the time since the last call."""
        self._at = clock.now()

    def lap(self, part: str) -> float:
        """The seconds since the last call."""
        now = clock.now()
        seconds = now - self._at
        self._seconds[part] += seconds
        self._at = now
        return seconds

    def parts(self) -> StepParts:
        return StepParts(**self._seconds)
