"""Values of the recent past at three resolutions, in rings of a fixed size.

A ring has a slot for each step of time. The slot of a second ``s`` in a ring of step ``n`` has the number ``s // n``,
and its place in the ring is that number modulo the ring's length:

    step     length   reaches back
      1 s       300   5 minutes
     10 s       720   2 hours
    300 s      2016   7 days

A slot without a value is absent (NaN inside, null outside), never 0. Seconds are counted by a clock that goes on while
the machine sleeps and is never set. So a change of the wall clock moves no value, and a sleep leaves a gap.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from math import isnan, nan
from typing import Final, NamedTuple


class Resolution(NamedTuple):
    """One ring of every series."""

    step_s: int
    length: int


RESOLUTIONS: Final = (Resolution(1, 300), Resolution(10, 720), Resolution(300, 2016))

_NO_VALUE: Final = tuple(array("f", [nan]) * resolution.length for resolution in RESOLUTIONS)


class Ring:
    """The values of one series at one resolution. A slot has the mean of its seconds, or the highest for a series of
    peaks."""

    __slots__ = ("_count", "_length", "_peak", "_sum", "values")

    def __init__(self, empty: array[float], peak: bool) -> None:
        self.values = empty[:]
        self._length = len(empty)
        self._peak = peak
        self._sum = 0.0  # of the present values of the current slot, or the highest of them
        self._count = 0

    def begin(self, slot: int, num_skipped: int) -> None:
        """Go on to a slot, after ``num_skipped`` slots without a value."""
        length = self._length
        for missing in range(slot - min(num_skipped, length - 1), slot + 1):
            self.values[missing % length] = nan
        self._sum, self._count = 0.0, 0

    def add(self, slot: int, value: float) -> None:
        """Add the value of a second to the current slot."""
        if self._peak:
            self._sum = value if not self._count else max(self._sum, value)
            self._count = 1
        else:
            self._sum += value
            self._count += 1
        self.values[slot % self._length] = self._sum / self._count

    def until(self, slot: int) -> array[float]:
        """A copy of the values, the oldest first, up to a slot."""
        cut = slot % self._length + 1
        return self.values[cut:] + self.values[:cut]


class Rings:
    """The rings of all series, which go on together. The only state is the second of the last tick."""

    def __init__(self) -> None:
        self._second: int | None = None
        self._rows: dict[str, tuple[Ring, ...]] = {}

    @property
    def second(self) -> int | None:
        """The second of the last tick. None: there was none."""
        return self._second

    def configure(self, series: Mapping[str, bool]) -> None:
        """Have these series, by their keys; the value says whether it is a series of peaks. The others are dropped."""
        self._rows = {key: self._rows.get(key) or _rings(peak) for key, peak in series.items()}

    def tick(self, second: int, values: Iterable[tuple[str, float | None]]) -> bool:
        """Enter the values of a second. False, with nothing changed, for a second that is not after the last one."""
        before = self._second
        if before is not None:
            if second <= before:
                return False
            for place, (step, _) in enumerate(RESOLUTIONS):
                num_new = second // step - before // step
                if num_new:
                    for rings in self._rows.values():
                        rings[place].begin(second // step, num_new - 1)
        self._second = second
        slots = [second // step for step, _ in RESOLUTIONS]
        for key, value in values:
            if value is not None:
                for ring, slot in zip(self._rows[key], slots, strict=True):
                    ring.add(slot, value)
        return True

    def values(self, key: str, place: int) -> array[float]:
        """A copy of a series at the resolution with this place in ``RESOLUTIONS``: the oldest first, NaN where
        absent. Empty before the first tick."""
        if self._second is None:
            return array("f")
        return self._rows[key][place].until(self._second // RESOLUTIONS[place].step_s)

    def last(self, key: str, num_seconds: int, *, place: int = 0) -> list[float]:
        """The present values of the last seconds, at the resolution with this place."""
        if key not in self._rows:
            return []
        values = self.values(key, place)[-(num_seconds // RESOLUTIONS[place].step_s) :]
        return [value for value in values if not isnan(value)]


def _rings(peak: bool) -> tuple[Ring, ...]:
    return tuple(Ring(empty, peak) for empty in _NO_VALUE)


def as_json(values: Sequence[float]) -> str:
    """Values as a JSON array with null for those that are absent. The absent values at its beginning are left out."""
    begin = next((at for at, value in enumerate(values) if not isnan(value)), len(values))
    return f"[{','.join(map(_SHORT, values[begin:])).replace('nan', 'null')}]"


_SHORT: Final = "%.5g".__mod__
"""A number with five significant digits, which is also a number in JSON."""


def number(value: float | None) -> str:
    """A value in JSON."""
    return "null" if value is None else _SHORT(value)
