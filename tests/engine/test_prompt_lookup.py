"""Continuations found in a text, against a search that looks at every place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.engine.native import BUILT
from inferd.engine.native_lookup import NativeNGrams
from inferd.engine.prompt_lookup import LONGEST, RESUMED, SHORTEST, Finder, NGrams

FINDERS: list[type[Finder]] = [NGrams, NativeNGrams] if BUILT else [NGrams]
TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8)
each_way = pytest.mark.parametrize("ngrams", FINDERS)


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


@each_way
@given(TEXTS, st.integers(1, 10))
def test_the_longest_of_the_latest_occurrences_goes_on(
    ngrams: type[Finder], parts: list[list[int]], count: int
) -> None:
    index, tokens = ngrams(), list[int]()
    for part in parts:  # taken as it grows, as an answer does
        tokens += part
        length, found = index.find(tokens, count)
        latest = dict(sorted(matches(tokens).items())[-8:])
        if not latest:
            assert length in (0, RESUMED)
            continue
        assert length == max(latest.values())
        at = max(place for place, equal in latest.items() if equal == length)
        expected = tokens[at + 1 :]
        while len(expected) < count:
            expected.append(expected[len(expected) - (len(tokens) - at - 1)])
        assert found == expected[:count]


@pytest.mark.skipif(not BUILT, reason="inferd was installed without its compiled kernels")
@given(TEXTS, st.integers(1, 10))
def test_the_kernels_find_what_python_finds(parts: list[list[int]], count: int) -> None:
    plain, native, tokens = NGrams(), NativeNGrams(), list[int]()
    for part in parts:
        tokens += part
        assert native.find(tokens, count) == plain.find(tokens, count)


@each_way
def test_a_text_that_quotes_itself_is_drafted_from_the_quoted_place(ngrams: type[Finder]) -> None:
    text = [*range(100, 130), 7, 8, 9, *range(104, 110)]
    assert ngrams().find(text, 5) == (6, [110, 111, 112, 113, 114])


@each_way
def test_a_quote_with_one_other_token_is_resumed_behind_it(ngrams: type[Finder]) -> None:
    text = [*range(100, 130), 7, 8, 9, *range(104, 110)]
    index = ngrams()
    index.find(text, 5)
    text += [110, 111, 55]  # two of the guesses were right
    assert index.find(text, 3) == (RESUMED, [113, 114, 115])
    text += [56]
    assert index.find(text, 3) == (0, []), "once only"


@each_way
def test_a_period_is_drafted_for_as_long_as_is_asked(ngrams: type[Finder]) -> None:
    text = [1, 2, 3, 1, 2, 3, 1, 2]
    assert ngrams().find(text, 7)[1] == [3, 1, 2, 3, 1, 2, 3]


@each_way
def test_a_pair_that_occurs_for_the_first_time_drafts_nothing(ngrams: type[Finder]) -> None:
    index = ngrams()
    for text in ([], [1], [1, 2], [1, 2, 1]):
        assert index.find(text, 4) == (0, [])
