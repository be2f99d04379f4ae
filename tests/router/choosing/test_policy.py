"""The choice of a replica."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.config import BreakerConfig, ModelConfig, RemoteConfig
from inferd.remote.origin import origin_of
from inferd.router.choosing.policy import choose, ramp
from inferd.router.replicas.member import Member


@dataclass
class Some:
    index: int
    can_take: bool = True
    load: float = 0
    weight: float = 1.0
    region: str = ""
    is_fallback: bool = False
    server: str = ""

    @property
    def identity(self) -> str:
        return self.server or str(self.index)


@st.composite
def fleets(draw: st.DrawFn) -> list[Some]:
    indices = draw(st.lists(st.integers(0, 20), unique=True, max_size=6))
    return [
        Some(
            index,
            draw(st.booleans()),
            draw(st.integers(0, 9)),
            draw(st.sampled_from((0.25, 1.0, 3.0))),
            draw(st.sampled_from(("eu", "us"))),
            draw(st.booleans()),
        )
        for index in indices
    ]


@given(
    fleet=fleets(),
    region=st.sampled_from(("", "eu")),
    session=st.sampled_from(("", "s1", "s2")),
    prefer=st.dictionaries(st.integers(0, 20), st.integers(0, 4096)),
    since=st.dictionaries(st.integers(0, 20), st.floats(0, 100)),
    random=st.randoms(use_true_random=False),
)
def test_the_choice_can_take_more_and_is_a_fallback_only_when_no_other_can(
    fleet: list[Some],
    region: str,
    session: str,
    prefer: dict[int, int],
    since: dict[int, float],
    random: Random,
) -> None:
    able = [some for some in fleet if some.can_take and region in ("", some.region)]
    chosen = choose(
        fleet,
        random=random,
        now=100.0,
        region=region,
        session=session,
        prefer=prefer,
        ready_since=since,
        slow_start_s=10.0,
    )
    if chosen is None:
        assert not able
    else:
        assert chosen in able
        assert not chosen.is_fallback or all(some.is_fallback for some in able)


def spread(fleet: list[Some], num: int, *, completes: bool) -> Counter[int]:
    random = Random(7)
    counts: Counter[int] = Counter()
    for _ in range(num):
        chosen = choose(fleet, random=random)
        assert chosen is not None
        counts[chosen.index] += 1
        if not completes:
            chosen.load += 1
    return counts


@pytest.mark.parametrize("completes", [True, False], ids=["idle", "busy"])
def test_shares_follow_the_weights(completes: bool) -> None:
    fleet = [Some(0, weight=1), Some(1, weight=2), Some(2, weight=5)]
    counts = spread(fleet, 8000, completes=completes)
    for some in fleet:
        assert counts[some.index] == pytest.approx(1000 * some.weight, rel=0.12)


def test_two_choices_keep_the_busiest_close_to_the_average() -> None:
    fleet = [Some(index) for index in range(20)]
    spread(fleet, 2000, completes=False)
    assert max(some.load for some in fleet) <= 105


def test_of_two_the_less_loaded_takes_it() -> None:
    fleet = [Some(0, load=3), Some(1, load=2)]
    assert {choose(fleet, random=Random(seed)).index for seed in range(50)} == {1}  # type: ignore[union-attr]


def home(fleet: list[Some], session: str) -> int:
    chosen = choose(fleet, random=Random(1), session=session)
    assert chosen is not None
    return chosen.index


def test_a_session_stays_while_its_replica_can_take_it_and_comes_back() -> None:
    fleet = [Some(index) for index in range(5)]
    for name in map(str, range(50)):
        at_home = home(fleet, name)
        fleet[at_home].load += 7
        assert home(fleet, name) == at_home
        fleet[at_home].can_take = False
        assert home(fleet, name) != at_home
        fleet[at_home].can_take = True
        assert home(fleet, name) == at_home


@given(st.permutations(("http://a/v1", "http://b/v1", "http://c/v1", "http://d/v1")), st.text(max_size=20))
def test_gateways_with_the_same_servers_in_another_order_choose_the_same_one(servers: list[str], session: str) -> None:
    """Their choices are equal without an exchange, whatever is in flight at each of them."""
    if not session:
        return
    chosen = []
    for seed, order in enumerate((sorted(servers), servers)):
        fleet = [Some(index, load=7 * seed * index, server=server) for index, server in enumerate(order)]
        some = choose(fleet, random=Random(seed), session=session)
        assert some is not None
        chosen.append(some.server)
    assert chosen[0] == chosen[1]


@given(
    st.permutations([f"http://{name}/v1" for name in "abcdef"]),
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 20), min_size=6, max_size=6),
)
def test_new_prompts_with_an_equal_beginning_go_to_one_of_two_servers_from_every_gateway(
    servers: list[str], continuation: int, loads: list[int]
) -> None:
    """Idle gateways choose the same one. Of the two a gateway takes the less loaded, and none that is overloaded."""
    idle = [Some(index, server=server) for index, server in enumerate(sorted(servers))]
    first = choose(idle, random=Random(1), continuation=continuation)
    assert first is not None
    without = [some for some in idle if some is not first]
    second = choose(without, random=Random(1), continuation=continuation)
    assert second is not None
    other = [Some(index, server=server) for index, server in enumerate(servers)]
    again = choose(other, random=Random(2), continuation=continuation)
    assert again is not None
    assert again.server == first.server
    for some, load in zip(other, loads, strict=True):
        some.load = load
    limit = 1.5 * sum(loads) / len(loads) + 1
    chosen = choose(other, random=Random(3), continuation=continuation, slack=1.5)
    assert chosen is not None
    assert chosen.load <= limit
    pair = [some for some in other if some.server in (first.server, second.server) and some.load <= limit]
    if len(pair) == 2:
        assert chosen in pair
        assert chosen.load == min(some.load for some in pair)


def test_new_prompts_spread_by_weight() -> None:
    fleet = [Some(index, weight=weight) for index, weight in enumerate((1.0, 1.0, 2.0))]
    counts: Counter[int] = Counter()
    for number in range(2000):
        chosen = choose(fleet, random=Random(1), continuation=number)
        assert chosen is not None
        counts[chosen.index] += 1
    assert counts[2] == pytest.approx(1000, rel=0.1)


def test_servers_with_equal_addresses_in_other_spellings_are_one() -> None:
    spellings = ("http://a/v1", "HTTP://A:80/v1/", "http://a:80/v1")
    members = [Member(replica_of(1), RemoteConfig(url=url), BreakerConfig(), 0.0) for url in spellings[::2]]
    assert len({member.identity for member in members}) == 1
    assert len({str(origin_of(url)) for url in spellings}) == 1


def test_a_remote_server_is_known_by_its_address_and_a_worker_by_its_number() -> None:
    there = RemoteConfig(url="http://a/v1", model="m")
    members = [Member(replica, there, BreakerConfig(), 0.0) for replica in (replica_of(1), replica_of(5))]
    assert members[0].identity == members[1].identity
    assert Member(replica_of(1), RemoteConfig(url="http://a/v1"), BreakerConfig(), 0.0).identity != members[0].identity
    assert Member(replica_of(5), ModelConfig(source="demo"), BreakerConfig(), 0.0).identity == "5"


def replica_of(index: int) -> Any:
    """What a member reads of a replica."""
    return SimpleNamespace(index=index, kind="remote", region="", is_fallback=False, weight=1.0)


def test_a_replica_that_leaves_moves_its_own_sessions_alone() -> None:
    fleet = [Some(index) for index in range(5)]
    names = [str(number) for number in range(500)]
    before = {name: home(fleet, name) for name in names}
    after = {name: home(fleet[:2] + fleet[3:], name) for name in names}
    assert all(after[name] == before[name] for name in names if before[name] != 2)
    assert all(after[name] != 2 for name in names)
    moved = Counter(after[name] for name in names if before[name] == 2)
    assert len(moved) == 4  # they spread over all that are left


def test_sessions_spread_by_weight() -> None:
    fleet = [Some(0, weight=1), Some(1, weight=3)]
    counts = Counter(home(fleet, str(number)) for number in range(2000))
    assert counts[1] == pytest.approx(1500, rel=0.08)


@given(
    loads=st.lists(st.integers(0, 50 * 1024).map(lambda tokens: tokens / 1024), min_size=2, max_size=6),
    seen=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    slack=st.floats(1, 3),
)
def test_a_replica_that_has_seen_the_prompt_is_preferred_up_to_the_slack_and_no_further(
    loads: list[float], seen: list[int], slack: float
) -> None:
    fleet = [Some(index, load=load) for index, load in enumerate(loads)]
    prefer = {index: 256 * seen[index] for index in range(len(fleet))}
    limit = slack * sum(loads) / len(loads) + 1
    chosen = choose(fleet, random=Random(3), prefer=prefer, slack=slack)
    assert chosen is not None
    welcome = [some for some in fleet if prefer[some.index] and some.load <= limit]
    if welcome:
        assert chosen in welcome
        most = max(prefer[some.index] for some in welcome)
        assert prefer[chosen.index] == most
        assert chosen.load == min(some.load for some in welcome if prefer[some.index] == most)


@given(
    loads=st.lists(st.integers(0, 9), min_size=2, max_size=6),
    seen=st.lists(st.integers(0, 63), min_size=6, max_size=6),
    continuation=st.integers(0, 2**64 - 1) | st.none(),
    seed=st.integers(0, 99),
)
def test_a_replica_that_has_received_a_small_part_of_a_prompt_counts_as_one_that_has_received_nothing(
    loads: list[int], seen: list[int], continuation: int | None, seed: int
) -> None:
    """Where a short system prompt was received does not decide where long prompts behind it go."""
    fleet = [Some(index, load=load) for index, load in enumerate(loads)]
    prefer = {index: seen[index] for index in range(len(fleet))}
    chosen = choose(fleet, random=Random(seed), prefer=prefer, prompt_bytes=256, continuation=continuation)
    assert chosen is choose(fleet, random=Random(seed), continuation=continuation)


@given(
    loads=st.lists(st.integers(0, 9), min_size=2, max_size=6),
    seen=st.lists(st.integers(0, 256), min_size=6, max_size=6),
    continuation=st.integers(0, 2**64 - 1) | st.none(),
)
def test_a_large_part_of_a_prompt_decides_before_any_hash_and_load_below_the_slack(
    loads: list[int], seen: list[int], continuation: int | None
) -> None:
    fleet = [Some(index, load=load) for index, load in enumerate(loads)]
    prefer = {index: seen[index] for index in range(len(fleet))}
    limit = 1.5 * sum(loads) / len(loads) + 1
    chosen = choose(fleet, random=Random(3), prefer=prefer, prompt_bytes=256, continuation=continuation)
    assert chosen is not None
    welcome = [prefer[some.index] for some in fleet if some.load <= limit and prefer[some.index] >= 64]
    if welcome:
        assert prefer[chosen.index] == max(welcome)


@given(st.lists(st.permutations([f"http://{name}/v1" for name in "abcdef"]), min_size=2, max_size=4), st.data())
def test_gateways_that_place_one_new_prompt_at_the_same_time_agree_where_their_loads_are_equal(
    orders: list[list[str]], data: st.DataObject
) -> None:
    """Whatever the order of servers in their files, and whichever servers have received its system prompt."""
    continuation = data.draw(st.integers(0, 2**64 - 1))
    chosen = set()
    for seed, order in enumerate(orders):
        fleet = [Some(index, server=server) for index, server in enumerate(order)]
        prefer = data.draw(st.dictionaries(st.integers(0, 5), st.integers(0, 1023)))
        some = choose(fleet, random=Random(seed), prefer=prefer, prompt_bytes=4096, continuation=continuation)
        assert some is not None
        chosen.add(some.server)
    assert len(chosen) == 1


def test_a_hot_prefix_does_not_pile_up_on_one_replica() -> None:
    fleet = [Some(index) for index in range(4)]
    random = Random(5)
    for _ in range(400):
        chosen = choose(fleet, random=random, prefer={2: 4096}, slack=1.5)
        assert chosen is not None
        chosen.load += 1
    assert fleet[2].load <= 1.5 * 100 + 2
    assert fleet[2].load > 100


def test_a_replica_that_came_back_gets_its_share_by_and_by() -> None:
    shares = []
    for now in (100.0, 105.0, 110.0):
        fleet = [Some(0), Some(1)]
        random = Random(11)
        for _ in range(1000):
            chosen = choose(fleet, random=random, now=now, ready_since={1: 100.0}, slow_start_s=10.0)
            assert chosen is not None
            chosen.load += 1
        shares.append(fleet[1].load / 1000)
    assert shares == pytest.approx([0.1 / 1.1, 0.5 / 1.5, 0.5], abs=0.02)


@given(age=st.floats(-1, 100), slow_start_s=st.floats(0, 50))
def test_the_ramp_is_never_nothing_and_ends_at_all(age: float, slow_start_s: float) -> None:
    part = ramp(0.0, age, slow_start_s)
    assert 0 < part <= 1
    assert part == 1 or age < slow_start_s
    assert ramp(0.0, age + 1, slow_start_s) >= part
