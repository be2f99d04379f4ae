"""``prompt_lookup`` by the kernels (kernels/lookup.h), where they were built.

Knows token ids; the text is kept in the kernels' own memory.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from inferd.engine.speculation.prompt_lookup import (
    HELD,
    KEPT,
    LONGEST,
    MOST_SEARCHED,
    RESUMED,
    RETURNED,
    WINDOW,
    Finder,
    Found,
    NGrams,
)
from inferd.native.compiled import BUILT, kernels


def finder() -> Finder:
    return NativeNGrams() if BUILT else NGrams()


class NativeNGrams:
    """``NGrams`` by the kernels."""

    __slots__ = ("_known", "_lookup")

    def __init__(self) -> None:
        self._known = 0
        self._lookup = kernels.Lookup(
            returned=RETURNED,
            resumed=RESUMED,
            longest=LONGEST,
            kept=KEPT,
            window=WINDOW,
            held=HELD,
            most_looked_at=MOST_SEARCHED,
        )

    def find(self, tokens: Seq[int], count: int) -> Found:
        more = list(tokens[self._known :])
        self._known = len(tokens)
        return Found(*self._lookup.find(more, count))
