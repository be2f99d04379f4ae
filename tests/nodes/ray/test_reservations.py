"""What a Ray cluster is asked for: one reservation for each replica, on machines apart, and the shortage by its name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.config import ModelConfig, PlacementConfig
from inferd.nodes.ray.reservations import (
    NODE_ID,
    SPARED_S,
    Machine,
    Needs,
    Reservation,
    Room,
    Wanted,
    decide,
    needs_of,
    retry_delay,
    selectors,
    shortage,
)

ONE = Needs(cores=1)
MODELS = ("chat", "code")


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[str, Wanted], list[Reservation]]:
    """What is wanted, and reservations of which some have joined and some of these have a replica."""
    reservations, wanted = [], {}
    for model in MODELS:
        own = [
            Reservation(
                name=f"{model}-{number}",
                model=model,
                needs=draw(st.sampled_from([ONE, Needs(cores=2)])),
                asked_at=draw(st.floats(0, 100)),
                ray_node=(ray_node := draw(st.sampled_from(["", "a", "b"]))),
                is_draining=ray_node == "b",
            )
            for number in range(draw(st.integers(0, 4)))
        ]
        joined = [one for one in own if one.has_joined]
        used = draw(st.frozensets(st.sampled_from([one.name for one in joined]))) if joined else frozenset()
        for one in joined:
            one.spared_at = None if one.name in used else draw(st.floats(90, 100))
        is_wanted = draw(st.booleans())
        if used or is_wanted:
            leaving = draw(st.frozensets(st.sampled_from(sorted(used)))) if used else frozenset()
            wanted[model] = Wanted(len(used) + draw(st.integers(0, 3)), ONE, used, leaving)
        reservations += own
    return wanted, reservations


@given(states())
def test_every_replica_has_one_reservation_and_none_with_a_replica_is_given_back(
    state: tuple[dict[str, Wanted], list[Reservation]],
) -> None:
    wanted, reservations = state
    decision = decide(wanted, reservations, 100.0)
    assert len(set(decision.give_back)) == len(decision.give_back)
    for model in MODELS:
        num, needs, used, leaving = wanted.get(model, Wanted(0, ONE, frozenset()))
        own = [one for one in reservations if one.model == model]
        kept = [one for one in own if one.name not in decision.give_back]
        asked = [one for name, one in decision.ask if name == model]
        assert used <= {one.name for one in kept}
        assert all(one == needs for one in asked)
        # One on a draining machine counts for none: its replica is moved, or leaves already.
        draining = [one for one in kept if one.is_draining]
        assert {one.name for one in draining} <= used
        num -= sum(one.name in leaving for one in draining)
        kept = [one for one in kept if not one.is_draining]
        assert len(kept) + len(asked) >= num
        # More than wanted are those alone that have joined and were without a replica for a short time.
        extra = len(kept) + len(asked) - num
        assert extra <= sum(one.spared_at is not None and 100 - one.spared_at < SPARED_S for one in kept)


@given(states())
def test_what_was_decided_needs_no_other_decision(state: tuple[dict[str, Wanted], list[Reservation]]) -> None:
    wanted, reservations = state
    decision = decide(wanted, reservations, 100.0)
    after = [one for one in reservations if one.name not in decision.give_back]
    for number, (model, needs) in enumerate(decision.ask):
        after.append(Reservation(name=f"new-{number}", model=model, needs=needs, asked_at=100.0))
    assert decide(wanted, after, 100.0) == ([], [])


def test_a_spared_reservation_is_given_back_after_its_time() -> None:
    one = Reservation(name="one", model="chat", needs=ONE, asked_at=0.0, ray_node="a", spared_at=10.0)
    assert decide({}, [one], 10.0 + SPARED_S - 0.1).give_back == []
    assert decide({}, [one], 10.0 + SPARED_S).give_back == ["one"]


@pytest.mark.parametrize(
    ("settings", "need_bytes", "needs"),
    [
        ({}, 0, ONE),
        ({"threads": 3}, 0, Needs(cores=3)),
        ({"threads": 3, "placement": PlacementConfig(nodes="ray", cores=2)}, 0, Needs(cores=2)),
        ({"device": "cuda:0", "memory_bytes": 7}, 0, Needs(cores=1, gpus=1, memory_bytes=7)),
        ({"memory_bytes": 7}, 9, Needs(cores=1, memory_bytes=9)),
        (
            {"region": "eu", "placement": PlacementConfig(nodes="ray", labels={"zone": "a"})},
            0,
            Needs(cores=1, labels={"zone": "a", "region": "eu"}),
        ),
    ],
)
def test_a_replica_reserves_what_its_settings_say(settings: dict[str, object], need_bytes: int, needs: Needs) -> None:
    assert needs_of(ModelConfig(source="tiny", **settings), need_bytes) == needs  # type: ignore[arg-type]


def test_a_machine_without_a_replica_comes_first_and_a_lost_one_last() -> None:
    labelled = Needs(cores=1, labels={"zone": "a"})
    assert selectors(ONE, (), ()) == [{}]
    assert selectors(labelled, {"n1"}, ()) == [{"zone": "a", NODE_ID: "!in(n1)"}, {"zone": "a"}]
    assert selectors(ONE, {"n2"}, {"n1"}) == [{NODE_ID: "!in(n1,n2)"}, {NODE_ID: "!in(n1)"}, {}]


GIB = 1 << 30
ROOM = Room(
    nodes=[
        Machine(resources={"CPU": 2.0, "memory": 4.0 * GIB}, labels={"zone": "a"}),
        Machine(resources={"CPU": 4.0, "memory": 2.0 * GIB}, labels={}),
    ],
    free={"CPU": 1.0, "memory": 6.0 * GIB},
)


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (ONE, ""),
        (Needs(cores=2), "no room: a replica takes 2 CPU, and 1 CPU is free on the 2 machines of the Ray cluster"),
        (
            Needs(cores=2, memory_bytes=GIB, labels={"zone": "a"}),
            "no room: a replica takes 2 CPU, 1.00 GiB of memory, and 1 CPU, 6.00 GiB of memory is free on the 1 machine of the Ray cluster",
        ),
        (
            Needs(cores=1, gpus=1),
            "no machine of the Ray cluster can hold a replica: it takes 1 CPU, 1 GPU, and the most of each that one "
            "has is 4 CPU, 0 GPU",
        ),
        (
            Needs(cores=1, labels={"zone": "b"}),
            "no machine of the Ray cluster has the labels zone=b (ray start --labels)",
        ),
    ],
)
def test_what_a_cluster_lacks_is_said(needs: Needs, said: str) -> None:
    assert shortage(needs, ROOM) == said


def test_attempts_become_rarer_and_never_stop() -> None:
    delays = [retry_delay(failures) for failures in range(40)]
    assert delays[:4] == [0.0, 1.0, 2.0, 4.0]
    assert delays == sorted(delays)
    assert delays[-1] == 30.0
