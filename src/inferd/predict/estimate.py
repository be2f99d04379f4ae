"""The batcher's estimates: when the next request comes, and how long a batch takes. Pure; time is an argument."""

from __future__ import annotations

import math

MEMORY_S = 0.05
"""Arrivals further back than this hardly count: a rate must follow its clients within some tens of milliseconds."""

_FORGET = 0.98  # weight of older batch times at each new one
_KNOWN = 8.0  # batches (old ones counting less) after which a time may look unlikely
_MOST = 3.0  # longest time that counts, as a multiple of the expected one: another program may have used the core
_MIN_SPREAD = 0.02  # relative variance of batch sizes below which their effect cannot be estimated


class Arrivals:
    """The rate of arrivals, by exponentially decaying counts."""

    __slots__ = ("_at", "_count", "_memory_s")

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._count = 0.0
        self._at = -math.inf

    def observe(self, now: float) -> None:
        self._count = self._decayed(now) + 1.0
        self._at = now

    @property
    def last_at(self) -> float:
        return self._at

    def gap_s(self, now: float) -> float:
        """Seconds between arrivals, on average; infinite before the second."""
        others = self._decayed(now) - 1.0 if self._at == now else self._decayed(now)
        return self._memory_s / others if others > 0.0 else math.inf

    def _decayed(self, now: float) -> float:
        return self._count * math.exp((self._at - now) / self._memory_s) if self._count else 0.0


class BatchCost:
    """Seconds of a batch as ``fixed_s + per_unit_s * size``: least squares over the recent past, older batches
    counting less. As long as sizes have not differed, nothing counts as fixed: waiting is not known to pay."""

    __slots__ = ("_n", "_nn", "_nt", "_t", "_w", "fixed_s", "per_unit_s")

    def __init__(self) -> None:
        self._w = self._n = self._nn = self._t = self._nt = 0.0
        self.fixed_s = 0.0
        self.per_unit_s = 0.0

    def observe(self, size: float, seconds: float) -> None:
        expected_s = self.seconds(size)
        if self._w > _KNOWN and expected_s > 0.0:
            seconds = min(seconds, _MOST * expected_s)
        self._w = self._w * _FORGET + 1.0
        self._n = self._n * _FORGET + size
        self._nn = self._nn * _FORGET + size * size
        self._t = self._t * _FORGET + seconds
        self._nt = self._nt * _FORGET + size * seconds
        mean_n, mean_t = self._n / self._w, self._t / self._w
        variance = self._nn / self._w - mean_n * mean_n
        if variance > _MIN_SPREAD * mean_n * mean_n:
            slope = (self._nt / self._w - mean_n * mean_t) / variance
            self.per_unit_s = min(max(slope, 0.0), mean_t / mean_n)
        else:
            # Equal sizes show only the level: the share that was known to be fixed stays the same.
            known = self.seconds(mean_n)
            self.per_unit_s = self.per_unit_s * mean_t / known if known > 0.0 else mean_t / mean_n
        self.fixed_s = max(mean_t - self.per_unit_s * mean_n, 0.0)

    def fixed_share(self, size: float) -> float:
        """The part of a batch's seconds that does not depend on its size; 0: not known."""
        seconds = self.seconds(size)
        return self.fixed_s / seconds if seconds > 0.0 else 0.0

    def seconds(self, size: float) -> float:
        return self.fixed_s + self.per_unit_s * size
