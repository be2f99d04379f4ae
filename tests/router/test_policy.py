"""The choice of a replica."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from inferd.router.policy import choose


@dataclass
class Some:
    can_take: bool
    outstanding: int


@given(st.lists(st.builds(Some, st.booleans(), st.integers(0, 9))))
def test_the_choice_can_take_more_and_none_that_can_has_less_to_do(replicas: list[Some]) -> None:
    chosen = choose(replicas)
    able = [replica.outstanding for replica in replicas if replica.can_take]
    if chosen is None:
        assert not able
    else:
        assert chosen.can_take
        assert chosen.outstanding == min(able)
