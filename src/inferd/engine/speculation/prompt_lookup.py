"""Guesses without a model: the tokens that followed the last time the text ended like this.

Answers that quote, correct or continue their prompt repeat long parts of it (prompt lookup decoding, Saxena 2023). For
one sequence this records where each pair of tokens ended, chained from the latest to the earliest as in LZ77
compressors, and finds the longest recent occurrence of the sequence's end. Where a quote differs by one token, the text
may continue after it, which is tried at the next token. Where tokens were inserted, changed or left out, the text
continues nearby; one equal token is enough there. Knows token ids; no tensor.

The kernels do the same without Python between tokens (``native_lookup``). The class here is the oracle of the tests,
and is used where there are no kernels.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

SHORTEST = 2  # tokens that must be equal before a continuation is used at all,
RETURNED = 1  # but for one close behind where the text stood,
RESUMED = 0  # and none where the text would stand again if one token had been exchanged
LONGEST = 32  # as far back as occurrences are compared
KEPT = 4  # equal tokens after which a place is returned to,
WINDOW = 24  # as many tokens behind it
HELD = 24  # and for as many tokens of text
MOST_SEARCHED = 8  # occurrences, latest first


class Found(NamedTuple):
    """What may follow a text."""

    length: int  # tokens that are equal there, or RETURNED, or RESUMED
    tokens: list[int]  # that followed; empty where no place was found
    # Of each token: how many tokens are equal at the best of the other places that go on alike as far as this token,
    # but not with it. 0: there is none.
    rivals: list[int]


class Finder(Protocol):
    """One sequence's text, which only ever grows."""

    def find(self, tokens: Seq[int], count: int) -> Found:
        """``count`` tokens that followed where the text last ended like now. ``tokens``: the whole sequence.

        Of the latest occurrences the longest counts. Of equally long ones, the first that applies is chosen: the place
        that continues the last found text, the next place after it, a place that continues as most of them do, the
        latest.

        An occurrence that reaches the end of the sequence continues with itself, so a period is repeated as long as
        needed. Where no token is equal but some were before, the text continues at the next token that equals the last
        one. Where there is none the first time, the tokens since then are taken to replace as many tokens of the text.
        """
        ...


class NGrams:
    """The pairs of one sequence's tokens."""

    __slots__ = ("_before", "_last", "_may_resume", "_quote")

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}  # pair -> where it ended last
        self._before: list[int] = [0]  # by position: where the pair that ends here ended before; 0: nowhere
        self._quote: tuple[int, int] | None = None  # where the place that is followed, and the text, ended
        self._may_resume = False

    def find(self, tokens: Seq[int], count: int) -> Found:
        last, before = self._last, self._before
        for at in range(len(before), len(tokens)):
            pair = (tokens[at - 1], tokens[at])
            before.append(last.get(pair, 0))
            last[pair] = at
        end = len(tokens) - 1
        if self._quote is not None and end - self._quote[1] > HELD:
            self._quote = None
        places = self._places(tokens, end) or self._quoted(tokens, end)
        self._may_resume = False
        if not places or count <= 0:
            return Found(0, [], [])
        best, best_at = self._chosen(places, tokens)
        self._follow(best, best_at, end)
        found = Found(best, [], [])
        for i in range(count):
            said = [_token(tokens, found.tokens, at + 1 + i) for _, at in places]
            found.tokens.append(_token(tokens, found.tokens, best_at + 1 + i))
            others = [length for (length, _), token in zip(places, said, strict=True) if token != found.tokens[i]]
            found.rivals.append(max(others, default=0))
            places = [place for place, token in zip(places, said, strict=True) if token == found.tokens[i]]
        return found

    def _places(self, tokens: Seq[int], end: int) -> list[tuple[int, int]]:
        """Numbers of equal tokens of the latest occurrences, and where they end."""
        places: list[tuple[int, int]] = []
        at = self._before[end] if end >= 0 else 0
        while at and len(places) < MOST_SEARCHED:
            length = SHORTEST
            while length < LONGEST and length <= at and tokens[at - length] == tokens[end - length]:
                length += 1
            places.append((length, at))
            at = self._before[at]
        return places

    def _quoted(self, tokens: Seq[int], end: int) -> list[tuple[int, int]]:
        """Places where the text may be in the passage that it followed until now."""
        if self._quote is None:
            return []
        stood, then = self._quote
        for at in range(stood + 1, min(stood + WINDOW + 1, end)):
            if tokens[at] == tokens[end]:
                return [(RETURNED, at)]
        at = stood + end - then
        return [(RESUMED, at)] if self._may_resume and at < end else []

    def _chosen(self, places: Seq[tuple[int, int]], tokens: Seq[int]) -> tuple[int, int]:
        longest = max(length for length, _ in places)
        best = [at for length, at in places if length == longest]
        if self._quote is not None:
            stood, then = self._quote
            if stood + len(tokens) - 1 - then in best:
                return longest, stood + len(tokens) - 1 - then
            near = [at for at in best if stood < at <= stood + WINDOW]
            if near:
                return longest, min(near)
        following = [tokens[at + 1] for at in best]
        return longest, max(best, key=lambda at: following.count(tokens[at + 1]))

    def _follow(self, length: int, at: int, end: int) -> None:
        is_near = self._quote is not None and self._quote[0] < at <= self._quote[0] + WINDOW
        if length >= KEPT or (is_near and length != RESUMED):
            self._quote, self._may_resume = (at, end), True


def _token(tokens: Seq[int], guessed: Seq[int], at: int) -> int:
    """Of the text with the guesses behind it."""
    return tokens[at] if at < len(tokens) else guessed[at - len(tokens)]
