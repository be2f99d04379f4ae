"""``prompt_lookup`` by the kernels (kernels/lookup.h), where they were built. Knows token ids; the kernels' own memory keeps the text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from inferd.engine.native import BUILT
from inferd.engine.prompt_lookup import KEPT, LONGEST, MOST_LOOKED_AT, Finder, NGrams

if TYPE_CHECKING:
    from inferd import _kernels as kernels
else:
    from inferd.engine.native import kernels


def finder() -> Finder:
    return NativeNGrams() if BUILT else NGrams()


class NativeNGrams:
    """``NGrams`` by the kernels."""

    __slots__ = ("_known", "_lookup")

    def __init__(self) -> None:
        self._known = 0
        self._lookup = kernels.Lookup(KEPT, LONGEST, MOST_LOOKED_AT)

    def find(self, tokens: Seq[int], count: int) -> tuple[int, list[int]]:
        more = list(tokens[self._known :])
        self._known = len(tokens)
        return self._lookup.find(more, count)
