"""Continuations found in a text, against a search that looks at every place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.engine.speculation.native_lookup import NativeNGrams
from inferd.engine.speculation.prompt_lookup import HELD, LONGEST, RESUMED, RETURNED, SHORTEST, Finder, Found, NGrams
from inferd.native.compiled import BUILT

FINDERS: list[type[Finder]] = [NGrams, NativeNGrams] if BUILT else [NGrams]
TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8)
NOTHING = Found(0, [], [])
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


def following(tokens: list[int], at: int, count: int) -> list[int]:
    """What stands behind a place; one that reaches the text's end goes on with itself."""
    said = tokens[at + 1 :]
    while len(said) < count:
        said.append(said[len(said) - (len(tokens) - at - 1)])
    return said[:count]


@each_way
@given(TEXTS, st.integers(1, 10))
def test_the_longest_of_the_latest_occurrences_goes_on(
    ngrams: type[Finder], parts: list[list[int]], count: int
) -> None:
    index, tokens = ngrams(), list[int]()
    for part in parts:  # taken as it grows, as an answer does
        tokens += part
        found = index.find(tokens, count)
        latest = dict(sorted(matches(tokens).items())[-8:])
        if not latest:
            assert found == NOTHING or found.length in (RESUMED, RETURNED)
            continue
        assert found.length == max(latest.values())
        longest = [following(tokens, at, count) for at, equal in latest.items() if equal == found.length]
        assert found.tokens in longest
        for i, token in enumerate(found.tokens):
            alike = [at for at in latest if following(tokens, at, count)[:i] == found.tokens[:i]]
            others = [latest[at] for at in alike if following(tokens, at, count)[i] != token]
            assert found.rivals[i] == max(others, default=0), "the best place that says something else now"


@pytest.mark.skipif(not BUILT, reason="inferd was installed without its compiled kernels")
@given(TEXTS, st.integers(0, 10), st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=9), max_size=6))
def test_the_kernels_find_what_python_finds(parts: list[list[int]], count: int, rarer: list[list[int]]) -> None:
    plain, native, tokens = NGrams(), NativeNGrams(), list[int](range(9, 30))
    for part in [*parts, *rarer]:
        tokens += part
        assert native.find(tokens, count) == plain.find(tokens, count)


@each_way
def test_a_text_that_quotes_itself_is_drafted_from_the_quoted_place(ngrams: type[Finder]) -> None:
    text = [*range(100, 130), 7, 8, 9, *range(104, 110)]
    assert ngrams().find(text, 5) == (6, [110, 111, 112, 113, 114], [0] * 5)


@each_way
def test_of_equally_long_occurrences_that_counts_which_goes_on_as_most_do(ngrams: type[Finder]) -> None:
    text = [50, 1, 2, 5, 51, 1, 2, 6, 7, 52, 1, 2, 6, 8, 53, 1, 2, 9, 54, 1, 2]
    assert ngrams().find(text, 2) == (2, [6, 8], [2, 2])
    assert ngrams().find([9, 1, 2, 5, 51, 1, 2, 6, 9, 1, 2], 2) == (3, [5, 51], [2, 0]), "a longer one before all"


@each_way
def test_what_is_being_quoted_goes_on_where_another_place_is_as_like(ngrams: type[Finder]) -> None:
    page = [*range(100, 120), 1, 2, *range(130, 150), 1, 2, *range(160, 170)]
    index = ngrams()
    text = [*page, 7, 8, *range(114, 120)]
    assert index.find(text, 3).tokens == [1, 2, 130]
    text += [9, 1, 2]  # a word was put in: the next place goes on, and not the latest
    assert index.find(text, 2) == (2, [130, 131], [2, 0])
    text = [*page, 7, 8, *range(114, 120)]
    index = ngrams()
    index.find(text, 3)
    text += [9]
    assert index.find(text, 2) == (RESUMED, [2, 130], [0, 0])
    text += [1]
    assert index.find(text, 2) == (RETURNED, [2, 130], [0, 0])
    text += [2]
    assert index.find(text, 2) == (2, [130, 131], [2, 0])


@each_way
def test_a_quote_with_one_other_token_is_resumed_behind_it(ngrams: type[Finder]) -> None:
    text = [*range(100, 130), 7, 8, 9, *range(104, 110)]
    index = ngrams()
    index.find(text, 5)
    text += [110, 111, 55]  # two of the guesses were right
    assert index.find(text, 3) == (RESUMED, [113, 114, 115], [0] * 3)
    text += [56]
    assert index.find(text, 3) == NOTHING, "once only"


@each_way
def test_a_quote_is_returned_to_at_its_next_token_wherever_that_stands(ngrams: type[Finder]) -> None:
    text = [*range(100, 130), 7, 8, 9, *range(104, 110)]
    for put_in, left_out in (([55, 56, 57], 0), ([], 4), ([55], 2)):
        index = ngrams()
        index.find(text, 5)
        other = [*text, *put_in]
        index.find(other, 5)
        other.append(110 + left_out)
        length, tokens, _ = index.find(other, 2)
        assert length == RETURNED or (not put_in and not left_out)
        assert tokens == [111 + left_out, 112 + left_out]


@each_way
def test_a_quote_is_forgotten_in_time(ngrams: type[Finder]) -> None:
    for gap in (HELD, HELD + 1):
        text = [*range(100, 130), 7, 8, 9, *range(104, 110)]
        index = ngrams()
        index.find(text, 5)
        for new in range(1000, 1000 + gap - 1):
            text.append(new)
            index.find(text, 5)
        text.append(112)
        assert index.find(text, 1) == ((RETURNED, [113], [0]) if gap == HELD else NOTHING)


@each_way
def test_a_period_is_drafted_for_as_long_as_is_asked(ngrams: type[Finder]) -> None:
    text = [1, 2, 3, 1, 2, 3, 1, 2]
    assert ngrams().find(text, 7).tokens == [3, 1, 2, 3, 1, 2, 3]


@each_way
def test_a_pair_that_occurs_for_the_first_time_drafts_nothing(ngrams: type[Finder]) -> None:
    index = ngrams()
    for text in ([], [1], [1, 2], [1, 2, 1]):
        assert index.find(text, 4) == NOTHING
