"""The edit distance of two texts (Levenshtein, 1966), by bits in Python's integers."""

from __future__ import annotations

from typing import Final

from inferd.compare.answers import first_difference

MAX_CHARACTERS: Final = 65_536
"""Of each text; the distance of longer ones is not computed, as its time is the product of their lengths."""


def edit_distance(one: str, other: str) -> int | None:
    """The least number of characters to insert, delete or replace. None: a text is too long, after what both begin and
    end with alike.

    Source: Myers (1999), in the form of Hyyrö (2003): a column of the table is two integers, its vertical differences
    +1 and -1.
    """
    start, stop = common_ends(one, other)
    one, other = one[start : len(one) - stop], other[start : len(other) - stop]
    if not one or not other:
        return len(one) + len(other)
    if max(len(one), len(other)) > MAX_CHARACTERS:
        return None
    places: dict[str, int] = {}
    for index, letter in enumerate(one):
        places[letter] = places.get(letter, 0) | (1 << index)
    full, last = (1 << len(one)) - 1, 1 << (len(one) - 1)
    plus, minus, distance = full, 0, len(one)
    for letter in other:
        same = places.get(letter, 0)
        zero = (((same & plus) + plus) ^ plus) | same | minus
        across_plus = minus | (full & ~(zero | plus))
        across_minus = plus & zero
        distance += bool(across_plus & last) - bool(across_minus & last)
        across_plus = (across_plus << 1 | 1) & full
        across_minus = across_minus << 1 & full
        plus = across_minus | (full & ~(zero | across_plus))
        minus = across_plus & zero
    return distance


def common_ends(one: str, other: str) -> tuple[int, int]:
    """How many characters both texts begin with alike, and how many of the rest they end with alike."""
    start = first_difference(one, other)
    if start is None:
        return len(one), 0
    stop = first_difference(one[start:][::-1], other[start:][::-1])
    return start, 0 if stop is None else stop
