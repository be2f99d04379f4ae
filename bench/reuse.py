"""The most that a prefix cache can reuse: what a replay is judged by. Pure, over numbers of blocks.

A request *visits* the blocks of its prompt in order. Block i is *reused* when it and all before it are in the cache.
Requests come one at a time, in order of arrival; a cache holds ``capacity`` blocks. Three ideals:

``unlimited``     everything ever visited is kept.
``clairvoyant``   Belady's MIN (1966) with the future known: of all blocks seen, keep those whose next visit is nearest. Between
                  two requests *any* ``capacity`` blocks out of those kept and those just visited may be kept, and a request
                  needs no room for what is never visited again (the rest of its prompt, its answer). A block's beginning is
                  visited whenever the block is, so its next visit is never later; with ties broken towards the beginning
                  what MIN keeps is closed under prefixes, and its hits, a bound for caches of independent blocks, are reached
                  by a prefix cache. No cache of this capacity reuses more; one that does not know the future reuses less
                  whenever room is short.
``recent``        the same, but what was used least recently goes first, the end of a prefix before its beginning, and answers
                  take room like prompts: LRU without concurrency, i.e. without blocks held by requests that run.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Visit:
    """One request: the full blocks of its prompt in order, how many of them it could find cached (a prompt's last token is
    always computed, so a block that it ends is stored but never found), and how many more its answer fills."""

    blocks: tuple[int, ...]
    findable: int
    others: int = 0


class Numbering:
    """Numbers for blocks: equal exactly where the tokens and all tokens before them are."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def visit(self, prompt: Sequence[int], answer: int) -> Visit:
        """A request's visit. Of an answer the last token is never stored."""
        size, parent, found = self.block_size, -1, []
        for i in range(len(prompt) // size):
            parent = self._numbers.setdefault((parent, tuple(prompt[i * size : (i + 1) * size])), len(self._numbers))
            found.append(parent)
        return Visit(tuple(found), (len(prompt) - 1) // size, (len(prompt) + answer - 1) // size - len(found))


def unlimited(visits: Iterable[Visit]) -> int:
    """Blocks reused when nothing is ever forgotten."""
    seen: set[int] = set()
    reused = 0
    for visit in visits:
        reused += sum(block in seen for block in visit.blocks[: visit.findable])
        seen.update(visit.blocks)
    return reused


def clairvoyant(visits: Sequence[Visit], capacity: int) -> int:
    """Blocks reused at most, by anyone."""
    upcoming: list[list[int]] = []
    next_visit: dict[int, int] = {}
    for number in range(len(visits) - 1, -1, -1):
        upcoming.append([next_visit.get(block, _NEVER) for block in visits[number].blocks])
        next_visit.update(dict.fromkeys(visits[number].blocks[: visits[number].findable], number))
    upcoming.reverse()
    kept: dict[int, int] = {}  # block -> its next visit
    furthest: list[tuple[int, int, int]] = []  # a heap; entries whose block was visited since are stale
    reused = 0
    for visit, following in zip(visits, upcoming, strict=True):
        for depth, (block, at) in enumerate(zip(visit.blocks, following, strict=True)):
            was_kept = kept.pop(block, None) is not None
            reused += was_kept and depth < visit.findable
            if at != _NEVER:
                kept[block] = at
                heapq.heappush(furthest, (-at, -depth, block))
        while len(kept) > capacity:
            at, _, block = heapq.heappop(furthest)
            if kept.get(block) == -at:
                del kept[block]
    return reused


def recent(visits: Iterable[Visit], capacity: int) -> int:
    """Blocks reused by LRU over prefixes."""
    kept: OrderedDict[int, None] = OrderedDict()
    reused = answers = 0
    for visit in visits:
        for block in visit.blocks[: visit.findable]:
            if block not in kept:
                break
            reused += 1
        for _ in range(visit.others):
            answers -= 1
            kept[answers] = None
        for block in reversed(visit.blocks):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > capacity:
            kept.popitem(last=False)
    return reused
