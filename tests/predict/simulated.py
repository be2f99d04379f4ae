"""A model on a simulated clock: arrivals, a batcher, and batches that take as long as they are said to."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from inferd.predict.batcher import Batcher
from inferd.predict.runtime import Item

Cost = Callable[[int], float]
"""Seconds of a batch of so many rows."""


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


class Simulation:
    """``batches`` and ``latencies`` of everything that was answered, in order."""

    def __init__(self, batcher: Batcher, cost: Cost) -> None:
        self.batcher = batcher
        self.cost = cost
        self.now = 0.0
        self.batches: list[list[Item]] = []
        self.latencies: list[float] = []
        self.held_s: list[float] = []  # while the model was free, for each item
        self._arrivals: list[tuple[float, int, Item]] = []
        self._arrived_at: dict[str, float] = {}
        self._number = 0
        self._free_at = 0.0

    def arrive(self, at: float, **fields: object) -> None:
        self._number += 1
        item = Item(request_id=str(self._number), inputs={}, **fields)  # type: ignore[arg-type]
        heapq.heappush(self._arrivals, (at, self._number, item))

    def run(self, until: float, again: Callable[[float], Iterable[float]] = lambda now: ()) -> Simulation:
        """``again``: when the clients of an answer that comes now send their next requests."""
        while self.now < until:
            due = self.batcher.due(self.now)
            if due is not None and due <= self.now:
                self._compute(again)
                continue
            next_at = self._arrivals[0][0] if self._arrivals else None
            if due is None and next_at is None:
                break
            self.now = min(at for at in (due, next_at) if at is not None)
            self._admit(self.now)
        return self

    def _admit(self, until: float) -> None:
        """Requests that arrived during a batch are put into the batcher right after it, as a worker does."""
        while self._arrivals and self._arrivals[0][0] <= until:
            at, _, item = heapq.heappop(self._arrivals)
            self._arrived_at[item.request_id] = at
            self.batcher.add(item, self.now)

    def _compute(self, again: Callable[[float], Iterable[float]]) -> None:
        batch = self.batcher.next_batch(self.now)
        assert batch, "due, and nothing to take"
        rows = sum(item.rows for item in batch)
        seconds = self.cost(rows)
        for item in batch:
            self.held_s.append(self.now - max(self._free_at, self._arrived_at[item.request_id]))
        self.now += seconds
        self._free_at = self.now
        self.batcher.cost.observe(rows, seconds)
        self.batches.append(batch)
        for item in batch:
            self.latencies.append(self.now - self._arrived_at.pop(item.request_id))
            for at in again(self.now):
                self.arrive(at)
        self._admit(self.now)

    @property
    def throughput(self) -> float:
        return len(self.latencies) / self.now
