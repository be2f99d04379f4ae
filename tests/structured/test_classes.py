"""Classes of characters: the names of POSIX, and when a class has all characters."""

from __future__ import annotations

import re
import string

import pytest

from inferd.structured.classes import LARGEST_CODE, POSIX_CLASSES, Members, posix_members

ASCII = [chr(code) for code in range(128)]
EXPECTED = {
    "alnum": string.ascii_letters + string.digits,
    "alpha": string.ascii_letters,
    "ascii": "".join(ASCII),
    "blank": " \t",
    "cntrl": "".join(map(chr, (*range(32), 127))),
    "digit": string.digits,
    "graph": string.ascii_letters + string.digits + string.punctuation,
    "lower": string.ascii_lowercase,
    "print": string.ascii_letters + string.digits + string.punctuation + " ",
    "punct": string.punctuation,
    "space": " \t\n\r\f\v",
    "upper": string.ascii_uppercase,
    "word": string.ascii_letters + string.digits + "_",
    "xdigit": string.hexdigits,
}


def test_every_name_is_expected() -> None:
    assert EXPECTED.keys() == POSIX_CLASSES.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_name_of_posix_stands_for_its_characters_and_with_a_hat_for_all_others(name: str) -> None:
    own, others = re.compile(f"[{posix_members(name)}]"), re.compile(f"[{posix_members('^' + name)}]")
    for character in [*ASCII, "\x80", "\xe9", "\u2028", "\uffff", "\U00010000", chr(LARGEST_CODE)]:
        assert bool(own.fullmatch(character)) == (character in EXPECTED[name]), character
        assert bool(others.fullmatch(character)) == (character not in EXPECTED[name]), character


def members(*ranges: tuple[int, int], classes: tuple[str, ...] = ()) -> Members:
    made = Members("")
    made.ranges = list(ranges)
    for each in classes:
        made.add(None, each)
    return made


@pytest.mark.parametrize(
    ("made", "are_all"),
    [
        (members(), False),
        (members((0, LARGEST_CODE)), True),
        (members((0, LARGEST_CODE - 1)), False),
        (members((1, LARGEST_CODE)), False),
        (members((0, 99), (100, LARGEST_CODE)), True),
        (members((50, LARGEST_CODE), (0, 60), (10, 20)), True),
        (members((0, 99), (101, LARGEST_CODE)), False),
        (members((0, 0xD7FF), (0xE000, LARGEST_CODE)), True),
        (members((0, 0xD7FF), (0xE001, LARGEST_CODE)), False),
        (members((0, 0xD7FE), (0xE000, LARGEST_CODE)), False),
        (members(classes=("\\d", "\\D")), True),
        (members(classes=("\\p{L}", "\\P{L}")), True),
        (members(classes=("\\d", "\\W")), False),
        (members(classes=("\\p{L}", "\\P{N}")), False),
    ],
)
def test_a_class_has_all_characters_by_ranges_without_a_gap_or_with_an_opposite(made: Members, are_all: bool) -> None:
    assert made.are_all is are_all


def test_a_class_begins_with_its_first_character() -> None:
    made = Members("a")
    made.add("b", "b")
    assert made.ranges == [(97, 97), (98, 98)]
    assert not made.are_all
