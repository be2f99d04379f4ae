"""Servers that fail at another gateway: tried last for a short time, whatever is told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.router.choosing.suspects import HINT_S, LONGEST_S, MAX_SUSPECTS, Suspects


def test_a_hint_holds_while_it_is_repeated_and_not_for_long() -> None:
    suspects = Suspects()
    assert suspects.hear("a", ["one"], 0.0) == ["one"]
    now = 0.0
    while now < LONGEST_S - 1:
        now += 1.0
        assert suspects.hear("a", ["one"], now) == []
        assert suspects.now(now) == {"one"}
    suspects.hear("a", ["one"], LONGEST_S)
    assert suspects.now(LONGEST_S) == frozenset(), "a gateway that tells it for ever changes nothing more"


def test_a_hint_that_is_not_repeated_ends_soon_and_counts_as_new_later() -> None:
    suspects = Suspects()
    suspects.hear("a", ["one"], 0.0)
    assert suspects.now(HINT_S) == {"one"}
    assert suspects.now(HINT_S + 0.1) == frozenset()
    assert suspects.hear("a", ["one"], 20.0) == ["one"]
    assert suspects.now(20.0) == {"one"}


def test_a_second_gateway_has_a_time_of_its_own() -> None:
    suspects = Suspects()
    suspects.hear("a", ["one"], 0.0)
    suspects.hear("b", ["one"], 2.0)
    assert suspects.now(2.0 + HINT_S) == {"one"}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.floats(0, 5)), max_size=60))
def test_a_server_is_suspected_only_within_the_time_of_a_hint(told: list[tuple[str, str, float]]) -> None:
    suspects, now, heard = Suspects(), 0.0, dict[str, float]()
    for gateway, server, passed_s in told:
        now += passed_s
        suspects.hear(gateway, [server], now)
        heard[server] = now
        assert suspects.now(now) <= {each for each, at in heard.items() if now - at <= HINT_S}
    assert suspects.now(now + HINT_S + 1) == frozenset()


def test_a_gateway_can_name_a_bounded_number_of_servers() -> None:
    suspects = Suspects()
    suspects.hear("a", [str(number) for number in range(10 * MAX_SUSPECTS)], 0.0)
    assert len(suspects.now(0.0)) == MAX_SUSPECTS
