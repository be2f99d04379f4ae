"""Drafts without a model: what followed the last time the text ended like this.

Answers that quote, correct or continue their prompt repeat long parts of it (prompt lookup decoding, Saxena 2023). For
one sequence this keeps where each pair of tokens ended, chained from the latest to the earliest as LZ77's
compressors do, and finds the longest recent occurrence of the sequence's own end. Where a quote breaks off with one
other token, the text may go on behind it: that is tried at the next token. Knows token ids; no tensor.

The kernels do the same without Python between tokens (``native_lookup``); the class here is the oracle of the tests, and what is
used where there are no kernels.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

SHORTEST = 2  # tokens that must be equal before a continuation is believed at all
RESUMED = 1  # the length of a match that goes on behind one other token
LONGEST = 32  # as far back as occurrences are compared
KEPT = 4  # equal tokens after which a place is returned to
MOST_LOOKED_AT = 8  # occurrences, latest first


class Finder(Protocol):
    """One sequence's text, which only ever grows."""

    def find(self, tokens: Seq[int], count: int) -> tuple[int, list[int]]:
        """(number of tokens that are equal, ``count`` tokens that followed them); (0, []) where there is nothing.

        ``tokens``: the whole sequence. Of the latest occurrences the longest counts, of equally long ones the latest.
        An occurrence that runs into the end of the sequence goes on with itself: a period is drafted for as long as
        is asked. Where nothing is equal but was at the last call, ``RESUMED`` and what follows if the text since then
        stands for as many tokens there.
        """
        ...


class NGrams:
    """The pairs of one sequence's tokens."""

    __slots__ = ("_before", "_last", "_quote")

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}  # pair -> where it ended last
        self._before: list[int] = [0]  # by position: where the pair that ends here ended before; 0: nowhere
        self._quote: tuple[int, int] | None = None  # where the place that was last found, and the text, ended then

    def find(self, tokens: Seq[int], count: int) -> tuple[int, list[int]]:
        last, before = self._last, self._before
        for at in range(len(before), len(tokens)):
            pair = (tokens[at - 1], tokens[at])
            before.append(last.get(pair, 0))
            last[pair] = at
        end = len(tokens) - 1
        best, best_at = self._longest(tokens, end)
        if not best and self._quote is not None:
            at = self._quote[0] + end - self._quote[1]
            if at < end:
                best, best_at = RESUMED, at
        self._quote = (best_at, end) if best >= KEPT else None
        if not best:
            return 0, []
        found = list(tokens[best_at + 1 : best_at + 1 + count])
        while len(found) < count:
            found += found[: count - len(found)]
        return best, found

    def _longest(self, tokens: Seq[int], end: int) -> tuple[int, int]:
        """Equal tokens and where they end, of the latest occurrences."""
        best, best_at = 0, 0
        at = self._before[end] if end >= 0 else 0
        for _ in range(MOST_LOOKED_AT):
            if not at:
                break
            length = SHORTEST
            while length < LONGEST and length <= at and tokens[at - length] == tokens[end - length]:
                length += 1
            if length > best:
                best, best_at = length, at
                if length == LONGEST:
                    break
            at = self._before[at]
        return best, best_at
