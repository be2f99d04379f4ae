"""Bounds and tests against scipy, and against counting every case."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.replay.statistics import EXACT_UP_TO, mcnemar, quantile, upper_bound, wilcoxon, wilson, worse

stats = pytest.importorskip("scipy.stats")


@given(st.integers(0, 400), st.integers(1, 400))
def test_intervals_of_fractions_are_scipys(successes: int, number: int) -> None:
    successes = min(successes, number)
    found = stats.binomtest(successes, number)
    expected = found.proportion_ci(0.95, method="wilson")
    assert wilson(successes, number) == pytest.approx((expected.low, expected.high), abs=1e-12)
    one_sided = stats.binomtest(successes, number, alternative="less").proportion_ci(0.95, method="exact")
    assert upper_bound(successes, number) == pytest.approx(one_sided.high, abs=1e-9)


@given(st.integers(1, 10**6))
def test_no_flip_in_n_bounds_their_fraction_by_three_over_n(number: int) -> None:
    assert upper_bound(0, number) == pytest.approx(1 - 0.05 ** (1 / number), rel=1e-6)
    assert upper_bound(0, number) <= 3 / number


def test_nothing_says_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert upper_bound(0, 0) == mcnemar(0, 0) == worse(0, 0) == 1.0
    assert wilcoxon([0.0, 0.0]) is None


@given(st.integers(0, 300), st.integers(0, 300))
def test_changes_in_both_directions_are_compared_as_scipy_does(one: int, other: int) -> None:
    if one + other:
        assert mcnemar(one, other) == pytest.approx(stats.binomtest(one, one + other).pvalue, rel=1e-9)
        greater = stats.binomtest(one, one + other, alternative="greater").pvalue
        assert worse(one, other) == pytest.approx(greater, rel=1e-9)


@given(st.lists(st.integers(-6, 6), min_size=1, max_size=9))
def test_signed_ranks_with_ties_are_those_of_counting_all_signs(differences: list[int]) -> None:
    found = [value for value in differences if value]
    if not found:
        assert wilcoxon(differences) is None
        return
    ranks = stats.rankdata(np.abs(found))
    total, seen = ranks.sum(), ranks[np.array(found) > 0].sum()
    least = min(seen, total - seen)
    ways = [sum(rank for rank, sign in zip(ranks, signs, strict=True) if sign) for signs in _signs(len(found))]
    assert wilcoxon(differences) == pytest.approx(min(1, 2 * sum(way <= least for way in ways) / len(ways)))


def _signs(number: int) -> itertools.product[tuple[bool, ...]]:
    return itertools.product((False, True), repeat=number)


@pytest.mark.parametrize("number", [1, 12, EXACT_UP_TO, EXACT_UP_TO + 1, 500])
def test_signed_ranks_are_scipys(number: int) -> None:
    rng = np.random.default_rng(number)
    differences = rng.normal(0.2, 1.0, number).tolist()
    expected = (
        stats.wilcoxon(differences, method="exact")
        if number <= EXACT_UP_TO
        else stats.wilcoxon(differences, method="asymptotic", correction=False)
    )
    assert wilcoxon(differences) == pytest.approx(expected.pvalue, rel=1e-9)
    tied = rng.integers(-5, 6, 400).tolist()
    assert wilcoxon(tied) == pytest.approx(stats.wilcoxon(tied, method="asymptotic", correction=False).pvalue, rel=1e-9)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_are_numpys(values: list[float], fraction: float) -> None:
    assert quantile(values, fraction) == pytest.approx(float(np.quantile(values, fraction)), rel=1e-9, abs=1e-6)
