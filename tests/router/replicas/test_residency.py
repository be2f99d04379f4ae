"""Models unloaded for another one: none without need, none with requests, none that is pinned."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.router.replicas.residency import Resident, make_room

RESIDENTS = st.lists(
    st.builds(
        Resident,
        name=st.text("abcdefgh", min_size=4, max_size=8),
        num_bytes=st.integers(0, 100),
        is_pinned=st.booleans(),
        is_idle=st.booleans(),
        last_used_at=st.floats(0, 100),
        priority=st.sampled_from(["normal", "batch"]),
    ),
    max_size=8,
    unique_by=lambda resident: resident.name,
)


@given(RESIDENTS, st.integers(0, 200), st.integers(0, 400))
def test_the_verdict_keeps_the_books(residents: list[Resident], need: int, budget: int) -> None:
    room = make_room(residents, need, budget)
    used = {resident.name: resident.num_bytes for resident in residents}
    movable = {r.name for r in residents if not r.is_pinned}
    idle = {r.name for r in residents if r.name in movable and r.is_idle}
    left = need + sum(used.values()) - sum(used[name] for name in room.evict)
    if room.action == "fits":
        assert need + sum(used.values()) <= budget
    elif room.action == "evict":
        assert room.evict
        assert left <= budget
        assert set(room.evict) <= idle
        for name in room.evict:  # none without need
            assert left + used[name] > budget
    elif room.action == "wait":
        assert need + sum(used.values()) - sum(used[name] for name in idle) > budget
        assert need + sum(used.values()) - sum(used[name] for name in movable) <= budget
    else:
        assert need + sum(used.values()) - sum(used[name] for name in movable) > budget


def test_batch_models_leave_first_then_the_least_recently_used() -> None:
    residents = [
        Resident(name="old", num_bytes=10, last_used_at=1.0),
        Resident(name="young", num_bytes=10, last_used_at=2.0),
        Resident(name="batch", num_bytes=10, last_used_at=3.0, priority="batch"),
    ]
    assert make_room(residents, 10, 30).evict == ("batch",)
    assert make_room(residents, 20, 30).evict == ("batch", "old")


def test_a_larger_one_makes_a_smaller_ones_leaving_needless() -> None:
    residents = [
        Resident(name="small", num_bytes=5, last_used_at=1.0),
        Resident(name="large", num_bytes=50, last_used_at=2.0),
    ]
    assert make_room(residents, 40, 60).evict == ("large",)
