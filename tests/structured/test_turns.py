"""Turns of trials beside the steps of a worker, at times that are arguments."""

from __future__ import annotations

from inferd.structured.trial.client import MOST_SECONDS, MOST_WAIT_S
from inferd.structured.trial.turns import PERIOD_S, RUN_S, Turns

BUSY, IDLE = 1.0, 0.0  # of a core that the worker computes


def periods(turns: Turns[str], number: int, load: float, began: int = 1) -> list[list[str]]:
    """The trials that may compute at the start of each of some periods."""
    found = []
    for period in range(began, began + number):
        now = period * PERIOD_S * 1.5
        found.append(turns.running(now, now * load))
        assert turns.until == now + (RUN_S if load else PERIOD_S)
    return found


def test_beside_steps_the_oldest_trial_of_each_tenant_computes_in_turn() -> None:
    turns: Turns[str] = Turns()
    for tenant, trial in (("a", "a1"), ("a", "a2"), ("b", "b1")):
        turns.add(tenant, trial)
    assert periods(turns, 4, BUSY) == [["a1"], ["b1"], ["a1"], ["b1"]]
    turns.remove("a", "a1")
    turns.remove("b", "b1")
    assert periods(turns, 2, BUSY, began=5) == [["a2"], ["a2"]]
    turns.remove("a", "a2")
    turns.remove("a", "a2")  # a trial that had no turns may end too
    assert turns.until is None


def test_a_turn_beside_steps_ends_long_before_the_next_one() -> None:
    turns: Turns[str] = Turns()
    turns.add("a", "a1")
    assert turns.running(1.0, 1.0) == ["a1"]
    turns.add("b", "b1")
    assert turns.until == 0.0, "it is stopped at once"
    assert turns.running(1.0 + RUN_S / 2, 1.0) == ["a1"]
    assert turns.running(1.0 + RUN_S, 1.0) == []
    assert turns.until == 1.0 + PERIOD_S
    assert turns.running(1.0 + 2 * PERIOD_S, 2.0) == ["a1"]
    turns.remove("a", "a1")
    assert turns.running(1.0 + 2 * PERIOD_S, 2.0) == []
    assert turns.running(1.0 + 3 * PERIOD_S, 3.0) == ["b1"]


def test_all_compute_while_the_worker_does_not() -> None:
    turns: Turns[str] = Turns()
    for number in range(3):
        turns.add("a", f"a{number}")
    assert periods(turns, 1, IDLE) == [["a0", "a1", "a2"]]


def test_a_trial_that_reaches_its_limit_does_so_before_its_request_stops_waiting() -> None:
    assert MOST_SECONDS * PERIOD_S / RUN_S < MOST_WAIT_S
