"""The most that a prefix cache can reuse: what a replay is judged by. Pure, over numbers of blocks.

A request *visits* the blocks of its prompt in order. Block i is *reused* when it and all before it are in the cache.
Requests come one at a time, in order of arrival; a cache holds ``capacity`` blocks. Four ideals:

``unlimited``     everything ever visited is kept.
``clairvoyant``   Belady's MIN (1966) with the future known: of all blocks seen, keep those whose next visit is nearest. Between
                  two requests *any* ``capacity`` blocks out of those kept and those just visited may be kept, and a request
                  needs no room for what is never visited again (the rest of its prompt, its answer). A block's beginning is
                  visited whenever the block is, so its next visit is never later; with ties broken towards the beginning
                  what MIN keeps is closed under prefixes, and its hits, a bound for caches of independent blocks, are reached
                  by a prefix cache. No cache of this capacity reuses more; one that does not know the future reuses less
                  whenever room is short.
``statistical``   what can be hoped for without foresight: the best that a rule can do which decides by how often a block was asked for
                  and how long ago, and was told beforehand how likely each is to be asked for at which age. The room is respected on
                  average over the trace only (and no more is kept than there has been), so it is a bound for such rules.
``recent``        the clairvoyant one's cache, but what was used least recently goes first, the end of a prefix before its beginning, and answers
                  take room like prompts: LRU without concurrency, i.e. without blocks held by requests that run.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
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


@dataclass(frozen=True, slots=True)
class Stay:
    """A block from one visit to the next or to the trace's end: blocks visited meanwhile, and whether it is found then."""

    uses: int  # visits so far
    length: int
    is_found: bool


def stays(visits: Iterable[Visit], most_uses: int) -> tuple[list[Stay], list[int]]:
    """Every stay of a block, and after every request how many blocks visited so far there are, for each block it visited."""
    found: list[Stay] = []
    last: dict[int, int] = {}
    uses: Counter[int] = Counter()
    distinct: list[int] = []
    now = answers = 0
    for visit in visits:
        for depth, block in enumerate(visit.blocks):
            if block in last:
                found.append(Stay(min(uses[block], most_uses), now - last[block], depth < visit.findable))
        now += len(visit.blocks) + visit.others
        for block in visit.blocks:
            uses[block] += 1
            last[block] = now
        last |= {-1 - answers - i: now for i in range(visit.others)}
        answers += visit.others
        distinct += [len(last)] * (len(visit.blocks) + visit.others)
    found += [Stay(min(uses[block], most_uses) or 1, now - at, is_found=False) for block, at in last.items()]
    return found, distinct


def kept_until(group: Iterable[Stay]) -> list[tuple[float, float]]:
    """(time kept, blocks found) for every age at which the group's blocks might be given up."""
    ordered = sorted(group, key=lambda stay: stay.length)
    points, before, reused = [(0.0, 0.0)], 0.0, 0.0
    for i, stay in enumerate(ordered):
        before += stay.length
        reused += stay.is_found
        if stay.is_found:
            points.append((before + stay.length * (len(ordered) - 1 - i), reused))
    return points


def statistical(visits: Sequence[Visit], capacity: int, most_uses: int = 4) -> float:
    """Blocks reused at most by a rule that knows uses, ages and their statistics.

    For each number of uses an age to give up, or a mixture of two: a linear program with one constraint. It is solved by taking,
    from the concave hulls of ``kept_until``, the pieces with most reuse per time first.
    """
    found, distinct = stays(visits, most_uses)
    room = float(sum(min(capacity, number) for number in distinct))
    pieces: list[tuple[float, float]] = []  # (time kept, blocks found)
    for uses in range(1, most_uses + 1):
        hull: list[tuple[float, float]] = []
        for time, reused in kept_until(stay for stay in found if stay.uses == uses):
            while hull and (time <= hull[-1][0] or (len(hull) > 1 and _is_under(hull[-2], hull[-1], (time, reused)))):
                hull.pop()
            hull.append((time, reused))
        pieces += [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(hull)]
        pieces.append((0.0, hull[0][1]))
    total = 0.0
    for time, reused in sorted(pieces, key=lambda piece: piece[0] / piece[1] if piece[1] else 0.0):
        if time > room:
            return total + reused * room / time
        total, room = total + reused, room - time
    return total


def _is_under(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether ``b`` is not above the line from ``a`` to ``c``."""
    return (b[1] - a[1]) * (c[0] - a[0]) <= (c[1] - a[1]) * (b[0] - a[0])


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
