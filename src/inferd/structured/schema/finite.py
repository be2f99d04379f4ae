"""The texts that a pattern of ECMA 262 matches, where they are few. Pure functions of the pattern.

A pattern is read as an expression that is written out: each alternative, each member of a class, each number of
repetitions. Anchors are kept as marks until the whole text is known. What has no end, or is not known to have few
texts, is not listed: a negated class, ``\\s``, a property of Unicode.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Final, NoReturn

MOST_TEXTS: Final = 100
MOST_CHARACTERS: Final = 2_000  # of all texts together
_DEEPEST: Final = 50  # groups within each other
_BEGIN, _END = "\ud800", "\udfff"  # the marks of anchors, which are no characters
_ANCHORS: Final = {"^": _BEGIN, "$": _END}
_CLASSES: Final = {"d": string.digits, "w": f"{string.digits}{string.ascii_letters}_"}
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}
_HEX_DIGITS: Final = {"x": 2, "u": 4}
_GROUPS: Final = ("(?:", "(?i:")
_FOLDED: Final = {"k": "\u212a", "s": "\u017f"}  # characters beyond ASCII that are equal to a letter but for its case

_Texts = list[str] | None  # None: they are not listed


class _UnlistedError(Exception):
    pass


def texts(pattern: str) -> list[str] | None:
    """All texts that match, and perhaps others, which ``patterns.matches`` tells apart; None: they are not listed, or
    there are none."""
    if _BEGIN in pattern or _END in pattern:
        return None
    try:
        found = _Parser(pattern).whole()
    except _UnlistedError:
        return None
    kept: dict[str, None] = {}
    for marked in found:
        inner = marked.lstrip(_BEGIN).rstrip(_END)
        plain = inner.replace(_BEGIN, "").replace(_END, "")
        if not plain and _BEGIN in marked and _END in marked:
            kept[""] = None
        elif inner != plain and plain:
            continue  # an anchor stands between two characters, so that no text matches
        elif not (marked.startswith(_BEGIN) and marked.endswith(_END)):
            return None  # any text may stand before it, or behind it
        else:
            kept[plain] = None
    return [*kept] or None


class _Parser:
    __slots__ = ("_at", "_pattern")

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def whole(self) -> list[str]:
        found = self._alternatives(0, folds=False)
        if found is None or self._at < len(self._pattern):
            self._give_up()
        return found

    def _give_up(self) -> NoReturn:
        raise _UnlistedError

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _alternatives(self, depth: int, *, folds: bool) -> _Texts:
        ways = [self._sequence(depth, folds=folds)]
        while self._peek() == "|":
            self._at += 1
            ways.append(self._sequence(depth, folds=folds))
        return None if None in ways else _bounded(text for way in ways for text in way or ())

    def _sequence(self, depth: int, *, folds: bool) -> _Texts:
        found: _Texts = [""]
        while (character := self._peek()) and character not in "|)":
            item = _repeated(self._item(depth, folds=folds), *self._repetition())
            found = None if found is None or item is None else _joined(found, item)
        return found

    def _item(self, depth: int, *, folds: bool) -> _Texts:
        """The texts of the next piece without its repetition."""
        character = self._peek()
        if character == "(":
            return self._group(depth, folds=folds)
        self._at += 1
        if character == "[":
            return self._class(folds=folds)
        if character == ".":
            return None
        if character in _ANCHORS:
            return [_ANCHORS[character]]
        if character in "*+?{}]":
            self._give_up()
        return _cases(self._escape() if character == "\\" else character, folds=folds)

    def _group(self, depth: int, *, folds: bool) -> _Texts:
        if depth >= _DEEPEST:
            self._give_up()
        begin = next((each for each in _GROUPS if self._pattern.startswith(each, self._at)), "(")
        self._at += len(begin)
        if begin == "(" and self._peek() == "?":
            end = self._pattern.find(">", self._at)
            name = self._pattern[self._at + 1 : end].removeprefix("P")
            if end < 0 or not name.startswith("<") or name.startswith(("<=", "<!")):
                self._give_up()
            self._at = end + 1
        found = self._alternatives(depth + 1, folds=folds or "i" in begin)
        if self._peek() != ")":
            self._give_up()
        self._at += 1
        return found

    def _repetition(self) -> tuple[int, int | None]:
        """How often the piece before the place occurs: at least and, unless there is no limit, at most."""
        sign = self._peek()
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign, (1, 1))
        if sign == "{":
            end = self._pattern.find("}", self._at)
            low, comma, high = self._pattern[self._at + 1 : max(end, self._at + 1)].partition(",")
            if not (low.isdecimal() and (high.isdecimal() or not high) and len(low) < 9 and len(high) < 9):
                self._give_up()
            least, most = int(low), int(low) if not comma else int(high) if high else None
            self._at = end
        elif not sign or sign not in "*+?":
            return 1, 1
        self._at += 1
        if self._peek() == "?":  # the order in which texts are tried
            self._at += 1
        return least, most

    def _escape(self) -> str:
        """The characters that an escape stands for, behind its backslash."""
        letter = self._peek()
        self._at += 1
        if letter in _CLASSES and letter:
            return _CLASSES[letter]
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter in _HEX_DIGITS:
            digits = self._pattern[self._at : self._at + _HEX_DIGITS[letter]]
            self._at += _HEX_DIGITS[letter]
            if len(digits) < _HEX_DIGITS[letter] or not set(digits) <= set(string.hexdigits):
                self._give_up()
            code = int(digits, 16)
            if 0xD800 <= code <= 0xDFFF:  # half of a character
                self._give_up()
            return chr(code)
        if not letter or letter.isalnum():
            self._give_up()
        return letter

    def _class(self, *, folds: bool) -> _Texts:
        """The members of a class, behind its bracket."""
        is_negated = self._peek() == "^"
        self._at += is_negated
        members: list[str] = []
        try:
            while self._peek() != "]":
                first = self._member()
                if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                    self._at += 1
                    last = self._member()
                    if len(first) > 1 or len(last) > 1 or not 0 <= ord(last) - ord(first) < MOST_TEXTS:
                        self._give_up()
                    first = "".join(map(chr, range(ord(first), ord(last) + 1)))
                members.append(first)
        except _UnlistedError:
            self._skip_class()
            return None
        self._at += 1
        if not members:
            return None
        return None if is_negated else _cases("".join(members), folds=folds)

    def _member(self) -> str:
        character = self._peek()
        if not character:
            self._give_up()
        self._at += 1
        return self._escape() if character == "\\" else character

    def _skip_class(self) -> None:
        while (character := self._peek()) != "]":
            if not character:
                self._give_up()
            self._at += 2 if character == "\\" else 1
        self._at += 1


def _cases(characters: str, *, folds: bool) -> _Texts:
    """Texts of one character each, and where ``folds``, the same in the other case."""
    if not folds:
        return _bounded(characters)
    if not characters.isascii():
        return None
    lower = [character.lower() for character in characters]
    return _bounded(case for each in lower for case in (each, each.upper(), *_FOLDED.get(each, "")))


def _bounded(found: Iterable[str]) -> _Texts:
    """The texts, each once; None where they are too many or too long."""
    kept: dict[str, None] = {}
    size = 0
    for text in found:
        if text in kept:
            continue
        size += len(text)
        if len(kept) >= MOST_TEXTS or size > MOST_CHARACTERS:
            return None
        kept[text] = None
    return [*kept]


def _joined(first: list[str], second: list[str]) -> _Texts:
    return _bounded(begin + end for begin in first for end in second)


def _repeated(item: _Texts, least: int, most: int | None) -> _Texts:
    if most == 0 or item == [""]:
        return [""]
    if item is None or most is None or most < least:
        return None
    found: _Texts = [""]
    kept: _Texts = [""] if least == 0 else []
    for number in range(1, most + 1):
        found = None if found is None else _joined(found, item)
        if number >= least:
            kept = None if found is None or kept is None else _bounded([*kept, *found])
        if found is None or kept is None:
            return None
    return kept
