"""Replaces addresses, numbers and secrets in texts before they are written.

Python's ``re`` backtracks, so a pattern of the operator has a bounded cost (``config/pattern_cost.py``) and the time is
linear in the text. A text is searched in pieces, so that the interpreter is held for milliseconds at most.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from inferd.config.pattern_cost import MAX_WIDTH

PIECE: Final = 4096
"""Characters that are searched at once."""

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


class Redactor:
    """Replaces matches by the names of their patterns: ``[email]``."""

    def __init__(self, names: Iterable[str], patterns: Mapping[str, str] = {}) -> None:
        """``names``: of built-in patterns. ``patterns``: the operator's, by name, which are searched first; the
        configuration has checked their cost."""
        self._steps: list[tuple[str, re.Pattern[str], Callable[[str], bool], int]] = [
            (f"[{name}]", re.compile(text), _always, MAX_WIDTH) for name, text in patterns.items()
        ]
        wanted = set(names)
        self._steps += [
            (f"[{name}]", re.compile(text), check, _WIDEST)
            for name, (text, check) in _BUILT_IN.items()
            if name in wanted
        ]

    @property
    def is_empty(self) -> bool:
        """Whether no text is ever changed."""
        return not self._steps

    def __call__(self, text: str) -> str:
        for word, pattern, check, width in self._steps:
            text = _replaced(text, pattern, check, word, width)
        return text


def _always(text: str) -> bool:
    return True


def _replaced(text: str, pattern: re.Pattern[str], check: Callable[[str], bool], word: str, width: int) -> str:
    parts: list[str] = []
    done = start = 0
    while start < len(text):
        stop = start + PIECE
        for found in pattern.finditer(text, start, stop + width + 1):
            if found.start() >= stop:
                break
            if found.end() > found.start() and check(found[0]):
                parts += (text[done : found.start()], word)
                done = found.end()
        start = max(stop, done)
    return "".join((*parts, text[done:])) if parts else text
