"""The windows of one stream, and the level at which each is tested. Pure: time is an argument.

A window of 1,000 values finds a large change soon, and a small one never. So four windows in a row are also one window
of the next size, and there are three sizes.

The promise is a rate: false alarms per second, whatever the traffic is. A window that closes is tested at the level

    rate * seconds since the last window of its size was closed / (streams * sizes)

so that levels add up to ``rate`` times the time that has passed. Without a change each test alarms with at most the
probability of its level, so the expected number of false alarms in any time is at most ``rate`` times that time. When
windows close does not depend on what is in them. Tests need not be independent of each other for that, so they may
share one reference. A busy model has many windows with low levels, and an idle one few with higher ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Generic, Literal, NamedTuple, Protocol, TypeVar

from inferd.drift.cells import Cells, Compared, Value, compared, num_compared
from inferd.drift.exact import is_near, tail
from inferd.drift.mean import Mean, Vector, add_vectors
from inferd.drift.psi import by_chance, psi

SIZES: Final = (1, 4, 16)
"""The sizes of windows, in windows of the configured size. Each is a multiple of the one before."""

MAX_LEVEL: Final = 0.01
"""A window after a long pause is tested at no higher level."""


MAX_PAST: Final = 96
"""Earlier windows of one size that are kept. When there are more, of each two neighbours one stays."""

Measure = Literal["psi", "mmd"]
"""How large a change is: the population stability index of counts, or the maximum mean discrepancy of vectors."""


class Reading(NamedTuple):
    """A window that was tested."""

    size: int  # its values
    distance: float  # of the stream's measure
    by_chance: float  # what the distance is below in 95 of 100 windows without a change
    p: float
    level: float
    is_alarm: bool
    sentence: str  # what differs most; empty: nothing does


V = TypeVar("V", contravariant=True)


class Baseline(Protocol[V]):
    """The reference of one stream, with which the sums of a window are compared."""

    @property
    def measure(self) -> Measure: ...
    @property
    def num_sums(self) -> int: ...
    def add(self, values: Sequence[V], sums: list[float]) -> None:
        """Add values to the sums of a window."""
        ...

    def read(self, size: int, sums: Sequence[float], level: float, min_psi: float) -> Reading:
        """Test a window of ``size`` values at a level."""
        ...


class Counted(NamedTuple):
    """Of a stream of numbers or names: how many values are in each cell. The sums of a window are counts."""

    cells: Cells
    counts: tuple[int, ...]

    @property
    def measure(self) -> Measure:
        return "psi"

    @property
    def num_sums(self) -> int:
        return len(self.cells)

    def add(self, values: Sequence[Value], sums: list[float]) -> None:
        self.cells.count(values, sums)

    def read(self, size: int, sums: Sequence[float], level: float, min_psi: float) -> Reading:
        """A change with a smaller index than ``min_psi`` is no alarm."""
        return read(self, [int(count) for count in sums], level, min_psi)


class Averaged(NamedTuple):
    """Of a stream of vectors: their mean. ``min_psi`` is of no meaning there."""

    mean: Mean

    @property
    def measure(self) -> Measure:
        return "mmd"

    @property
    def num_sums(self) -> int:
        return len(self.mean.sums)

    def add(self, values: Sequence[Vector], sums: list[float]) -> None:
        add_vectors(values, sums)

    def read(self, size: int, sums: Sequence[float], level: float, min_psi: float) -> Reading:
        found = self.mean.compare(size, sums)
        return Reading(
            size=size,
            distance=found.distance,
            by_chance=found.by_chance,
            p=found.p,
            level=level,
            is_alarm=found.p <= level,
            sentence=f"of the last {size:,} lie elsewhere than those of the reference" if found.p < 0.05 else "",
        )


class Finding(NamedTuple):
    """The comparison of a window with its reference."""

    p: float  # of the most extreme set, times the number of sets; 1: all are as by chance
    most: Compared | None  # that set


def compare(reference: Counted, window: Sequence[int]) -> Finding:
    """The exact comparison of a window's counts with the reference's, two-sided, for all sets at once."""
    before, now = sum(reference.counts), sum(window)
    least, most = 1.0, None
    for one in compared(reference.cells, reference.counts, window):
        hits, total = one.reference + one.window, before + now
        if not hits or is_near(one.window, now, hits, total):
            continue
        found = tail(one.window, now, hits, total)
        if found < least:
            least, most = found, one
    return Finding(min(1.0, 2.0 * num_compared(reference.cells) * least), most)


def read(reference: Counted, window: Sequence[int], level: float, min_psi: float) -> Reading:
    """Test a window at a level. A change with a smaller index than ``min_psi`` is no alarm."""
    before, now = sum(reference.counts), sum(window)
    found, index = compare(reference, window), psi(reference.counts, window)
    sentence = ""
    if found.most is not None:
        most = found.most
        sentence = (
            f"{most.words} in {100 * most.window / now:.3g} % of the last {now:,}, and in "
            f"{100 * most.reference / before:.3g} % of the reference"
        )
    return Reading(
        size=now,
        distance=index,
        by_chance=by_chance(before, now, len(reference.cells)),
        p=found.p,
        level=level,
        is_alarm=found.p <= level and index >= min_psi,
        sentence=sentence,
    )


class Past(NamedTuple):
    """A window that was tested, and when."""

    at: float
    reading: Reading

    @property
    def doubt(self) -> tuple[bool, float]:
        """The smaller it is, the more the window speaks for a change: alarms first, then p in units of the level."""
        return not self.reading.is_alarm, self.reading.p / self.reading.level if self.reading.level else math.inf


def thinned(past: Sequence[Past]) -> list[Past]:
    """Of each two neighbours the one that speaks more for a change, so that a time with an alarm keeps one."""
    return [min(past[place : place + 2], key=lambda one: one.doubt) for place in range(0, len(past), 2)]


class _Size:
    """The open window of one size, and the windows before it."""

    __slots__ = ("closed_at", "last", "last_sums", "num_windows", "past", "sums")

    def __init__(self, num_sums: int, now: float) -> None:
        self.sums = [0.0] * num_sums
        self.num_windows = 0  # of the configured size, in ``sums``
        self.closed_at = now
        self.last: Reading | None = None
        self.last_sums: list[float] = []
        self.past: list[Past] = []  # the last window is its end

    def close(self, reading: Reading, now: float) -> None:
        """Begin another window after one that was tested."""
        self.last, self.last_sums, self.closed_at = reading, self.sums, now
        self.sums, self.num_windows = [0.0] * len(self.sums), 0
        if len(self.past) == MAX_PAST:
            self.past = thinned(self.past)
        self.past.append(Past(now, reading))


class Closed(NamedTuple):
    """The last window of one size, its sums, and the windows up to it."""

    reading: Reading
    sums: Sequence[float]
    past: Sequence[Past]


class Windows(Generic[V]):
    """The windows of one stream at one version of a model."""

    __slots__ = ("_min_psi", "_num_values", "_rate", "_size", "_sizes", "_sums", "num_alarms", "reference", "since")

    def __init__(self, reference: Baseline[V], size: int, rate: float, min_psi: float, now: float) -> None:
        """``size``: values of the smallest window. ``rate``: false alarms per second of this stream."""
        self.reference = reference
        self._size = size
        self._rate = rate
        self._min_psi = min_psi
        self._sizes = [_Size(reference.num_sums, now) for _ in SIZES]
        self._sums = [0.0] * reference.num_sums  # of the open smallest window
        self._num_values = 0
        self.num_alarms = 0  # windows
        self.since: float | None = None  # when ``is_drifting`` took its value; None: no window was tested yet

    def add(self, values: Sequence[V], now: float) -> list[list[Reading]]:
        """Count values, and test the windows that they fill: for each smallest window the readings of all sizes that
        were full with it, the smallest first."""
        closed = []
        begin = 0
        while begin < len(values):
            part = values[begin : begin + self._size - self._num_values]
            self.reference.add(part, self._sums)
            self._num_values += len(part)
            begin += len(part)
            if self._num_values == self._size:
                closed.append(self._close(now))
        return closed

    def _close(self, now: float) -> list[Reading]:
        readings = []
        was_drifting = self.is_drifting
        for size, multiple in zip(self._sizes, SIZES, strict=True):
            for place, value in enumerate(self._sums):
                size.sums[place] += value
            size.num_windows += 1
            if size.num_windows < multiple:
                continue
            level = min(MAX_LEVEL, self._rate * max(0.0, now - size.closed_at) / len(SIZES))
            reading = self.reference.read(self._size * multiple, size.sums, level, self._min_psi)
            size.close(reading, now)
            self.num_alarms += reading.is_alarm
            readings.append(reading)
        if self.since is None or self.is_drifting != was_drifting:
            self.since = now
        self._sums, self._num_values = [0.0] * len(self._sums), 0
        return readings

    @property
    def is_drifting(self) -> bool:
        """Whether the last window of any size was an alarm."""
        return any(size.last is not None and size.last.is_alarm for size in self._sizes)

    @property
    def last(self) -> list[Closed]:
        """The last window of each size that has had one, the smallest first."""
        return [Closed(size.last, size.last_sums, size.past) for size in self._sizes if size.last is not None]
