"""What is expected of arrivals and batches: right where the past was regular, and never misled for long."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.predict.estimate import MEMORY_S, Arrivals, BatchCost


@pytest.mark.parametrize("gap", [0.0001, 0.001, 0.004])
def test_the_gap_of_regular_arrivals_is_found(gap: float) -> None:
    arrivals = Arrivals()
    for place in range(int(10 * MEMORY_S / gap)):
        arrivals.observe(place * gap)
    assert arrivals.gap_s(arrivals.last_at) == pytest.approx(gap, rel=0.1)


def test_no_arrival_is_expected_before_the_second_one_or_long_after_the_last() -> None:
    arrivals = Arrivals()
    assert arrivals.gap_s(0.0) == math.inf
    arrivals.observe(1.0)
    assert arrivals.gap_s(1.0) == math.inf
    for place in range(100):
        arrivals.observe(1.0 + place * 0.001)
    assert arrivals.gap_s(2.0) > 1.0


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 0.1), st.floats(1e-7, 0.01), st.lists(st.integers(1, 64), min_size=3, max_size=60))
def test_what_a_batch_costs_is_told_exactly_where_it_is_affine(fixed: float, per_row: float, sizes: list[int]) -> None:
    cost = BatchCost()
    for size in (1, 32, *sizes):
        cost.observe(size, fixed + per_row * size)
    for size in (1, 8, 64):
        assert cost.seconds(size) == pytest.approx(fixed + per_row * size, rel=0.05)


def test_as_long_as_sizes_have_not_differed_nothing_counts_as_fixed() -> None:
    cost = BatchCost()
    assert cost.fixed_share(1) == 0.0
    for _ in range(20):
        cost.observe(1, 0.01)
    assert cost.fixed_s == 0.0
    assert cost.fixed_share(1) == 0.0
    assert cost.seconds(1) == pytest.approx(0.01)


def test_what_was_known_to_be_fixed_stays_so_while_sizes_do_not_differ() -> None:
    cost = BatchCost()
    for size in (1, 2, 4, 8, 16):
        cost.observe(size, 0.01 + 0.001 * size)
    for _ in range(1000):
        cost.observe(8, 0.018)
    assert cost.fixed_s == pytest.approx(0.01, rel=0.2)


def test_a_program_that_takes_the_core_now_and_then_changes_little() -> None:
    rng, cost = random.Random(0), BatchCost()
    for place in range(2000):
        size = rng.randint(1, 32)
        cost.observe(size, 40e-6 + 1e-6 * size + (0.008 if place > 10 and rng.random() < 0.02 else 0.0))
    assert cost.seconds(16) < 2 * 56e-6


def test_a_model_that_has_become_slower_is_noticed() -> None:
    cost = BatchCost()
    for size in [1, 2, 4, 8] * 10:
        cost.observe(size, 0.001 + 0.0001 * size)
    for size in [1, 2, 4, 8] * 60:
        cost.observe(size, 0.1 + 0.01 * size)
    assert cost.seconds(4) == pytest.approx(0.14, rel=0.1)
