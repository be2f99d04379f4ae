"""Whether a prompt is handed over: the rule, and what it learns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.router.choosing.split import LONGEST_S, SHORTEST_S, Costs, Decision, decide, limit_s


def measured(*, s_per_token: float = 0.001, overhead_s: float = 0.1) -> Costs:
    costs = Costs()
    costs.record(
        num_bytes=4000, num_tokens=1000, num_computed=1000, compute_s=1000 * s_per_token, overhead_s=overhead_s
    )
    return costs


def asked(costs: Costs, **changed: int) -> Decision:
    values = {"num_bytes": 4000, "cached_bytes": 0, "streams": 3, "waiting_tokens": 0, "min_tokens": 256}
    return decide(costs, **(values | changed))


@pytest.mark.parametrize(
    ("changed", "is_split", "why"),
    [
        ({}, True, "about 1000 tokens would hold 3 answers up by 3 s together, and the hand-over delays its own"),
        ({"streams": 0}, False, "no other answer"),
        ({"cached_bytes": 3000}, False, "about 250 tokens are not cached, and a hand-over begins at 256"),
        ({"waiting_tokens": 5000}, False, "delays its own by 5.1 s"),
        ({"waiting_tokens": 2000}, True, "delays its own by 2.1 s"),
        ({"streams": 1}, True, "hold 1 answer up"),
    ],
)
def test_a_prompt_is_handed_over_where_others_gain_more_than_it_loses(
    changed: dict[str, int], is_split: bool, why: str
) -> None:
    decision = asked(measured(), **changed)
    assert decision.is_split == is_split
    assert why in decision.why


def test_the_first_prompts_are_handed_over_so_that_it_is_measured() -> None:
    assert asked(Costs(), streams=1).is_split
    assert not asked(Costs(), streams=0).is_split


def test_a_slow_hand_over_ends_hand_overs() -> None:
    assert not asked(measured(overhead_s=9.0)).is_split


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0.001, 2.0), st.floats(0.0, 1.0)), min_size=1))
def test_means_stay_within_what_was_measured(seen: list[tuple[int, float, float]]) -> None:
    costs = Costs()
    for tokens, compute_s, overhead_s in seen:
        costs.record(
            num_bytes=tokens, num_tokens=tokens, num_computed=tokens, compute_s=compute_s, overhead_s=overhead_s
        )
    per_token = [compute_s / tokens for tokens, compute_s, _ in seen]
    assert min(per_token) * 0.999 <= costs.s_per_token <= max(per_token) * 1.001
    assert min(one[2] for one in seen) - 1e-9 <= costs.overhead_s <= max(one[2] for one in seen) + 1e-9


@given(st.integers(0, 10**7))
def test_a_hand_over_is_given_up_within_limits(num_tokens: int) -> None:
    assert limit_s(Costs(), num_tokens) == LONGEST_S
    assert SHORTEST_S <= limit_s(measured(), num_tokens) <= LONGEST_S
