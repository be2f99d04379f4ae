"""The mean of vectors as a stream: whether a window's mean is farther from the reference's than by chance.

The vectors are features whose scalar product is a kernel of two embeddings (``predict/facts.py``), so the distance of
two means is their maximum mean discrepancy, MMD (A. Gretton et al., "A Kernel Two-Sample Test", 2012; for features D.
Sutherland and J. Schneider, 2015).

Without a change the squared distance of the means of ``n`` and ``m`` vectors is about ``1/n + 1/m`` times a sum of
chi-squared variables, each times an eigenvalue of the vectors' covariance S, by the central limit theorem. Such a sum is
above

    tr(S) + 2 sqrt(x tr(S^2)) + 2 x lambda(S)        lambda: the largest eigenvalue

with at most the probability exp(-x) (B. Laurent and P. Massart, "Adaptive estimation of a quadratic functional", 2000,
lemma 1). So a window's probability follows in closed form, also far out in the tail, where permutations would have to
be counted in millions. In place of lambda stands the fourth root of tr(S^4), which is not smaller. The bound leaves a
margin, and ``bench/drift.py`` measures the false alarms.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from inferd.drift.psi import COVERED
from inferd.types import NUM_FEATURES

Vector = Sequence[float]
"""``NUM_FEATURES`` numbers."""

MIN_VECTORS: Final = 200
"""Vectors that the spread is estimated from, at least."""


class Spread(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How vectors vary: of their covariance S the traces of S, of its square and of its fourth power."""

    trace: float
    square: float
    fourth: float

    @property
    def problem(self) -> str | None:
        """Why these are the traces of no covariance; None: they may be."""
        found = (self.trace, self.square, self.fourth)
        if not all(math.isfinite(one) and one >= 0.0 for one in found):
            return "spread must be finite numbers, 0 or more"
        return None

    def probability(self, squared: float) -> float:
        """At least the probability that the weighted sum of chi-squared variables is ``squared`` or more."""
        over, largest = squared - self.trace, math.sqrt(math.sqrt(self.fourth))
        if over <= 0.0:
            return 1.0
        if largest <= 0.0:
            return 0.0
        root = (math.sqrt(self.square + 2.0 * largest * over) - math.sqrt(self.square)) / (2.0 * largest)
        return math.exp(-root * root)

    def limit(self, probability: float) -> float:
        """What the sum is above with at most this probability: the inverse of ``probability``."""
        x = -math.log(probability)
        return self.trace + 2.0 * math.sqrt(x * self.square) + 2.0 * x * math.sqrt(math.sqrt(self.fourth))


class MeanFinding(NamedTuple):
    """The comparison of a window's mean with its reference's."""

    p: float
    distance: float  # MMD
    by_chance: float  # what it is below in 95 of 100 windows without a change, at least


class Mean(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reference of a stream of vectors."""

    num: int
    sums: tuple[float, ...]
    spread: Spread

    @property
    def problem(self) -> str | None:
        """Why this is no reference; None: it may be one."""
        if self.num < 1 or len(self.sums) != NUM_FEATURES or not all(map(math.isfinite, self.sums)):
            return f"mean needs a num of 1 or more, and {NUM_FEATURES} sums that are finite"
        return self.spread.problem

    def compare(self, num: int, sums: Sequence[float]) -> MeanFinding:
        """The comparison with the sums of ``num`` vectors."""
        squared = sum((new / num - old / self.num) ** 2 for old, new in zip(self.sums, sums, strict=True))
        scale = 1.0 / self.num + 1.0 / num
        return MeanFinding(
            self.spread.probability(squared / scale),
            math.sqrt(squared),
            math.sqrt(scale * self.spread.limit(1.0 - COVERED)),
        )


def vector_of(features: bytes) -> Vector:
    """Features as a worker sends them: float32 in the machine's order."""
    return array("f", features)


def add_vectors(vectors: Sequence[Vector], sums: list[float]) -> None:
    """Add vectors to their sums."""
    for place, column in enumerate(zip(*vectors, strict=True)):
        sums[place] += sum(column)


class Spreading:
    """Estimates the spread of vectors, which are dropped at once: of each the products of its features are added up."""

    __slots__ = ("_products", "_sums", "num")

    def __init__(self) -> None:
        self.num = 0
        self._sums = [0.0] * NUM_FEATURES
        self._products = [[0.0] * (row + 1) for row in range(NUM_FEATURES)]  # the lower half

    def add(self, vectors: Sequence[Vector]) -> None:
        self.num += len(vectors)
        columns = list(zip(*vectors, strict=True))
        for row, left in enumerate(columns):
            self._sums[row] += sum(left)
            products = self._products[row]
            for place in range(row + 1):
                products[place] += sum(map(float.__mul__, left, columns[place]))

    def spread(self) -> Spread:
        """The traces of the covariance of the vectors so far, at least 2. Nothing is subtracted for chance, so those of
        the powers are a little too large."""
        num, size = self.num, NUM_FEATURES
        covariance = [[0.0] * size for _ in range(size)]
        for row, products in enumerate(self._products):
            for place, product in enumerate(products):
                value = (product - self._sums[row] * self._sums[place] / num) / (num - 1)
                covariance[row][place] = covariance[place][row] = value
        square = [[sum(map(float.__mul__, left, right)) for right in covariance] for left in covariance]
        return Spread(
            trace=sum(covariance[place][place] for place in range(size)),
            square=sum(square[place][place] for place in range(size)),
            fourth=sum(value * value for row in square for value in row),
        )
