"""Bounds and exact tests for comparisons. Pure; in plain floats, without scipy, which is the oracle of the tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

EXACT_UP_TO: Final = 60
"""Pairs up to which Wilcoxon's distribution is counted; above, the normal distribution stands for it."""


class Interval(NamedTuple):
    """A confidence interval of a fraction."""

    low: float
    high: float


def wilson(successes: int, number: int, z: float = 1.959963984540054) -> Interval:
    """Wilson's score interval of a binomial fraction, at 95 % by default. Source: Wilson (1927). (0, 1) of nothing."""
    if number == 0:
        return Interval(0.0, 1.0)
    fraction = successes / number
    middle = fraction + z * z / (2 * number)
    spread = z * math.sqrt(fraction * (1 - fraction) / number + z * z / (4 * number * number))
    scale = 1 + z * z / number
    low = 0.0 if successes == 0 else (middle - spread) / scale
    return Interval(low, 1.0 if successes == number else (middle + spread) / scale)


def upper_bound(successes: int, number: int, confidence: float = 0.95) -> float:
    """The exact one-sided upper bound of a binomial fraction (Clopper and Pearson, 1934). With 0 of n it is
    1 - 0.05 ** (1 / n), which is less than 3 / n."""
    if number == 0 or successes == number:
        return 1.0
    low, high = successes / number, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _cumulative(successes, number, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _cumulative(successes: int, number: int, fraction: float) -> float:
    """P(X <= successes) of a binomial distribution."""
    if fraction <= 0:
        return 1.0
    if fraction >= 1:
        return float(successes >= number)
    logs = [
        math.lgamma(number + 1)
        - math.lgamma(one + 1)
        - math.lgamma(number - one + 1)
        + one * math.log(fraction)
        + (number - one) * math.log1p(-fraction)
        for one in range(successes + 1)
    ]
    return min(1.0, math.fsum(map(math.exp, logs)))


def mcnemar(one: int, other: int) -> float:
    """McNemar's exact two-sided p value, from the numbers of pairs that changed in one direction and in the other.
    1: nothing changed."""
    number, fewer = one + other, min(one, other)
    if number == 0:
        return 1.0
    return min(1.0, 2 * sum(math.comb(number, index) for index in range(fewer + 1)) / (1 << number))


def worse(lost: int, gained: int) -> float:
    """McNemar's exact one-sided p value for "more were lost than gained". 1: nothing was lost."""
    number = lost + gained
    return sum(math.comb(number, index) for index in range(lost, number + 1)) / (1 << number)


def wilcoxon(differences: Sequence[float]) -> float | None:
    """Wilcoxon's signed-rank test: the two-sided p value for "the differences are symmetric about 0".

    Zeros are left out, and equal sizes share their mean rank. Up to ``EXACT_UP_TO`` differences all signs are counted,
    also with shared ranks; above, the normal approximation has the correction for shared ranks and none for
    continuity. None: every difference is 0. Source: Wilcoxon (1945), Pratt (1959) for the zeros left out.
    """
    found = sorted((value for value in differences if value), key=abs)
    number = len(found)
    if number == 0:
        return None
    ranks, shared = _doubled_ranks([abs(value) for value in found])
    positive = sum(rank for rank, value in zip(ranks, found, strict=True) if value > 0)
    total = sum(ranks)
    if number <= EXACT_UP_TO:
        ways = [1, *([0] * total)]  # by the sum of the ranks that are positive
        for rank in ranks:
            for at in range(total, rank - 1, -1):
                ways[at] += ways[at - rank]
        least = min(positive, total - positive)
        return min(1.0, 2 * sum(ways[: least + 1]) / (1 << number))
    mean = number * (number + 1) / 4
    variance = number * (number + 1) * (2 * number + 1) / 24 - shared / 48
    return math.erfc(abs(positive / 2 - mean) / math.sqrt(2 * variance))


def _doubled_ranks(sizes: Sequence[float]) -> tuple[list[int], int]:
    """Twice the rank of each of the sorted sizes, equal ones with their mean, and the sum of t^3 - t over groups of t
    equal sizes."""
    ranks: list[int] = []
    shared = start = 0
    while start < len(sizes):
        stop = start
        while stop < len(sizes) and sizes[stop] == sizes[start]:
            stop += 1
        ranks += [start + 1 + stop] * (stop - start)
        shared += (stop - start) ** 3 - (stop - start)
        start = stop
    return ranks, shared


def quantile(values: Sequence[float], fraction: float) -> float:
    """The quantile of at least one value, linear between neighbours."""
    found = sorted(values)
    place = fraction * (len(found) - 1)
    below = math.floor(place)
    above = min(below + 1, len(found) - 1)
    return found[below] + (found[above] - found[below]) * (place - below)
