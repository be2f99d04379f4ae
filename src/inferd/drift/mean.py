"""The mean of vectors as a stream: whether a window's mean is farther from the reference's than by chance.

The vectors are features whose scalar product is a kernel of two embeddings (``predict/facts.py``), so the distance of
two means is their maximum mean discrepancy, MMD (A. Gretton et al., "A Kernel Two-Sample Test", 2012; for features D.
Sutherland and J. Schneider, 2015).

Without a change the squared distance of the means of ``n`` and ``m`` vectors is about ``1/n + 1/m`` times a sum of
squares of standard normal variables, each times an eigenvalue of the vectors' covariance, by the central limit theorem.
The tail of such a sum is known exactly (``quadratic_form.py``), also far out, where permutations would have to be
counted in millions. ``bench/drift.py`` measures the false alarms.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from inferd.drift.eigenvalues import eigenvalues_of
from inferd.drift.psi import COVERED
from inferd.drift.quadratic_form import quantile, tail
from inferd.types import NUM_FEATURES

Vector = Sequence[float]
"""``NUM_FEATURES`` numbers."""

MIN_VECTORS: Final = 200
"""Vectors of a reference, at least."""

SPREAD_VECTORS: Final = 4000
"""Vectors of a reference that the spread is estimated from, at most: the largest eigenvalue of so many is wrong by 2 %,
and of 500 by 6 %, which doubles the false alarms at a level of one in a million."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How vectors vary: the eigenvalues of their covariance. References of an earlier form have traces in their place,
    from which eigenvalues do not follow."""

    eigenvalues: tuple[float, ...] = ()

    @property
    def problem(self) -> str | None:
        """Why these are the eigenvalues of no covariance; None: they may be."""
        found = self.eigenvalues
        if len(found) != NUM_FEATURES or not all(math.isfinite(one) and one >= 0.0 for one in found):
            return (
                f"spread needs {NUM_FEATURES} eigenvalues that are finite, 0 or more, and has {len(found)}; a reference "
                "of an earlier form has none: take another with `inferd drift reset MODEL`"
            )
        return None


class MeanFinding(NamedTuple):
    """The comparison of a window's mean with its reference's."""

    p: float
    distance: float  # MMD
    by_chance: float  # what it is below in 95 of 100 windows without a change


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
        limit = quantile(self.spread.eigenvalues, 1.0 - COVERED)
        return MeanFinding(
            p=self.probability(num, sums),
            distance=math.sqrt(self._squared(num, sums)),
            by_chance=math.sqrt((1.0 / self.num + 1.0 / num) * limit),
        )

    def probability(self, num: int, sums: Sequence[float]) -> float:
        """The probability of means that are as far from each other, or farther, without a change."""
        return tail(self.spread.eigenvalues, self._squared(num, sums) / (1.0 / self.num + 1.0 / num))

    def _squared(self, num: int, sums: Sequence[float]) -> float:
        return sum((new / num - old / self.num) ** 2 for old, new in zip(self.sums, sums, strict=True))


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
        """The eigenvalues of the covariance of the vectors so far, at least 2; rounding leaves none below 0."""
        num, size = self.num, NUM_FEATURES
        covariance = [[0.0] * size for _ in range(size)]
        for row, products in enumerate(self._products):
            for place, product in enumerate(products):
                value = (product - self._sums[row] * self._sums[place] / num) / (num - 1)
                covariance[row][place] = covariance[place][row] = value
        return Spread(eigenvalues=tuple(max(0.0, one) for one in eigenvalues_of(covariance)))
