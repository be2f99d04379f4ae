"""Measures where a step's time goes. Knows the clock and the names of the parts."""

from __future__ import annotations

from inferd import clock
from inferd.types import STEP_PARTS, StepParts


class StepClock:
    """``lap`` adds the time since the last call to a part; a part may occur more than once in a step."""

    __slots__ = ("_at", "_seconds")

    def __init__(self) -> None:
        self._at = 0.0
        self._seconds = dict.fromkeys(STEP_PARTS, 0.0)

    def start(self) -> None:
        self._at = clock.now()
        self._seconds = dict.fromkeys(STEP_PARTS, 0.0)

    def lap(self, part: str) -> None:
        now = clock.now()
        self._seconds[part] += now - self._at
        self._at = now

    def parts(self) -> StepParts:
        return StepParts(**self._seconds)
