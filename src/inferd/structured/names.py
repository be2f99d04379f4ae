"""Names of properties that a JSON text has used already, and the tokens that would repeat one in the same object.

A grammar can not know which names were chosen where any name may stand, so these tokens are taken out of the masks.
Every text has one spelling under the masks, so that equal names have equal bytes. An answer with reasoning, calls or
structures has JSON texts in it, each behind a text that is known. Prose may have the same text: the grammar tells
whether a JSON text begins there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

Follow = Callable[[tuple[int, ...]], np.ndarray]
"""The mask behind some more tokens, in words of 32 bits."""

_QUOTE, _ESCAPE = ord('"'), ord("\\")
_OPEN_OBJECT, _OPEN_LIST, _COMMA, _COLON = b"{[,:"
_CLOSING = b"}]"
_FIRST = b' \t\r\n{["'  # bytes at the start of a JSON text in which there may be names, and of texts
MOST_FOLLOWED = 64  # masks behind tokens that are computed for one mask
LONGEST_BEGIN = 48  # bytes by which the text before a JSON text is recognised


class Place(NamedTuple):
    """A place in an answer that masks allow: in its JSON text, or beside it. A place is never changed; the text goes on
    to another one."""

    objects: tuple[frozenset[bytes] | None, ...] = ()  # the names so far, from the outermost; None: a list
    is_name_next: bool = False  # the next text is a name
    name: bytes | None = None  # what the name that is open here has so far
    is_text: bool = False  # inside of a text, a name or not
    is_escaped: bool = False  # behind a backslash
    begins: tuple[bytes, ...] = ()  # texts behind which another JSON text begins; none: all of the answer is one
    beside: bytes | None = None  # the last bytes of the text that is no JSON; None: within a JSON text

    @property
    def is_free_text(self) -> bool:
        """Whether it is inside of a text that is no name."""
        return self.is_text and self.name is None and self.beside is None

    def after(self, data: bytes) -> Place | None:
        """The place behind these bytes; ``None`` where they repeat a name."""
        if self.is_free_text and not self.is_escaped and _QUOTE not in data and _ESCAPE not in data:
            return self
        objects, is_name_next, name, is_text, is_escaped, begins, beside = self
        for byte in data:
            if beside is None and not (objects or is_text or byte in _FIRST) and begins:
                beside = b""  # a number, or no JSON at all
            if beside is not None:
                beside = beside[1 - LONGEST_BEGIN :] + bytes((byte,))
                if beside.endswith(begins):
                    beside = None
            elif is_text:
                if is_escaped or byte != _QUOTE:
                    is_escaped = not is_escaped and byte == _ESCAPE
                    name = None if name is None else name + bytes((byte,))
                    continue
                is_text = False
                if name is not None:
                    names = objects[-1] or frozenset()
                    if name in names:
                        return None
                    objects = (*objects[:-1], names | {name})
                    name, is_name_next = None, False
                if begins and not objects:
                    beside = b""
            elif byte == _QUOTE:
                is_text = True
                name = b"" if is_name_next else None
            elif byte == _OPEN_OBJECT:
                objects, is_name_next = (*objects, frozenset()), True
            elif byte == _OPEN_LIST:
                objects, is_name_next = (*objects, None), False
            elif byte == _COMMA:
                is_name_next = bool(objects) and objects[-1] is not None
            elif byte == _COLON:
                is_name_next = False
            elif byte in _CLOSING:
                objects, is_name_next = objects[:-1], False
                if begins and not objects:
                    beside = b""
        return Place(objects, is_name_next, name, is_text, is_escaped, begins, beside)


def first_place(begins: Iterable[str], *, is_begun: bool) -> Place | None:
    """The place before an answer with JSON texts behind others, and at once where ``is_begun``. ``None``: it has none."""
    texts = tuple({text.encode()[-LONGEST_BEGIN:]: None for text in begins})
    if not texts and not is_begun:
        return None
    return Place(begins=texts, beside=None if is_begun else b"")


class QuoteTokens:
    """The tokens of a vocabulary that can end a name: those with a quotation mark."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._all = sorted((data, number) for number, data in enumerate(tokens) if _QUOTE in data)
        self._of_two = [entry for entry in self._all if entry[0].count(_QUOTE) > 1]
        self._of_three = [entry for entry in self._of_two if entry[0].count(_QUOTE) > 2]
        self.may_repeat_in_text = bool(self._of_three)  # a token may end a text that is no name, and repeat a name
        # By token: 1 where it goes on with a text and leaves the place what it is (``Place.after``).
        self.is_unmarked = bytes(bool(data) and _QUOTE not in data and _ESCAPE not in data for data in tokens)
        self._others: dict[bytes, list[int]] = {}  # the tokens without a quotation mark, by their bytes
        for number, data in enumerate(tokens):
            if data and _QUOTE not in data:
                self._others.setdefault(data, []).append(number)

    def ban(self, row: np.ndarray, place: Place, follow: Follow | None = None) -> None:
        """Take the tokens that would repeat a name out of a mask of 32-bit words, unless no other one is in it.

        ``follow``: where rules for names may leave no other end to a name that is repeated, the masks behind tokens.
        """
        if place.is_free_text and not self.may_repeat_in_text:
            return
        words = row.view(np.uint32)
        found = self._found(words, place)
        if follow is not None:
            found += _DeadEnds(self, follow).among(words, place)
        if found and (kept := _without(words, found)).any():
            words[:] = kept

    def _found(self, words: np.ndarray, place: Place) -> list[int]:
        return [number for number in self._candidates(place) if _has(words, number)]

    def _spelling(self, words: np.ndarray, place: Place) -> dict[int, Place]:
        """The tokens of a mask that go on with the spelling of a name that the object has, longest first."""
        if place.name is None or place.beside is not None:
            return {}
        rests = [name[len(place.name) :] for name in place.objects[-1] or () if name.startswith(place.name)]
        parts = {rest[:size] for rest in rests for size in range(1, len(rest) + 1)}
        found: dict[int, Place] = {}
        for part in sorted(parts, key=len, reverse=True):
            for number in self._others.get(part, ()):
                if _has(words, number) and (after := place.after(part)) is not None:
                    found[number] = after
        return found

    def _candidates(self, place: Place) -> Iterator[int]:
        if place.beside is not None:
            return
        # A token that ends no name here has to open one and to end it: two marks, and one more inside of a text.
        for data, number in self._of_three if place.is_text else self._of_two:
            if place.after(data) is None:
                yield number
        if place.name is not None:
            for name in place.objects[-1] or ():
                if name.startswith(place.name):
                    yield from self._starting(name[len(place.name) :] + b'"')

    def _starting(self, data: bytes) -> Iterator[int]:
        for at in range(bisect_left(self._all, (data, 0)), len(self._all)):
            if not self._all[at][0].startswith(data):
                return
            yield self._all[at][1]


class _DeadEnds:
    """Tokens behind which a name can only become one that the object has. The search ends after ``MOST_FOLLOWED``."""

    def __init__(self, quotes: QuoteTokens, follow: Follow) -> None:
        self._quotes = quotes
        self._follow = follow
        self._num_left = MOST_FOLLOWED

    def among(self, words: np.ndarray, place: Place, path: tuple[int, ...] = ()) -> list[int]:
        spelling = self._quotes._spelling(words, place)
        return [number for number, after in spelling.items() if self._is_one((*path, number), after)]

    def _is_one(self, path: tuple[int, ...], place: Place) -> bool:
        self._num_left -= 1
        if self._num_left < 0:
            return False
        words = self._follow(path).view(np.uint32)
        words = _without(words, self._quotes._found(words, place))
        spelling = self._quotes._spelling(words, place)
        if _without(words, spelling).any():
            return False
        return len(self.among(words, place, path)) == len(spelling)


def _has(words: np.ndarray, number: int) -> bool:
    return bool(words[number // 32] >> np.uint32(number % 32) & 1)


def _without(words: np.ndarray, numbers: Iterable[int]) -> np.ndarray:
    kept = words.copy()
    for number in numbers:
        kept[number // 32] &= np.uint32(~(1 << number % 32) & 0xFFFF_FFFF)
    return kept
