"""The ideals of block reuse against every choice there is, on small cases."""

from __future__ import annotations

from functools import cache
from itertools import combinations

from bench.reuse import Numbering, Visit, clairvoyant, kept_until, recent, statistical, stays, unlimited
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = 2
PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=6)


def visits_of(prompts: list[list[int]], answer: int = 1) -> list[Visit]:
    numbering = Numbering(SIZE)
    return [numbering.visit(prompt, answer) for prompt in prompts]


def best_by_trying(visits: list[Visit], capacity: int) -> int:
    """Every subset that may be kept after every request; a hit needs all blocks before it."""

    @cache
    def most(number: int, kept: frozenset[int]) -> int:
        if number == len(visits):
            return 0
        reused = 0
        for block in visits[number].blocks[: visits[number].findable]:
            if block not in kept:
                break
            reused += 1
        pool = sorted(kept | set(visits[number].blocks))
        choices = combinations(pool, min(capacity, len(pool)))
        return reused + max(most(number + 1, frozenset(choice)) for choice in choices)

    return most(0, frozenset())


@settings(max_examples=60)
@given(PROMPTS, st.integers(1, 4))
def test_the_clairvoyant_ideal_is_the_best_of_all_choices(prompts: list[list[int]], capacity: int) -> None:
    visits = visits_of(prompts)
    assert clairvoyant(visits, capacity) == best_by_trying(visits, capacity)


@given(PROMPTS, st.integers(1, 6), st.integers(1, 5))
def test_the_ideals_are_ordered_and_grow_with_capacity(prompts: list[list[int]], capacity: int, answer: int) -> None:
    visits = visits_of(prompts, answer)
    assert recent(visits, capacity) <= clairvoyant(visits, capacity) <= unlimited(visits)
    assert clairvoyant(visits, capacity) <= clairvoyant(visits, capacity + 1)


def by_price(visits: list[Visit], capacity: int) -> float:
    """The same linear program by its dual: the price of room at which what is gained beyond it is least."""
    found, distinct = stays(visits, 4)
    room = sum(min(capacity, number) for number in distinct)
    groups = [kept_until(stay for stay in found if stay.uses == uses) for uses in range(1, 5)]
    prices = [0.0, 1e6] + [
        (b[1] - a[1]) / (b[0] - a[0]) for points in groups for a, b in combinations(points, 2) if b[0] > a[0]
    ]
    return min(
        price * room + sum(max(reused - price * time for time, reused in points) for points in groups)
        for price in prices
    )


@settings(max_examples=60)
@given(PROMPTS, st.integers(1, 6), st.integers(1, 5))
def test_the_statistical_ideal_solves_its_linear_program(prompts: list[list[int]], capacity: int, answer: int) -> None:
    visits = visits_of(prompts, answer)
    assert abs(statistical(visits, capacity) - by_price(visits, capacity)) < 1e-6
    assert statistical(visits, capacity) <= statistical(visits, capacity + 1) + 1e-9
    assert abs(statistical(visits, 1000) - unlimited(visits)) < 1e-9


def test_the_statistical_ideal_keeps_as_many_as_there_is_room_for_their_time() -> None:
    """A hundred blocks at any time wait for their second visit, the last: room for 25 is room for a quarter of them."""
    visits = [Visit((block,), 1) for number in range(100, 5000) for block in (number, number - 100)]
    assert abs(statistical(visits, 25) / unlimited(visits) - 0.25) < 0.01
    assert recent(visits, 25) == 0


@given(PROMPTS)
def test_with_room_for_everything_the_ideals_agree(prompts: list[list[int]]) -> None:
    visits = visits_of(prompts)
    assert recent(visits, 100) == clairvoyant(visits, 100) == unlimited(visits)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.lists(st.integers(0, 1), min_size=1, max_size=9))
def test_blocks_are_equal_where_all_tokens_up_to_their_end_are(one: list[int], other: list[int]) -> None:
    first, second = visits_of([one, other])
    for i in range(min(len(first.blocks), len(second.blocks))):
        end = (i + 1) * SIZE
        assert (first.blocks[i] == second.blocks[i]) == (one[:end] == other[:end])


def test_the_last_token_of_a_prompt_is_left_to_compute() -> None:
    (full,) = visits_of([[1, 1, 1, 1]], answer=3)
    assert (len(full.blocks), full.findable) == (2, 1)
    assert full.others == 1  # the answer's last token is not stored
    longer = visits_of([[1, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert unlimited(longer) == 2


def test_answers_take_room_from_recent_prefixes() -> None:
    numbering = Numbering(SIZE)
    prompt = [0, 0, 0]
    long, short = numbering.visit(prompt, 5), numbering.visit(prompt, 1)
    other = numbering.visit([1, 1, 1], 5)
    assert recent([short, Visit(other.blocks, 1), short], 2) == 1
    assert recent([long, other, short], 2) == 0


def test_without_foresight_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    long, other = [0, 0, 0, 0, 0], [1, 1, 1]
    assert recent(visits_of([long, other, long]), 2) == 1
