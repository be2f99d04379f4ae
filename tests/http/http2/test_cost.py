"""What a connection may cost: it owes what it spent and did not earn, and time forgives some of it."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from inferd.http.cost import BURST, REFILL_PER_S, CostBudget, TurnQueue

COSTS = st.lists(st.tuples(st.integers(0, BURST), st.integers(0, BURST)), max_size=30)


@given(COSTS)
def test_at_one_moment_a_connection_is_good_while_it_owes_a_burst_at_most(costs: list[tuple[int, int]]) -> None:
    budget, owed = CostBudget(5.0), 0
    for spent, credit in costs:
        owed = max(0, owed + spent - credit)
        assert budget.spend(spent, credit, lambda: 5.0) == (owed <= BURST)


def test_every_unit_counts_and_earning_more_than_was_spent_is_no_credit() -> None:
    budget = CostBudget(0.0)
    assert budget.spend(0, 10 * BURST, lambda: 0.0)
    for _ in range(4):
        assert budget.spend(1, 0, lambda: 0.0)
    assert budget.spend(BURST - 4, 0, lambda: 0.0)
    assert not budget.spend(1, 0, lambda: 0.0)


@given(st.floats(0.0, 20.0), st.integers(0, 10 * BURST))
def test_time_forgives_what_is_owed_beyond_a_burst_and_no_more_than_all(seconds: float, spent: int) -> None:
    budget = CostBudget(1.0)
    assert budget.spend(spent, 0, lambda: 1.0 + seconds) == (spent <= BURST or spent - seconds * REFILL_PER_S <= BURST)


def test_what_was_forgiven_once_is_not_forgiven_again() -> None:
    budget, second = CostBudget(0.0), BURST + 2 * int(REFILL_PER_S)
    assert not budget.spend(second, 0, lambda: 1.0)
    assert not budget.spend(0, 0, lambda: 1.0)
    assert budget.spend(0, 0, lambda: 2.0)
    assert budget.spend(0, BURST, lambda: 2.0)
    assert budget.spend(BURST, 0, lambda: 2.0)


def test_each_that_waits_has_a_turn_of_its_own_in_the_order_in_which_they_came() -> None:
    soon: list[Callable[[], None]] = []
    went: list[str] = []
    turn_queue = TurnQueue(soon.append)

    def again() -> None:
        went.append("a")
        if len(went) < 3:
            turn_queue.add(again)

    turn_queue.add(again)
    turn_queue.add(lambda: went.append("b"))
    turn_queue.add(lambda: went.append("c"))
    per_turn = []
    while soon:
        (turn,) = soon
        soon.clear()
        turn()
        per_turn.append(len(went))
    assert went == ["a", "b", "c", "a"]
    assert per_turn == [1, 2, 3, 4]
    turn_queue.add(lambda: went.append("d"))
    assert len(soon) == 1
