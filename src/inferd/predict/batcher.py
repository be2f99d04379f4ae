"""Which requests are computed together, and when. Pure: time is an argument, and nothing here computes.

The dynamic mode batches what arrived while the model was busy. When the model is free, it waits for another request
only while that is expected to pay. Let ``k`` requests be waiting, the next one be expected in ``gap`` seconds, and a
batch take ``fixed + size * per_unit`` seconds. Waiting delays each of the ``k`` requests by ``gap`` and by the
computing of the next one. It saves the next one a wait for a whole batch, less the gap. So it pays while ``(k + 1) *
gap + k * size * per_unit < fixed``. The next request of a lone client comes after its answer, later than ``fixed``, so
a lone client is never delayed. No request is delayed by more than ``max_delay_s``.

Items of one bucket may be computed together. Each bucket has four queues, one per priority class. A batch is from one
bucket: better classes first, each in the order of arrival. Every ``aging_every`` batches the item that has waited
longest goes first, of any class, so that no class starves.
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

MAX_IDLE_BUCKETS: Final = 256
"""Buckets whose arrivals are remembered while no item waits in them."""

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
    """One item in the batcher, with its place: bucket, priority class and number of arrival."""

    __slots__ = ("added_at", "bucket", "class_index", "item", "number")

    def __init__(self, item: Item, bucket: _Bucket, added_at: float, number: int) -> None:
        self.item = item
        self.bucket = bucket
        self.added_at = added_at
        self.number = number
        self.class_index = class_index(item.priority)


class _Bucket:
    """The waiting items that may be computed together, by priority class."""

    __slots__ = ("arrivals", "count", "key", "num_urgent", "queues", "rows", "size")

    def __init__(self, key: object, memory_s: float) -> None:
        self.key = key
        self.queues: tuple[deque[Waiting], ...] = tuple(deque() for _ in CLASSES)
        self.arrivals = Arrivals(memory_s)
        self.count = self.rows = self.size = self.num_urgent = 0

    def forget(self, items: Sequence[Item]) -> None:
        """Subtract the counts of items that left their queues."""
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
        """The item that has waited longest. Must not be called for an empty bucket."""
        return min(self.heads, key=lambda waiting: waiting.number)


class Batcher:
    """``add`` and ``remove`` items, ``next_batch`` when ``due`` says so. One batch is computed at a time."""

    def __init__(self, limits: Limits, cost: BatchCost | None = None) -> None:
        self.limits = limits
        self.cost = cost if cost is not None else BatchCost()
        self._memory_s = max(0.05, 10.0 * limits.max_delay_s)
        self._buckets: dict[object, _Bucket] = {}  # with items in them
        self._idle: OrderedDict[object, _Bucket] = OrderedDict()
        self._by_id: dict[str, Waiting] = {}
        self._expiries: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()
        self._num_batches = 0
        self._preferred = tuple(sorted({size for size in limits.preferred if size <= limits.max_rows}))

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    @property
    def has_others(self) -> bool:
        """Whether an item waits that is no batch work."""
        return any(any(bucket.queues[:-1]) for bucket in self._buckets.values())

    # -- in and out -------------------------------------------------------------------------

    def add(self, item: Item, now: float) -> None:
        """The id must not be waiting already."""
        assert item.request_id not in self._by_id, f"{item.request_id} is already waiting"
        key = item.bucket
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._idle.pop(key) if key in self._idle else _Bucket(key, self._memory_s)
            self._buckets[key] = bucket
        bucket.arrivals.observe(now)
        waiting = self._by_id[item.request_id] = Waiting(item, bucket, now, next(self._numbers))
        bucket.queues[waiting.class_index].append(waiting)
        bucket.count += 1
        bucket.rows += item.rows
        bucket.size += item.size
        if not item.may_wait:
            bucket.num_urgent += 1
        if item.expires_at is not None:
            heapq.heappush(self._expiries, (item.expires_at, waiting.number, item.request_id))

    def remove(self, request_id: str) -> Item | None:
        """Take out an item that is not to be computed. None: it is not waiting."""
        waiting = self._by_id.pop(request_id, None)
        if waiting is None:
            return None
        bucket = waiting.bucket
        bucket.queues[waiting.class_index].remove(waiting)
        bucket.forget((waiting.item,))
        if not bucket.count:
            self._retire(bucket)
        return waiting.item

    def expire(self, now: float) -> list[Item]:
        """Take out the items whose deadline has passed."""
        expired = []
        while self._expiries and self._expiries[0][0] <= now:
            _, number, request_id = heapq.heappop(self._expiries)
            found = self._by_id.get(request_id)
            if found is not None and found.number == number:
                expired.append(found.item)
                self.remove(request_id)
        return expired

    def _retire(self, bucket: _Bucket) -> None:
        del self._buckets[bucket.key]
        self._idle[bucket.key] = bucket
        if len(self._idle) > MAX_IDLE_BUCKETS:
            self._idle.popitem(last=False)

    # -- when -------------------------------------------------------------------------------

    def due(self, now: float) -> float | None:
        """When to call ``expire`` and ``next_batch``: ``now``, when a batch is ready or an item has expired, or later;
        None: when something arrives."""
        due = self._next_expiry()
        for bucket in self._buckets.values():
            at = self._bucket_due(bucket, now)
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

    def _bucket_due(self, bucket: _Bucket, now: float) -> float | None:
        limits = self.limits
        if limits.mode == "off":
            return now
        is_full = bucket.rows >= limits.max_rows or (limits.max_size and bucket.size >= limits.max_size)
        if is_full:
            return now
        if limits.mode == "static":
            return None
        if bucket.num_urgent or limits.max_delay_s <= 0.0 or (self._preferred and bucket.rows >= self._preferred[0]):
            return now
        closes_at = self._closes_at(bucket)
        if closes_at <= now:
            return now
        gap_s = bucket.arrivals.gap_s(now)
        size = bucket.size if limits.max_size else bucket.rows
        if (bucket.count + 1) * gap_s + size * self.cost.per_unit_s >= self.cost.fixed_s:
            return now
        return min(closes_at, bucket.arrivals.last_at + PATIENCE * gap_s)

    def _closes_at(self, bucket: _Bucket) -> float:
        """When the batch of a bucket must begin: its first item's delay is used up, or the next deadline would pass."""
        limits = self.limits
        size = bucket.size if limits.max_size else bucket.rows
        takes_s = self.cost.seconds(size + max(1, size // bucket.count))
        if limits.latency_budget_s is not None and takes_s >= limits.latency_budget_s / 2.0:
            return -math.inf
        closes_at = min(waiting.added_at for waiting in bucket.heads) + limits.max_delay_s
        expires_at = self._next_expiry()
        return closes_at if expires_at is None else min(closes_at, expires_at - takes_s)

    # -- which --------------------------------------------------------------------------------

    def next_batch(self, now: float) -> list[Item]:
        """Take out the next batch; empty when none is ready. ``expire`` must have been called with the same time."""
        ready = []
        for bucket in self._buckets.values():
            at = self._bucket_due(bucket, now)
            if at is not None and at <= now:
                ready.append(bucket)
        if not ready:
            return []
        self._num_batches += 1
        is_aged = self._num_batches % self.limits.aging_every == 0
        bucket = ready[0] if len(ready) == 1 else _first(ready, by_age=is_aged)
        batch = self._fill(bucket, bucket.oldest.class_index if is_aged else 0)
        if not bucket.count:
            self._retire(bucket)
        return batch

    def _fill(self, bucket: _Bucket, first_class: int) -> list[Item]:
        """Take a batch out of a bucket: ``first_class`` first, then the other classes, better ones first."""
        limits = self.limits
        max_rows, max_size = self._rows_for(bucket.rows), limits.max_size
        if limits.latency_budget_s is not None:
            affordable = self._affordable(limits.latency_budget_s)
            max_rows, max_size = (max_rows, min(max_size, affordable)) if max_size else (min(max_rows, affordable), 0)
        batch: list[Item] = []
        rows = size = 0
        for place in (first_class, *range(len(CLASSES))):
            queue = bucket.queues[place]
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
                    bucket.forget(batch)
                    return batch
        bucket.forget(batch)
        return batch

    def _affordable(self, budget_s: float) -> int:
        """The size of a batch that takes half of the budget, or of one whose fixed time is half of its time, if that is
        larger: a smaller one would waste more than half of what the model can do."""
        cost = self.cost
        if cost.per_unit_s <= 0.0:
            return 1 << 62
        return max(1, int(max(budget_s / 2.0 - cost.fixed_s, cost.fixed_s) / cost.per_unit_s))

    def _rows_for(self, waiting: int) -> int:
        """The largest preferred size that the waiting rows reach; otherwise the limit."""
        reached = [size for size in self._preferred if size <= waiting]
        return reached[-1] if reached else self.limits.max_rows


def _first(buckets: Iterable[_Bucket], *, by_age: bool) -> _Bucket:
    """The bucket with the oldest item: of the best class, or with ``by_age`` of all."""
    if by_age:
        return min(buckets, key=lambda bucket: bucket.oldest.number)

    def rank(bucket: _Bucket) -> tuple[int, int]:
        head = bucket.heads[0]
        return head.class_index, head.number

    return min(buckets, key=rank)
