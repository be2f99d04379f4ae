"""The test of a new version: its promises, by enumeration of all ways and by simulation, and its equals elsewhere."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest  # type: ignore[import-untyped]
from tests.tiers import THOROUGH, sample

from inferd.rollout.evidence import (
    RISKS,
    Count,
    Counts,
    added,
    log_evidence,
    log_excess,
    log_likelihood_ratio,
    log_mean,
    log_rarity,
    log_tolerance,
)

SHARES = st.floats(0.001, 0.999)
COUNTS = st.dictionaries(
    st.sampled_from([0.01, 0.05, 0.25, 0.5]),
    st.builds(Count, st.integers(0, 50), st.integers(0, 50)),
)


def counted(events: list[tuple[float, bool]]) -> Counts:
    """Counts of bad events, each with its share and whether it was one of the new version."""
    counts: Counts = {}
    for share, is_new in events:
        counts = added(counts, {share: Count(new=1) if is_new else Count(stable=1)})
    return counts


@given(st.lists(SHARES, min_size=1, max_size=8))
def test_while_no_version_is_worse_the_evidence_stays_1_on_average_whatever_the_shares(shares: list[float]) -> None:
    """Over all ways in which the bad events can fall, each with its probability."""
    mean = math.fsum(
        math.exp(log_evidence(counted(list(zip(shares, way, strict=True)))))
        * math.prod(share if is_new else 1.0 - share for share, is_new in zip(shares, way, strict=True))
        for way in itertools.product((False, True), repeat=len(shares))
    )
    assert mean == pytest.approx(1.0, abs=1e-12)


@given(st.lists(SHARES, min_size=1, max_size=8), st.floats(1.01, 50.0))
def test_while_the_new_version_is_just_too_bad_the_tolerance_stays_1_on_average(
    shares: list[float], risk: float
) -> None:
    chances = [share * risk / (1.0 + share * (risk - 1.0)) for share in shares]
    mean = math.fsum(
        math.exp(log_tolerance(counted(list(zip(shares, way, strict=True))), risk))
        * math.prod(chance if is_new else 1.0 - chance for chance, is_new in zip(chances, way, strict=True))
        for way in itertools.product((False, True), repeat=len(shares))
    )
    assert mean == pytest.approx(1.0, abs=1e-9)


@given(COUNTS, st.floats(1.01, 200.0))
def test_a_ratio_of_likelihoods_is_that_of_binomial_counts(counts: Counts, risk: float) -> None:
    expected = math.fsum(
        binom.logpmf(count.new, count.new + count.stable, share * risk / (1.0 + share * (risk - 1.0)))
        - binom.logpmf(count.new, count.new + count.stable, share)
        for share, count in counts.items()
    )
    assert log_likelihood_ratio(counts, risk) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(COUNTS, COUNTS, COUNTS)
def test_the_counts_of_gateways_add_up_in_any_order(one: Counts, two: Counts, three: Counts) -> None:
    assert added(added(one, two), three) == added(one, added(three, two))
    for risk in RISKS:
        together = log_likelihood_ratio(added(one, two), risk)
        apart = log_likelihood_ratio(one, risk) + log_likelihood_ratio(two, risk)
        assert together == pytest.approx(apart, rel=1e-9, abs=1e-9)


@given(COUNTS, st.sampled_from([0.05, 0.25]))
def test_a_bad_event_of_the_new_version_is_evidence_and_one_of_the_other_is_against_it(
    counts: Counts, share: float
) -> None:
    before = log_evidence(counts)
    assert log_evidence(added(counts, {share: Count(new=1)})) > before
    assert log_evidence(added(counts, {share: Count(stable=1)})) < before


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_events_without_a_choice_prove_nothing(share: float) -> None:
    counts = {0.05: Count(3, 4)}
    assert log_evidence(added(counts, {share: Count(5, 6)})) == log_evidence(counts)
    assert log_evidence({}) == pytest.approx(0.0, abs=1e-12)
    assert log_tolerance({}, 2.0) == 0.0


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_what_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        log_evidence({share: Count(1, 1)})


@pytest.mark.parametrize("risk", [1.0, 0.5, math.nan])
def test_a_risk_that_is_tolerable_anyway_is_refused(risk: float) -> None:
    with pytest.raises(ValueError, match="above 1"):
        log_tolerance({}, risk)


def ever_reached(
    random: np.random.Generator, runs: int, events: int, share: float, risk: float, bound: float
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """After how many bad events each of the runs has its evidence above the bound; 0: never."""
    chance = share * risk / (1.0 + share * (risk - 1.0))
    new = np.cumsum(random.random((runs, events)) < chance, axis=1)
    number = np.arange(1, events + 1)
    logs = np.stack([new * math.log(one) - number * math.log1p(share * (one - 1.0)) for one in RISKS])
    reached = np.logaddexp.reduce(logs, axis=0) - math.log(len(RISKS)) >= bound
    return np.where(reached.any(axis=1), reached.argmax(axis=1) + 1, 0)


@THOROUGH
@pytest.mark.parametrize("share", sample([0.01, 0.05, 0.5], 0.05))
def test_versions_that_are_alike_are_seldom_withdrawn_however_often_one_looks(share: float) -> None:
    reached = ever_reached(np.random.default_rng(16), 4000, 1500, share, 1.0, math.log(100))
    assert binomtest(int((reached > 0).sum()), 4000, 0.01, alternative="greater").pvalue > 0.001


def test_a_version_that_fails_often_is_withdrawn_after_few_of_its_units() -> None:
    """Bad events of 0.1 % and of 50 %, at a share of 5 %: at most 15 units of the new version, by the median."""
    reached = ever_reached(np.random.default_rng(17), 4000, 400, 0.05, 500.0, math.log(100))
    assert (reached > 0).all()
    bad_of_new = 0.05 * 0.5
    units = reached / (bad_of_new + 0.95 * 0.001)  # of both versions, for so many bad events
    assert float(np.median(units * 0.05)) <= 15


def test_a_simulated_way_has_the_evidence_of_its_counts() -> None:
    random = np.random.default_rng(18)
    (after,) = ever_reached(random, 1, 200, 0.05, 30.0, math.log(100))
    new = np.cumsum(np.random.default_rng(18).random((1, 200)) < 0.05 * 30 / (1 + 0.05 * 29), axis=1)[0]
    assert log_evidence({0.05: Count(int(after - new[after - 1]), int(new[after - 1]))}) >= math.log(100)
    assert log_evidence({0.05: Count(int(after - 1 - new[after - 2]), int(new[after - 2]))}) < math.log(100)


@given(st.integers(1, 40), st.floats(0.001, 0.999))
def test_at_the_largest_fraction_neither_its_excess_nor_its_rarity_is_shown(units: int, fraction: float) -> None:
    """Over all numbers of bad units, each with its probability."""
    chances = binom.pmf(np.arange(units + 1), units, fraction)
    for log_of in (log_excess, log_rarity):
        mean = math.fsum(
            chance * math.exp(log_of(bad, units, fraction)) for bad, chance in enumerate(chances) if chance > 0
        )
        assert mean == pytest.approx(1.0, abs=1e-9)


@given(st.integers(0, 30), st.integers(0, 300), st.floats(0.01, 0.5))
def test_a_bad_unit_shows_excess_and_a_good_one_rarity(bad: int, good: int, fraction: float) -> None:
    units = bad + good
    assert log_excess(bad + 1, units + 1, fraction) > log_excess(bad, units, fraction)
    assert log_excess(bad, units + 1, fraction) < log_excess(bad, units, fraction)
    assert log_rarity(bad, units + 1, fraction) > log_rarity(bad, units, fraction)
    assert log_rarity(bad + 1, units + 1, fraction) < log_rarity(bad, units, fraction)


def test_units_without_a_bad_event_show_in_time_that_bad_ones_are_rare() -> None:
    needed = next(units for units in range(10_000) if log_rarity(0, units, 0.01) >= math.log(20))
    assert 299 <= needed <= 500, "at least ln 20 / -ln 0.99, what a certain test would need"


@given(st.lists(st.floats(-500, 500), min_size=1, max_size=9))
def test_a_mean_of_logarithms_is_between_them(logs: list[float]) -> None:
    assert min(logs) - 1e-9 <= log_mean(logs) <= max(logs) + 1e-9


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, math.nan])
def test_what_is_no_fraction_is_refused(fraction: float) -> None:
    for log_of in (log_excess, log_rarity):
        with pytest.raises(ValueError, match="between 0 and 1"):
            log_of(0, 1, fraction)
