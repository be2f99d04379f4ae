"""Replaces addresses, numbers and secrets in texts before they are written.

Python's ``re`` backtracks, so a pattern of the operator has a bounded cost (``config/patterns.py``) and the time is
linear in the text. A text is searched in pieces, so that the interpreter is held for milliseconds at most.

The end of a text that was cut may be the beginning of a match. It is replaced from the first character on from which
some text that follows could make one (``beginnings.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from inferd.config.patterns import MAX_WIDTH
from inferd.observe.payloads.beginnings import beginning_of

PIECE: Final = 4096
"""Characters that are searched at once."""

CUT: Final = "[cut]"
"""Stands for the end of a text that was cut within what may be a match."""

_EMAIL: Final = r"[\w.%+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}"
_PHONE: Final = r"(?<![\w.])(?:\+\d|\(?\d{2,5}\)?[ ./-]{1,3}\d)[\d ()./-]{5,18}\d(?!\w)"
_CARD: Final = r"(?<!\d)\d(?:[ -]?\d){12,18}(?!\d)"
_API_KEY: Final = (
    r"(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,200}|gh[pousr]_[A-Za-z0-9]{20,200}|github_pat_\w{20,200}|A[KS]IA[0-9A-Z]{16}"
    r"|xox[abeprs]-[A-Za-z0-9-]{10,200}|AIza[\w-]{30,40}|hf_[A-Za-z0-9]{20,100}|eyJ[\w-]{10,2000}\.[\w-]{5,2000}"
    r"|(?i:bearer )[\w.~+/-]{16,2000}|-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----[\s\S]{0,2000}"
)


def _is_card(digits: str) -> bool:
    """Luhn's checksum (ISO/IEC 7812-1)."""
    numbers = [int(letter) for letter in digits if letter.isdecimal()]
    doubled = [2 * number - 9 * (number > 4) for number in numbers[-2::-2]]
    return (sum(numbers[-1::-2]) + sum(doubled)) % 10 == 0


def _is_phone(text: str) -> bool:
    return 9 <= sum(letter.isdecimal() for letter in text) <= 15 or text.startswith("+")


_BUILT_IN: Final[dict[str, tuple[str, Callable[[str], bool]]]] = {
    "api_key": (_API_KEY, lambda text: True),
    "email": (_EMAIL, lambda text: True),
    "card": (_CARD, _is_card),
    "phone": (_PHONE, _is_phone),
}
_WIDEST: Final = 4500  # characters of the longest match of a built-in pattern


class _Step(NamedTuple):
    """One pattern."""

    word: str  # that replaces a match
    pattern: re.Pattern[str]
    check: Callable[[str], bool]  # of the text of a match
    width: int  # characters of the longest match
    beginning: re.Pattern[str]  # matches where a text ends in a match that is not complete, or that may go on

    @classmethod
    def of(cls, name: str, text: str, check: Callable[[str], bool], width: int) -> _Step:
        return cls(f"[{name}]", re.compile(text), check, width, beginning_of(text))


class Redactor:
    """Replaces matches by the names of their patterns: ``[email]``."""

    def __init__(self, names: Iterable[str], patterns: Mapping[str, str] = {}) -> None:
        """``names``: of built-in patterns. ``patterns``: the operator's, by name, which are searched first; the
        configuration has checked their cost."""
        self._steps = [_Step.of(name, text, _always, MAX_WIDTH) for name, text in patterns.items()]
        wanted = set(names)
        self._steps += [
            _Step.of(name, text, check, _WIDEST) for name, (text, check) in _BUILT_IN.items() if name in wanted
        ]

    @property
    def is_empty(self) -> bool:
        """Whether no text is ever changed."""
        return not self._steps

    def __call__(self, text: str, *, is_cut: bool = False) -> str:
        """``is_cut``: the text went on behind its end."""
        has_beginning = False
        for step in self._steps:
            found = list(_matches(text, step))
            end = _end(text, step, found) if is_cut else len(text)
            has_beginning = has_beginning or end < len(text)
            text = _replaced(text, step.word, found, end)
        return text + CUT if has_beginning else text


def _always(text: str) -> bool:
    return True


def _matches(text: str, step: _Step) -> Iterator[tuple[int, int]]:
    """Where the matches begin and end."""
    start = 0
    while start < len(text):
        stop = done = start + PIECE
        for found in step.pattern.finditer(text, start, stop + step.width + 1):
            if found.start() >= stop:
                break
            if found.end() > found.start() and step.check(found[0]):
                yield found.span()
                done = found.end()
        start = max(stop, done)


def _end(text: str, step: _Step, found: list[tuple[int, int]]) -> int:
    """Where a match begins that the end of the text cuts. Within a complete match none begins."""

    def first(start: int) -> int:
        beginning = step.beginning.search(text, start)
        return len(text) if beginning is None else beginning.start()

    end = first(max(0, len(text) - step.width))
    for start, stop in found:
        if start < end < stop:
            end = first(stop)
    return end


def _replaced(text: str, word: str, found: list[tuple[int, int]], end: int) -> str:
    """The text up to ``end``, in which the word stands for each match."""
    parts: list[str] = []
    done = 0
    for start, stop in found:
        if start < end:
            parts += (text[done:start], word)
            done = stop
    return "".join((*parts, text[done:end]))
