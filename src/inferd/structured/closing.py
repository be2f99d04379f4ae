"""The end of an answer that must fit into its tokens: a plan of tokens that leads to an accepted end.

Such an answer always has a plan that is no longer than the tokens that are left. A token of the model is taken only
where a plan behind it fits too; otherwise the next token of the plan is taken. So the answer is complete within its
tokens, however the search for plans goes: where it finds none, the plan from before is followed.

The search goes from place to place of the answer. It tries what closes JSON texts, tokens that the grammar forces, the
rest of the plan from before, and texts of the grammar (``outline``); other tokens cost more. Its work is bounded by
counting what it does, so that its result is the same on every machine. The search before an answer, without which the
request is refused, has a limit of processor time too: one mask of some grammars takes longer than whole searches.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count, groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from inferd.structured.names import Place
from inferd.structured.place_behind import place_behind

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from inferd.structured.vocabulary import Vocabulary

Plan = tuple[int, ...]
"""Tokens that end an answer. The end token is the last one where the answer needs it."""

FIRST_FUEL: Final = 24_000  # for a plan of a whole answer
FIRST_SECONDS: Final = 2.0  # of processor time, for the same
LEAF_FUEL: Final = 24_000  # for the texts of all values with a pattern or a format together
NEXT_FUEL: Final = 1600  # for a plan behind one token of an answer
_VISIT_FUEL: Final = 8  # what the visit of a place takes; a hint that is tried takes 1
_LEVEL_TOKENS: Final = 6  # that it takes to close a level, about
_BYTES_FUEL: Final = 32  # bytes on the way to a place that take 1
_NO_LIMIT: Final = 1 << 30
_MOST_TRIED: Final = 24  # other tokens that are tried at a place
_MOST_TRIED_LATER: Final = 128  # and where those lead to no end
_MOST_SAVED: Final = 8  # tokens of a plan, by the usual spelling
_MOST_RESTS: Final = 3  # of the plan from before that are tried as a part of a new one
_MOST_KEPT: Final = 1024  # beginnings of names


class Position(NamedTuple):
    """A place in an answer, with the state of its grammar. A position is never changed."""

    matcher: LLMatcher
    place: Place | None  # for names that a JSON text must not repeat; None: there are none

    def behind(self, tokens: Plan, vocabulary: Vocabulary) -> Position | None:
        """The position behind these tokens; None: they may not follow."""
        place = self.place
        if place is not None:
            for number, token_id in enumerate(tokens):
                place = place_behind(place, token_id, vocabulary, self.matcher, tokens[:number])
                if place is None:
                    return None
        matcher = self.matcher.deep_copy()
        if matcher.try_consume_tokens(list(tokens)) < len(tokens) or matcher.is_error():
            return None
        return Position(matcher, place)

    @property
    def is_text(self) -> bool:
        """Whether it is inside of a string of a JSON text."""
        return self.place is not None and self.place.is_text


class Closing:
    """Finds plans for the answers of one grammar. Safe to use from several threads.

    ``hints``: texts that may be parts of an end in a JSON text. ``ends``: texts that end free text.
    """

    def __init__(self, vocabulary: Vocabulary, hints: Iterable[str] = (), ends: Iterable[str] = ()) -> None:
        self.vocabulary = vocabulary
        self.eos = min((i for i in vocabulary.eos_ids if i < vocabulary.size), default=None)
        self._ends = [self._tokens(text.encode()) for text in ends]
        self._hints = {text.encode(): self._tokens(text.encode()) for text in hints if text}
        self._values = list(self._hints.values())
        self._rests: dict[bytes, list[Plan]] = {}  # of the hints that begin with a name, by what of it is there

    def hints(self, place: Place | None) -> list[Plan]:
        """Hints that may follow at a place."""
        if place is None or place.beside is not None:
            return self._ends
        if not place.is_text:
            return self._values
        return [] if place.name is None else self._rests_of(b'"' + place.name)

    def _rests_of(self, begun: bytes) -> list[Plan]:
        rests = self._rests.get(begun)
        if rests is None:
            rests = [self._tokens(text[len(begun) :]) for text in self._hints if text.startswith(begun)]
            if len(self._rests) < _MOST_KEPT:
                self._rests[begun] = rests
        return rests

    def _tokens(self, text: bytes) -> Plan:
        return tuple(self.vocabulary.tokens.tokenize_bytes(text))

    def first(self, start: Position, fuel: int = FIRST_FUEL) -> tuple[Plan | None, int]:
        """A plan of a whole answer, and the fuel that is left; None: none is found within this fuel and
        ``FIRST_SECONDS``."""
        search = _Search(self, start, _NO_LIMIT, (), fuel)
        until_s = time.thread_time() + FIRST_SECONDS
        return search.run(lambda: time.thread_time() < until_s), search.fuel

    def next(self, position: Position, token_id: int, plan: Plan, most: int) -> Plan | None:
        """A plan of at most ``most`` tokens behind a token that may follow; None: none is found.

        ``plan``: the one before the token.
        """
        if token_id in self.vocabulary.eos_ids:
            return ()
        behind = position.behind((token_id,), self.vocabulary)
        if behind is None:
            return None
        end = self.end(behind, plan)
        if end is not None:
            return end if len(end) <= most else None
        return _Search(self, behind, most, plan, NEXT_FUEL).run()

    def end(self, position: Position, tokens: Plan) -> Plan | None:
        """The tokens, as far as they lead to an end, and the end token where it is needed; None: they lead to none."""
        tokens = tuple(i for i in tokens if i not in self.vocabulary.eos_ids)
        if position.matcher.is_stopped():
            return ()
        behind = position.behind(tokens, self.vocabulary)
        if behind is None:
            return None
        if behind.matcher.is_stopped():
            return tokens
        if self.eos is None or not behind.matcher.validate_tokens([self.eos]):
            return None
        return (*tokens, self.eos)


class _Visit(NamedTuple):
    """A place to be visited: ``tokens`` behind ``before``. The first fields are the order of the visits."""

    weight: int  # of the tokens on the way that close nothing and that nothing suggests
    length: int  # tokens on the way, and what the levels that are open are likely to take
    rank: int  # minus the number of bytes
    number: int
    before: Position
    tokens: Plan
    path: Plan  # from the start
    is_end: bool
    num_tried: int  # of the other tokens, at an earlier visit


class _Search:
    def __init__(self, closing: Closing, start: Position, most: int, known: Plan, fuel: int) -> None:
        self._closing = closing
        self._vocabulary = closing.vocabulary
        self._start = start
        self._most = most
        known = tuple(i for i in known if i not in closing.vocabulary.eos_ids)
        self._known_rests = [known[first:] for first in range(len(known))]
        self.fuel = fuel
        self._numbers = count()
        self._visits: list[_Visit] = []
        self._seen: set[object] = set()

    def run(self, has_time: Callable[[], bool] = lambda: True) -> Plan | None:
        self._add(None, self._start, ())
        while self._visits and self.fuel > 0 and has_time():
            visit = heapq.heappop(self._visits)
            self.fuel -= _VISIT_FUEL
            if visit.is_end:
                plan = self._spelled(visit.path)
                if len(plan) <= self._most:
                    return plan
                continue
            position = visit.before.behind(visit.tokens, self._vocabulary)
            if position is not None:
                self._visit(visit, position)
        return None

    def _add(
        self, visit: _Visit | None, before: Position, tokens: Plan, *, weight: int = 0, is_end: bool = False
    ) -> None:
        """``visit``: the one at ``before``; None: the search begins."""
        path = tokens if visit is None else visit.path + tokens
        if len(path) > self._most + _MOST_SAVED:
            return
        text = b"".join(map(self._vocabulary.token_bytes, tokens))
        self.fuel -= len(text) // _BYTES_FUEL
        heapq.heappush(
            self._visits,
            _Visit(
                weight + (0 if visit is None else visit.weight),
                len(path) + _LEVEL_TOKENS * _levels(before.place, text),
                -len(text) + (0 if visit is None else visit.rank),
                next(self._numbers),
                before,
                tokens,
                path,
                is_end,
                0,
            ),
        )

    def _visit(self, visit: _Visit, position: Position) -> None:
        matcher = position.matcher
        if visit.num_tried:
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)
            for token_id in self._vocabulary.ends.others(mask)[visit.num_tried : _MOST_TRIED_LATER]:
                self._add(visit, position, (token_id,), weight=1)
            return
        end = self._closing.end(position, ())
        if end is not None:
            self._add(visit, position, end, is_end=True)
            if not end:
                return
        forced = [i for i in matcher.compute_ff_tokens() if i not in self._vocabulary.eos_ids]
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)
        self._add_rests(visit, position, mask)
        if forced:
            self._add(visit, position, tuple(forced))
            return
        for hint in self._following(self._closing.hints(position.place), matcher, mask):
            self._add(visit, position, hint)
        key = visit.rank, bytes(mask), _kind(position.place)
        if key in self._seen or matcher.is_error():
            return
        self._seen.add(key)
        for token_id in self._vocabulary.ends.closing(mask, position.place):
            self._add(visit, position, (token_id,))
        others = self._vocabulary.ends.others(mask)
        for rank, token_id in enumerate(others[:_MOST_TRIED]):
            self._add(visit, position, (token_id,), weight=1 + 2 * rank)
        if len(others) > _MOST_TRIED:
            weight = visit.weight + 2 * _MOST_TRIED
            later = visit._replace(weight=weight, number=next(self._numbers), num_tried=_MOST_TRIED)
            heapq.heappush(self._visits, later)

    def _add_rests(self, visit: _Visit, position: Position, mask: np.ndarray) -> None:
        """Try to go on with the plan from before."""
        num_parts = 0
        for rest in self._following(self._known_rests, position.matcher, mask):
            end = self._closing.end(position, rest)
            if end is not None:
                self._add(visit, position, end, is_end=True)
                return
            if not position.is_text and num_parts < _MOST_RESTS:
                num_parts += 1
                self._add(visit, position, rest)

    def _following(self, plans: list[Plan], matcher: LLMatcher, mask: np.ndarray) -> Iterator[Plan]:
        """Those of the plans that may follow, as far as the fuel goes."""
        for plan in plans:
            if mask[plan[0] // 32] >> np.uint32(plan[0] % 32) & np.uint32(1):
                self.fuel -= 1
                if self.fuel < 0:
                    return
                if matcher.validate_tokens(list(plan)) == len(plan):
                    yield plan

    def _spelled(self, path: Plan) -> Plan:
        """The plan in the tokenizer's usual spelling, where that is shorter."""
        usual: list[int] = []
        for is_text, run in groupby(path, self._vocabulary.is_text):
            if is_text:
                text = b"".join(map(self._vocabulary.token_bytes, run))
                usual += self._vocabulary.tokens.tokenize_bytes(text)
            else:
                usual += run
        end = self._closing.end(self._start, tuple(usual))
        return path if end is None or len(end) >= len(path) else end


def _levels(place: Place | None, text: bytes) -> int:
    """About the number of lists and objects that are open behind a text."""
    if place is None:
        return 0
    if place.is_text and not text.startswith(b'"'):
        return len(place.objects)
    return len(place.objects) + sum(text.count(c) for c in (b"{", b"[")) - sum(text.count(c) for c in (b"}", b"]"))


def _kind(place: Place | None) -> object:
    """What tells places apart whose masks are the same."""
    return None if place is None else place._replace(begins=(), beside=b"" if place.beside is not None else None)
