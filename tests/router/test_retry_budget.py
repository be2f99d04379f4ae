"""Retries are a part of the traffic, whatever fails."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.router.retry_budget import RESERVE, SPAN_S, RetryBudget


@given(
    ratio=st.floats(0, 1),
    steps=st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=200),
)
def test_in_no_window_are_there_more_retries_than_the_ratio_and_the_reserve(
    ratio: float, steps: list[tuple[float, bool]]
) -> None:
    budget = RetryBudget(ratio)
    now = 0.0
    requests: list[float] = []
    granted: list[float] = []
    for seconds, is_request in steps:
        now += seconds
        if is_request:
            budget.note(now)
            requests.append(now)
        elif budget.take(now):
            granted.append(now)
            num_recent = sum(at > now - SPAN_S for at in requests)
            assert sum(at >= now - SPAN_S + 1 for at in granted) <= RESERVE + ratio * num_recent


def test_when_everything_fails_a_fifth_is_tried_again() -> None:
    budget = RetryBudget(0.2)
    granted = 0
    for number in range(10_000):
        now = number / 500
        budget.note(now)
        granted += budget.take(now)
    assert 1990 <= granted <= 2000 + 2 * RESERVE


def test_the_one_request_of_a_quiet_hour_may_be_tried_again() -> None:
    budget = RetryBudget(0.2)
    for hour in range(3):
        now = 3600.0 * hour
        budget.note(now)
        assert budget.take(now)
        assert budget.take(now)


def test_a_ratio_of_zero_allows_none() -> None:
    budget = RetryBudget(0.0)
    budget.note(0.0)
    assert not budget.take(0.0)
