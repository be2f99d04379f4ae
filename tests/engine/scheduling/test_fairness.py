"""Whose sequence is next: by class, by what its tenant has received, by arrival."""

from __future__ import annotations

import pytest

from inferd.engine.scheduling.fairness import Rank, Shares, WaitingQueue
from inferd.engine.scheduling.sequence import Sequence
from inferd.types import CLASSES, SamplingParams


def sequence(tenant: str) -> Sequence:
    return Sequence(request_id=tenant, index=0, prompt_ids=[1], sampling=SamplingParams(), seed=0, tenant=tenant)


def queue() -> WaitingQueue:
    return WaitingQueue([Shares() for _ in CLASSES])


def rank(place: int, at: float) -> Rank:
    return place, at, 0, 0


def test_a_tenant_that_returns_has_saved_up_nothing_and_loses_nothing() -> None:
    shares = Shares()
    shares.enter("a")
    shares.enter("b")
    shares.charge("a", 5.0)
    shares.charge("b", 3.0)
    shares.enter("c")
    assert (shares["a"], shares["b"], shares["c"]) == (5.0, 3.0, 3.0), "raised to the least of those that are there"
    shares.leave("a")
    shares.charge("a", 1.0)
    shares.enter("a")
    assert shares["a"] == 6.0, "above the least it stays as it was"


def test_counters_begin_anew_where_no_tenant_is_left() -> None:
    shares = Shares()
    shares.enter("a")
    shares.charge("a", 5.0)
    shares.enter("a")
    shares.leave("a")
    shares.enter("b")
    assert shares["b"] == 5.0, "a has a sequence still"
    shares.leave("a")
    shares.leave("b")
    shares.enter("c")
    assert (shares["a"], shares["b"], shares["c"]) == (0.0, 0.0, 0.0)
    shares.charge("unknown", 9.0)
    assert shares["unknown"] == 0.0


def test_of_many_absent_tenants_those_that_would_be_raised_are_forgotten() -> None:
    shares = Shares()
    shares.enter("present")
    shares.charge("present", 10.0)
    for number in range(70):
        name = f"t{number}"
        shares.enter(name)
        shares.charge(name, 1.0 if number % 2 else 0.0)
        shares.leave(name)
    kept = [number for number in range(70) if shares[f"t{number}"]]
    assert set(range(1, 70, 2)) <= set(kept), "above the least"
    assert len(kept) < 70
    assert shares["present"] == 10.0


@pytest.mark.parametrize("charged", [("a", "b"), ("b", "a")])
def test_the_best_has_the_best_class_the_least_counter_and_arrived_first(charged: tuple[str, str]) -> None:
    waiting = queue()
    more, less = charged
    late, first, second = sequence(less), sequence(more), sequence(less)
    for one, at in ((late, 3.0), (first, 1.0), (second, 2.0)):
        waiting.push(one, rank(2, at))
    for tenant in ("a", "b"):
        waiting.shares[2].enter(tenant)
    waiting.shares[2].charge(more, 4.0)
    assert waiting.best() is second
    assert waiting.first() is first
    critical = sequence(more)
    waiting.push(critical, rank(1, 9.0))
    assert (waiting.best_class, waiting.best(), waiting.first()) == (1, critical, critical)
    assert waiting.counts == [0, 1, 3, 0]
    assert waiting.longest_below(1) is first
    assert waiting.longest_below(2) is None


def test_what_was_discarded_is_passed_over_and_counts_no_more() -> None:
    waiting = queue()
    one, other, batch = sequence("a"), sequence("a"), sequence("b")
    waiting.push(one, rank(2, 1.0))
    waiting.push(other, rank(2, 2.0))
    waiting.push(batch, rank(3, 0.5))
    waiting.discard(one)
    waiting.discard(one)
    assert (len(waiting), waiting.counts, waiting.best(), waiting.first()) == (2, [0, 0, 1, 1], other, other)
    waiting.push(one, rank(2, 3.0))
    assert waiting.first() is other, "its former place is not its place"
    waiting.discard(other)
    assert waiting.first() is one
    assert waiting.longest_below(0) is batch, "the first arrival, whatever its class"
    waiting.discard(one)
    assert (waiting.best_class, waiting.best()) == (3, batch)
    waiting.discard(batch)
    assert (len(waiting), waiting.best_class, waiting.best(), waiting.first()) == (0, 4, None, None)
    assert waiting.longest_below(0) is None
