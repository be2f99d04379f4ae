"""The replay uses the server's scheduler; its sums are checked on traces whose outcome is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.prefix_replay import Cost, at_load, replay, reserved
from bench.reuse import Numbering, clairvoyant, recent, unlimited
from bench.traces import Arrival, read
from hypothesis import given, settings
from hypothesis import strategies as st

COST = Cost(fixed=1.0, prefill=0.5, decode=0.25)


def arrivals_of(prompts: list[list[int]], apart: float) -> list[Arrival]:
    return [Arrival(i * apart, prompt, 3) for i, prompt in enumerate(prompts)]


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=12),
    st.integers(6, 12),
    st.sampled_from([0.0, 100.0]),
)
def test_a_replay_never_reuses_more_than_the_ideal(prompts: list[list[int]], num_blocks: int, apart: float) -> None:
    arrivals = arrivals_of(prompts, apart)
    numbering = Numbering(2)
    visits = [numbering.visit(a.prompt, a.answer) for a in arrivals]
    found = replay(arrivals, num_blocks=num_blocks, block_size=2, cost=COST)
    assert found.reused <= clairvoyant(visits, num_blocks)
    assert len(found.ttft_s) == len(arrivals)
    if apart:  # one after the other, and with room for everything
        assert replay(arrivals, num_blocks=200, block_size=2, cost=COST).reused == unlimited(visits)


def test_times_are_those_of_the_cost_model() -> None:
    found = replay([Arrival(5.0, [1, 2, 3, 4], 3)], num_blocks=8, block_size=2, cost=COST)
    assert found.ttft_s == (1.0 + 4 * 0.5,)
    assert found.ended_at == 5.0 + 3.0 + 2 * 1.25
    without = replay(arrivals_of([[1] * 9] * 2, 100.0), num_blocks=20, block_size=2, cost=COST, prefix_caching=False)
    assert without.reused == 0


def test_reservations_count_what_is_held_and_refuse_what_never_fits() -> None:
    burst = [Arrival(0.0, [1], 2) for _ in range(8)]
    assert reserved(burst, 4, lambda _: 2) == 2.0
    with pytest.raises(ValueError, match="do not hold"):
        reserved(burst, 4, lambda _: 5)


def test_a_load_stretches_times_and_nothing_else() -> None:
    slow = at_load(arrivals_of([[1], [2], [3]], 1.0), 0.5, 10.0)
    assert [a.at for a in slow] == [0.0, 10.0, 20.0]
    assert [a.prompt for a in slow] == [[1], [2], [3]]


@pytest.mark.shared
def test_with_room_real_traffic_reuses_at_least_95_percent_of_the_ideal(shared_data: Path) -> None:
    trace = shared_data / "traces" / "mooncake" / "conversation_trace.jsonl"
    arrivals = [Arrival(a.at * 8, a.prompt, a.answer) for a in read(trace, 16)[:600]]
    numbering = Numbering(16)
    visits = [numbering.visit(a.prompt, a.answer) for a in arrivals]
    found = replay(arrivals, num_blocks=12_000, block_size=16, cost=Cost(0.02, 0.0005, 0.001))
    assert found.reused >= 0.95 * clairvoyant(visits, 12_000)


@pytest.mark.shared
def test_with_little_room_real_traffic_reuses_more_than_by_recency(shared_data: Path) -> None:
    arrivals = read(shared_data / "traces" / "mooncake" / "conversation_trace.jsonl", 4)[:2000]
    numbering = Numbering(4)
    visits = [numbering.visit(a.prompt, a.answer) for a in arrivals]
    found = replay(arrivals, num_blocks=2000, block_size=4, cost=Cost(0.001, 0.0, 0.0))
    assert found.reused >= 1.3 * recent(visits, 2000)
    assert found.reused <= clairvoyant(visits, 2000)
