"""What is wrong with a pattern or a grammar of a request, and where."""

from __future__ import annotations

from typing import Final

_SHOWN: Final = 24  # characters of the text at the place


class Fault(Exception):
    """A text that is not well formed, or that no mask enforces: the place, what is wrong, and what is accepted."""

    def __init__(self, text: str, offset: int, problem: str, remedy: str) -> None:
        super().__init__(f"{place(text, offset)}: {problem}; {remedy}")
        self.offset = offset
        self.problem = problem
        self.remedy = remedy


def place(text: str, offset: int) -> str:
    """The line and column of an offset, counted from 1, with the text that stands there."""
    before = text[:offset]
    line, column = before.count("\n") + 1, offset - before.rfind("\n")
    rest = text[offset : offset + _SHOWN].partition("\n")[0]
    return f"at line {line}, column {column}, {f'before {rest!r}' if rest else 'at the end of the line'}"


def offset_of(text: str, line: int, column: int) -> int:
    """The offset of a line and column, counted from 1. What lies behind the text is its end."""
    start = 0
    for _ in range(line - 1):
        after = text.find("\n", start) + 1
        if not after:
            return len(text)
        start = after
    return min(start + column - 1, len(text))
