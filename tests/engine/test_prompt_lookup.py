"""Continuations found in a text, against a search that looks at every place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.engine.prompt_lookup import LONGEST, SHORTEST, NGrams


def matches(tokens: list[int]) -> dict[int, int]:
    """Where the text's end has occurred before -> how many tokens are equal there."""
    found = {}
    for at in range(SHORTEST - 1, len(tokens) - 1):
        length = 0
        while length < LONGEST and length <= at and tokens[at - length] == tokens[-1 - length]:
            length += 1
        if length >= SHORTEST:
            found[at] = length
    return found


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8), st.integers(1, 10))
def test_the_longest_of_the_latest_occurrences_goes_on(parts: list[list[int]], count: int) -> None:
    index, tokens = NGrams(), list[int]()
    for part in parts:  # taken as it grows, as an answer does
        tokens += part
        index.extend(tokens)
        length, found = index.find(tokens, count)
        latest = dict(sorted(matches(tokens).items())[-8:])
        if not latest:
            assert (length, found) == (0, [])
            continue
        assert length == max(latest.values())
        at = max(place for place, equal in latest.items() if equal == length)
        expected = tokens[at + 1 :]
        while len(expected) < count:
            expected.append(expected[len(expected) - (len(tokens) - at - 1)])
        assert found == expected[:count]


def test_a_text_that_quotes_itself_is_drafted_from_the_quoted_place() -> None:
    text = [*range(100, 130), 7, 8, 9, *range(104, 110)]
    index = NGrams()
    index.extend(text)
    assert index.find(text, 5) == (6, [110, 111, 112, 113, 114])


def test_a_period_is_drafted_for_as_long_as_is_asked() -> None:
    text = [1, 2, 3, 1, 2, 3, 1, 2]
    index = NGrams()
    index.extend(text)
    assert index.find(text, 7)[1] == [3, 1, 2, 3, 1, 2, 3]


def test_a_pair_that_occurs_for_the_first_time_drafts_nothing() -> None:
    index = NGrams()
    for text in ([], [1], [1, 2], [1, 2, 1]):
        index.extend(text)
        assert index.find(text, 4) == (0, [])
