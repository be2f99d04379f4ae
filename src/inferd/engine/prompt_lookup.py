"""Drafts without a model: what followed the last time the text ended like this.

Answers that quote, correct or continue their prompt repeat long parts of it (prompt lookup decoding, Saxena 2023). For
one sequence this keeps where each pair of tokens ended, chained from the latest to the earliest as LZ77's
compressors do, and finds the longest recent occurrence of the sequence's own end. Knows token ids; no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

SHORTEST = 2  # tokens that must be equal before a continuation is believed at all
LONGEST = 32  # as far back as occurrences are compared
_MOST_LOOKED_AT = 8  # occurrences, latest first


class NGrams:
    """The pairs of one sequence's tokens, which only ever grow."""

    __slots__ = ("_before", "_last")

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}  # pair -> where it ended last
        self._before: list[int] = [0]  # by position: where the pair that ends here ended before; 0: nowhere

    def extend(self, tokens: Seq[int]) -> None:
        """Take what ``tokens``, the whole sequence, has more than at the last call."""
        last, before = self._last, self._before
        for at in range(len(before), len(tokens)):
            pair = (tokens[at - 1], tokens[at])
            before.append(last.get(pair, 0))
            last[pair] = at

    def find(self, tokens: Seq[int], count: int) -> tuple[int, list[int]]:
        """(number of tokens that are equal, ``count`` tokens that followed them); (0, []) where there is nothing.

        ``tokens`` is the sequence as given to ``extend``. Of the latest occurrences the longest counts, of equally
        long ones the latest. An occurrence that runs into the end of the sequence goes on with itself: a period
        is drafted for as long as is asked.
        """
        end = len(tokens) - 1
        if end < SHORTEST:
            return 0, []
        best, best_at = 0, 0
        at = self._before[end]
        for _ in range(_MOST_LOOKED_AT):
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
        if not best:
            return 0, []
        found = list(tokens[best_at + 1 : best_at + 1 + count])
        while len(found) < count:
            found += found[: count - len(found)]
        return best, found
