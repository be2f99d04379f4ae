"""A batch takes what is idle: its requests fill a model that has no others, and make way for others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.jobs.pace import START, Load, Pace

loads = st.builds(Load, st.integers(0, 200), st.integers(0, 200), st.integers(0, 64))


@given(st.integers(1, 64), st.lists(st.tuples(loads, st.integers(0, 64)), max_size=60))
def test_between_one_and_the_most_may_be_in_flight(most: int, steps: list[tuple[Load, int]]) -> None:
    pace = Pace(most)
    for load, own in steps:
        assert 1 <= pace.window <= most
        assert own + pace.room(load, own) <= max(own, most)
        assert pace.room(load, 0) >= 1, "a batch goes on beside any load"
        pace.answered(load, own)


def test_the_window_grows_by_one_for_each_answer_while_it_is_used_and_the_queue_is_empty() -> None:
    pace = Pace(20)
    for number in range(20):
        assert pace.window == min(START + number, 20)
        pace.answered(Load(waiting=0, in_flight=pace.window), own=pace.window - 1)
    assert pace.window == 20
    unused = Pace(20)
    unused.answered(Load(), own=START - 2)
    assert unused.window == START, "more would not be asked either"
    queued = Pace(20)
    queued.answered(Load(waiting=1, in_flight=START), own=START - 1)
    assert queued.window == START


@pytest.mark.parametrize(
    ("waiting", "in_flight", "shrinks"),
    [(4, 0, False), (5, 0, True), (5, 16, True), (10, 40, False), (11, 40, True)],
)
def test_the_window_shrinks_while_more_waits_than_four_and_a_quarter_of_what_is_in_flight(
    waiting: int, in_flight: int, shrinks: bool
) -> None:
    pace = Pace(20)
    pace.answered(Load(waiting, in_flight), own=3)
    assert pace.window == START - shrinks
    for _ in range(50):
        pace.answered(Load(1000, in_flight), own=3)
    assert pace.window == 1


@pytest.mark.parametrize(
    ("waiting", "in_flight", "own", "room"),
    [
        (0, 0, 0, 20),  # 16 together, and a quarter more that waits
        (0, 16, 16, 4),  # its own requests are no others
        (4, 16, 20, 0),
        (0, 10, 0, 10),  # others are at work
        (30, 16, 0, 1),  # many others
        (30, 17, 1, 0),
        (0, 0, 25, 0),
    ],
)
def test_where_it_is_known_how_many_are_computed_together_so_many_are_in_flight(
    waiting: int, in_flight: int, own: int, room: int
) -> None:
    assert Pace(100).room(Load(waiting, in_flight, together=16), own) == room


def test_few_that_are_computed_together_wait_four_deep() -> None:
    assert Pace(100).room(Load(together=1), 0) == 5
    assert Pace(3).room(Load(together=1), 0) == 3
