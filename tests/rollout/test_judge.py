"""What the guards say of counts: who withdraws a version, and when all are passed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest  # type: ignore[import-untyped]

from inferd.rollout.evidence import Count, log_evidence, log_excess
from inferd.rollout.judge import judge, reading_text
from inferd.rollout.plan import Guard, Plan, Step

RATIO = Guard(kind="errors", max_ratio=2.0, max_fraction=0.01)
FRACTION = Guard(kind="reported", max_fraction=0.02)


def plan(*guards: Guard, alpha: float = 0.01) -> Plan:
    return Plan(model="m", stable="1", new="2", steps=(Step(share=1.0),), guards=guards, alpha=alpha)


def test_without_data_there_is_no_evidence() -> None:
    found = judge(plan(RATIO, FRACTION), {}, {})
    assert found.worse is None
    assert not found.is_passed()
    assert [(reading.against, reading.in_favour) for reading in found.readings] == [(0.0, 0.0)] * 2


def test_a_rollout_without_guards_is_always_passed() -> None:
    assert judge(plan(), {}, {}).is_passed()


def test_guards_share_alpha() -> None:
    (alone,) = judge(plan(RATIO), {}, {}).readings
    assert alone.against_limit == pytest.approx(math.log(100))
    assert {reading.against_limit for reading in judge(plan(RATIO, FRACTION), {}, {}).readings} == {math.log(200)}


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 2000), st.integers(0, 200))
def test_a_guard_compares_with_the_stable_version_or_with_a_fraction(
    stable: int, new: int, more_stable: int, more_new: int
) -> None:
    bad, units = {0.05: Count(stable, new)}, {0.05: Count(stable + more_stable, new + more_new)}
    first, second = judge(plan(RATIO, FRACTION), {"errors": bad, "reported": bad}, {"": units}).readings
    assert first.against == log_evidence(bad)
    assert second.against == log_excess(new, new + more_new, 0.02)


def test_the_worst_guard_is_named() -> None:
    bad = {"errors": {0.05: Count(1, 30)}, "reported": {0.05: Count(0, 10)}}
    worse = judge(plan(RATIO, FRACTION), bad, {"": {0.05: Count(1000, 60)}}).worse
    assert worse is not None
    assert worse.guard == "errors"
    text = reading_text(worse)
    assert text.startswith("errors: 30 of 60 units with the new version, 1 of 1000 with the stable one")


def test_versions_without_any_bad_event_are_passed_after_enough_units() -> None:
    only_ratio = plan(Guard(kind="errors", max_ratio=2.0))
    assert not judge(only_ratio, {}, {"": {0.05: Count(10**7, 10**6)}}).is_passed(), "a ratio of nothing to nothing"
    assert not judge(plan(RATIO), {}, {"": {0.05: Count(9500, 300)}}).is_passed()
    assert judge(plan(RATIO), {}, {"": {0.05: Count(9500, 600)}}).is_passed()


def test_a_version_that_is_too_bad_seldom_passes() -> None:
    """Twice as likely as the stable one, and above the fraction: both at their limits."""
    random, passed = np.random.default_rng(5), 0
    for _ in range(1500):
        bad_new = np.cumsum(random.random(60) < 0.2 * 2 / 1.2)
        for number in (10, 20, 30, 40, 50, 60):
            new = int(bad_new[number - 1])
            counts = {"errors": {0.2: Count(number - new, new)}}
            # The fractions that go with so many bad events, at 0.5 % and 1 %.
            if judge(plan(RATIO), counts, {"": {0.2: Count(200 * (number - new), 100 * new)}}).is_passed():
                passed += 1
                break
    assert binomtest(passed, 1500, 0.05, alternative="greater").pvalue > 0.001
