"""Which requests are computed together, and when. Pure: time is an argument, and nothing here computes.

The rule of the dynamic mode: batch what arrived while the model was busy. When the model is free, wait for company
only while that is expected to pay: with ``k`` requests in hand, the next one expected ``gap`` seconds from now and
batches that take ``fixed + size * per_unit`` seconds, waiting delays each of the ``k`` by ``gap`` and the next one's
own computing, and saves the next one the batch that it would otherwise wait for, less the gap. So it pays while
``(k + 1) * gap + k * size * per_unit < fixed``. A lone client's next request comes after its answer, which takes
longer than ``fixed``: it is never held back. Nobody is held back beyond ``max_delay_s``, whatever was expected.

Requests of one bucket wait in one lane: four queues, one per priority class. A batch is one lane's, better classes
first, each in the order of arrival. Every so many batches the one who has waited longest goes first, whatever his
class, so none starves.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from inferd.predict.estimate import Arrivals, BatchCost
from inferd.predict.runtime import Item
from inferd.types import CLASSES, class_index

MAX_IDLE_LANES: Final = 256
"""Buckets whose arrivals are remembered while nobody waits in them."""

PATIENCE: Final = 3.0
"""Gaps without an arrival after which the next one is no longer expected."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds a batch. ``max_size`` is in the runtime's own measure (tokens); 0: no such limit."""

    mode: Literal["dynamic", "static", "off"] = "dynamic"
    max_rows: int = 1
    cuts: bool = True  # whether a request of more rows is computed in parts; else it is refused
    max_size: int = 0
    max_delay_s: float = 0.002
    preferred: tuple[int, ...] = ()  # rows
    latency_budget_s: float | None = None
    aging_every: int = 16


class Waiting:
    """One item in the batcher."""

    __slots__ = ("added_at", "item", "lane", "line", "number")

    def __init__(self, item: Item, lane: _Lane, added_at: float, number: int) -> None:
        self.item = item
        self.lane = lane
        self.added_at = added_at
        self.number = number
        self.line = class_index(item.priority)


class _Lane:
    """Who may be computed together."""

    __slots__ = ("arrivals", "bucket", "count", "num_urgent", "queues", "rows", "size")

    def __init__(self, bucket: object, memory_s: float) -> None:
        self.bucket = bucket
        self.queues: tuple[deque[Waiting], ...] = tuple(deque() for _ in CLASSES)
        self.arrivals = Arrivals(memory_s)
        self.count = self.rows = self.size = self.num_urgent = 0

    def forget(self, items: Sequence[Item]) -> None:
        """The counts of those that left their queues."""
        self.count -= len(items)
        for item in items:
            self.rows -= item.rows
            self.size -= item.size
            if not item.may_wait:
                self.num_urgent -= 1

    @property
    def heads(self) -> list[Waiting]:
        return [queue[0] for queue in self.queues if queue]

    @property
    def oldest(self) -> Waiting:
        """Not of an empty lane."""
        return min(self.heads, key=lambda waiting: waiting.number)


class Batcher:
    """``add`` and ``remove`` items, ``take`` a batch when ``due`` says so. One batch is computed at a time."""

    def __init__(self, limits: Limits, cost: BatchCost | None = None) -> None:
        self.limits = limits
        self.cost = cost if cost is not None else BatchCost()
        self._memory_s = max(0.05, 10.0 * limits.max_delay_s)
        self._lanes: dict[object, _Lane] = {}  # with somebody in them
        self._idle: OrderedDict[object, _Lane] = OrderedDict()
        self._by_id: dict[str, Waiting] = {}
        self._expiries: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()
        self._num_taken = 0
        self._preferred = tuple(sorted({size for size in limits.preferred if size <= limits.max_rows}))

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    # -- in and out -------------------------------------------------------------------------

    def add(self, item: Item, now: float) -> None:
        """The id must not be waiting already."""
        assert item.request_id not in self._by_id, f"{item.request_id} is already waiting"
        bucket = item.bucket
        lane = self._lanes.get(bucket)
        if lane is None:
            lane = self._idle.pop(bucket) if bucket in self._idle else _Lane(bucket, self._memory_s)
            self._lanes[bucket] = lane
        lane.arrivals.note(now)
        waiting = self._by_id[item.request_id] = Waiting(item, lane, now, next(self._numbers))
        lane.queues[waiting.line].append(waiting)
        lane.count += 1
        lane.rows += item.rows
        lane.size += item.size
        if not item.may_wait:
            lane.num_urgent += 1
        if item.expires_at is not None:
            heapq.heappush(self._expiries, (item.expires_at, waiting.number, item.request_id))

    def remove(self, request_id: str) -> Item | None:
        """Nobody wants it any more. None: it is not waiting."""
        waiting = self._by_id.pop(request_id, None)
        if waiting is None:
            return None
        lane = waiting.lane
        lane.queues[waiting.line].remove(waiting)
        lane.forget((waiting.item,))
        if not lane.count:
            self._retire(lane)
        return waiting.item

    def expire(self, now: float) -> list[Item]:
        """Those whose time has passed, taken out: they are never computed."""
        expired = []
        while self._expiries and self._expiries[0][0] <= now:
            _, number, request_id = heapq.heappop(self._expiries)
            found = self._by_id.get(request_id)
            if found is not None and found.number == number:
                expired.append(found.item)
                self.remove(request_id)
        return expired

    def _retire(self, lane: _Lane) -> None:
        del self._lanes[lane.bucket]
        self._idle[lane.bucket] = lane
        if len(self._idle) > MAX_IDLE_LANES:
            self._idle.popitem(last=False)

    # -- when -------------------------------------------------------------------------------

    def due(self, now: float) -> float | None:
        """When to look again (``now``: a batch is ready, or somebody has expired); None: when something arrives."""
        due = self._next_expiry()
        for lane in self._lanes.values():
            at = self._lane_due(lane, now)
            if at is not None and (due is None or at < due):
                due = at
        return None if due is None else max(due, now)

    def _next_expiry(self) -> float | None:
        expiries = self._expiries
        while expiries:
            at, number, request_id = expiries[0]
            found = self._by_id.get(request_id)
            if found is not None and found.number == number:
                return at
            heapq.heappop(expiries)
        return None

    def _lane_due(self, lane: _Lane, now: float) -> float | None:
        limits = self.limits
        if limits.mode == "off":
            return now
        is_full = lane.rows >= limits.max_rows or (limits.max_size and lane.size >= limits.max_size)
        if is_full:
            return now
        if limits.mode == "static":
            return None
        if lane.num_urgent or limits.max_delay_s <= 0.0 or (self._preferred and lane.rows >= self._preferred[0]):
            return now
        closes_at = self._closes_at(lane)
        if closes_at <= now:
            return now
        gap_s = lane.arrivals.gap_s(now)
        size = lane.size if limits.max_size else lane.rows
        if (lane.count + 1) * gap_s + size * self.cost.per_unit_s >= self.cost.fixed_s:
            return now
        return min(closes_at, lane.arrivals.last_at + PATIENCE * gap_s)

    def _closes_at(self, lane: _Lane) -> float:
        """When the window of the first of a lane ends: its delay is used up, or later it would be too late."""
        limits = self.limits
        size = lane.size if limits.max_size else lane.rows
        takes_s = self.cost.seconds(size + max(1, size // lane.count))
        if limits.latency_budget_s is not None and takes_s >= limits.latency_budget_s / 2.0:
            return -math.inf
        closes_at = min(waiting.added_at for waiting in lane.heads) + limits.max_delay_s
        expires_at = self._next_expiry()
        return closes_at if expires_at is None else min(closes_at, expires_at - takes_s)

    # -- who --------------------------------------------------------------------------------

    def take(self, now: float) -> list[Item]:
        """The next batch, taken out; empty where none is ready. Who has expired must have been taken out before."""
        ready = []
        for lane in self._lanes.values():
            at = self._lane_due(lane, now)
            if at is not None and at <= now:
                ready.append(lane)
        if not ready:
            return []
        self._num_taken += 1
        is_aged = self._num_taken % self.limits.aging_every == 0
        lane = ready[0] if len(ready) == 1 else _first(ready, by_age=is_aged)
        batch = self._fill(lane, lane.oldest.line if is_aged else 0)
        if not lane.count:
            self._retire(lane)
        return batch

    def _fill(self, lane: _Lane, first_line: int) -> list[Item]:
        """Better classes first, but for ``first_line``, which goes before all."""
        limits = self.limits
        max_rows, max_size = self._rows_for(lane.rows), limits.max_size
        if limits.latency_budget_s is not None:
            affordable = self._affordable(limits.latency_budget_s)
            max_rows, max_size = (max_rows, min(max_size, affordable)) if max_size else (min(max_rows, affordable), 0)
        batch: list[Item] = []
        rows = size = 0
        for line in (first_line, *range(len(CLASSES))):
            queue = lane.queues[line]
            while queue:
                item = queue[0].item
                fits = rows + item.rows <= max_rows and not (max_size and size + item.size > max_size)
                if batch and not fits:
                    break
                queue.popleft()
                del self._by_id[item.request_id]
                batch.append(item)
                rows += item.rows
                size += item.size
                if limits.mode == "off":
                    lane.forget(batch)
                    return batch
        lane.forget(batch)
        return batch

    def _affordable(self, budget_s: float) -> int:
        """The size of a batch that takes half of the budget; or one whose fixed time is half of it, where that is
        larger: smaller ones would waste more than half of what the model can do."""
        cost = self.cost
        if cost.per_unit_s <= 0.0:
            return 1 << 62
        return max(1, int(max(budget_s / 2.0 - cost.fixed_s, cost.fixed_s) / cost.per_unit_s))

    def _rows_for(self, waiting: int) -> int:
        """The largest preferred size that is reached; else as many as are allowed."""
        reached = [size for size in self._preferred if size <= waiting]
        return reached[-1] if reached else self.limits.max_rows


def _first(lanes: Iterable[_Lane], *, by_age: bool) -> _Lane:
    """The lane of the best class's first arrival, or of the first arrival at all."""
    if by_age:
        return min(lanes, key=lambda lane: lane.oldest.number)

    def rank(lane: _Lane) -> tuple[int, int]:
        head = lane.heads[0]
        return head.line, head.number

    return min(lanes, key=rank)
