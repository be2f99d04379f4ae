"""The members of classes of characters: what they have together, and the names that POSIX gives to some of them."""

from __future__ import annotations

import re
from typing import Final

LARGEST_CODE: Final = 0x10FFFF
CLASS: Final = r"\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)"
"""A class of characters, which may lack its end, in one way of reading it."""
POSIX: Final = re.compile(r"\[:\^?([a-z]+):\]")
POSIX_CLASSES: Final = {
    "alnum": ("09", "AZ", "az"),
    "alpha": ("AZ", "az"),
    "ascii": ("\x00\x7f",),
    "blank": ("\t", " "),
    "cntrl": ("\x00\x1f", "\x7f"),
    "digit": ("09",),
    "graph": ("!~",),
    "lower": ("az",),
    "print": (" ~",),
    "punct": ("!/", ":@", "[`", "{~"),
    "space": ("\t\r", " "),
    "upper": ("AZ",),
    "word": ("09", "AZ", "__", "az"),
    "xdigit": ("09", "AF", "af"),
}
"""The ranges of characters of each name, in order."""


class Members:
    """What is in a class of characters."""

    __slots__ = ("_classes", "ranges")

    def __init__(self, first: str) -> None:
        self.ranges = [(ord(first), ord(first))] if first else []
        self._classes: set[str] = set()

    def add(self, character: str | None, written: str) -> None:
        if character is None:
            self._classes.add(written)
        else:
            self.ranges.append((ord(character), ord(character)))

    @property
    def are_all(self) -> bool:
        """Whether these are certainly all characters: a class and its opposite, or ranges of all."""
        if any(f"\\{each[1].swapcase()}{each[2:]}" in self._classes for each in self._classes):
            return True
        following = 0
        for first, last in sorted(self.ranges):
            if first > (following if following != 0xD800 else 0xE000):  # no character has a number from D800 to DFFF
                return False
            following = max(following, last + 1)
        return following > LARGEST_CODE


def posix_members(name: str) -> str:
    """The members of a class that has this name in POSIX; with ``^`` before it, of all other characters."""
    ranges = POSIX_CLASSES[name.removeprefix("^")]
    if name.startswith("^"):
        ends = [-1, *(ord(end) for each in ranges for end in (each[0], each[-1])), LARGEST_CODE + 1]
        gaps = [(chr(ends[i] + 1), chr(ends[i + 1] - 1)) for i in range(0, len(ends), 2) if ends[i + 1] - ends[i] > 1]
        ranges = tuple(f"{first}{last}" for first, last in gaps)
    return "".join("-".join(map(_coded, dict.fromkeys(each))) for each in ranges)


def _coded(character: str) -> str:
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{ord(character):04X}" if ord(character) < 0x10000 else character
