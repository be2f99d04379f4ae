"""Changes that are none: what a program does is the same with them, or differs in what is nobody's promise. Each with its reason.

A change is named by its file, the text that it replaces and what it puts there, so moved lines do not matter.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tests.mutants.operators import Change


class Equivalent(NamedTuple):
    file: str
    text: str
    replacement: str
    reason: str


EQUIVALENT: Final[tuple[Equivalent, ...]] = ()


def reason_for(change: Change, source: str) -> str | None:
    """Why a change cannot be noticed; None: it is not among those that are known."""
    old = source[change.start : change.end]
    for known in EQUIVALENT:
        if (known.file, known.text, known.replacement) == (change.file, old, change.text):
            return known.reason
    return None
