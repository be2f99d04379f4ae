"""Quantiles of the values of the recent past.

A window holds counts and not values, so its size does not grow with traffic. Within a slot of time, values are counted
in buckets of exponentially growing width (DDSketch: Masson, Rim, Lee 2019,
https://arxiv.org/abs/1908.10693). Time is an argument; nothing here knows what the values mean.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from math import ceil, log

ACCURACY = 0.01
"""The relative error of a quantile: the difference to a value that was added, divided by that value."""

SMALLEST = 1e-6
"""Smaller values count as this value."""

_GAMMA = (1 + ACCURACY) / (1 - ACCURACY)
_LOG_GAMMA = log(_GAMMA)


class Window:
    """The last ``span_s`` seconds, forgotten in steps of ``span_s / num_slots``."""

    __slots__ = ("_num_added", "_num_slots", "_slots", "_width_s")

    def __init__(self, span_s: float = 60.0, num_slots: int = 12) -> None:
        self._width_s = span_s / num_slots
        self._num_slots = num_slots
        self._slots: dict[int, dict[int, int]] = {}  # slot of time -> bucket of value -> count
        self._num_added = 0

    def add(self, value: float, now: float) -> None:
        self.add_many((value,), now)

    def add_many(self, values: Iterable[float], now: float) -> None:
        """Add values of the same time."""
        slot = int(now // self._width_s)
        counts = self._slots.get(slot)
        if counts is None:
            self._forget(slot)
            counts = self._slots[slot] = {}
        ordered = sorted(values)
        self._num_added += len(ordered)
        at = 0
        while at < len(ordered):
            bucket = ceil(log(max(ordered[at], SMALLEST)) / _LOG_GAMMA)
            # At least one: the bucket's bound may be rounded to just below the value.
            beyond = bisect_right(ordered, _GAMMA**bucket, at + 1)
            counts[bucket] = counts.get(bucket, 0) + beyond - at
            at = beyond

    def count(self, now: float) -> int:
        """The number of values inside the window."""
        self._forget(int(now // self._width_s))
        return sum(sum(counts.values()) for counts in self._slots.values())

    def state(self, now: float) -> tuple[int, int]:
        """Equal at two times between which the values inside did not change."""
        self._forget(int(now // self._width_s))
        return self._num_added, len(self._slots)

    def quantiles(self, wanted: Iterable[float], now: float) -> list[float | None]:
        """The quantile of each share in ``wanted`` (the lower value, never a mean of two); None: no data."""
        self._forget(int(now // self._width_s))
        merged: dict[int, int] = {}
        for counts in self._slots.values():
            for bucket, count in counts.items():
                merged[bucket] = merged.get(bucket, 0) + count
        total = sum(merged.values())
        ordered = sorted(merged.items())
        return [_value_at(ordered, int(share * (total - 1))) if total else None for share in wanted]

    def _forget(self, slot: int) -> None:
        for old in [s for s in self._slots if s <= slot - self._num_slots]:
            del self._slots[old]


def _value_at(ordered: list[tuple[int, int]], rank: int) -> float:
    """The ``rank``-th smallest value (0: the smallest), as the relative middle of its bucket."""
    reached = accumulate(count for _, count in ordered)
    bucket = next(bucket for (bucket, _), seen in zip(ordered, reached, strict=True) if seen > rank)
    return float(2 * _GAMMA**bucket / (_GAMMA + 1))
