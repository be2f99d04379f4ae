"""The edit distance against the table of Wagner and Fischer."""

from __future__ import annotations

import difflib

from hypothesis import given
from hypothesis import strategies as st

from inferd.replay.edit_distance import MAX_CHARACTERS, common_ends, edit_distance

LETTERS = st.text("abé ", max_size=40)


def by_table(one: str, other: str) -> int:
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        before, row = row, [number]
        for place, its in enumerate(other, 1):
            row.append(min(before[place] + 1, row[-1] + 1, before[place - 1] + (letter != its)))
    return row[-1]


@given(LETTERS, LETTERS)
def test_the_distance_is_that_of_the_table(one: str, other: str) -> None:
    assert edit_distance(one, other) == by_table(one, other) == edit_distance(other, one)


@given(LETTERS, LETTERS)
def test_common_ends_are_common_and_do_not_overlap(one: str, other: str) -> None:
    start, stop = common_ends(one, other)
    assert one[:start] == other[:start]
    assert stop == 0 or one[-stop:] == other[-stop:]
    assert start + stop <= min(len(one), len(other))
    if one != other:
        assert one[start : start + 1] != other[start : start + 1]


def test_texts_with_one_change_are_one_apart_and_difflib_finds_the_same_place() -> None:
    one = "The king went to the old tower and sang. " * 40
    other = one[:1000] + "X" + one[1001:]
    assert edit_distance(one, other) == 1
    (change,) = [code for code in difflib.SequenceMatcher(None, one, other, False).get_opcodes() if code[0] != "equal"]
    assert common_ends(one, other)[0] == change[1] == 1000


def test_a_text_that_is_too_long_has_no_distance_unless_most_of_it_is_equal() -> None:
    long = "a" * (MAX_CHARACTERS + 1)
    assert edit_distance(long + "b", "c" + long) is None
    assert edit_distance(long + "b", long + "c") == 1
