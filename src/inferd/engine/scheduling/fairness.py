"""Orders waiting sequences: by class, then by what each tenant has received, then by arrival.

Fair share is the Virtual Token Counter (Sheng et al. 2024, "Fairness in Serving Large Language Models"). Each tenant's
counter grows by the tokens computed for it, divided by its weight, and the tenant with the least counter goes first.
The counter of a tenant that returns after a pause is raised to the least counter of the present ones, so pauses save up
nothing. Knows sequences by their labels. Does not know blocks or clocks.
"""

from __future__ import annotations

import heapq

from inferd.engine.scheduling.sequence import Sequence
from inferd.types import CLASSES, RANKS, class_index

Rank = tuple[int, float, int, int]  # class, arrival, count, index

OUTPUT_COST = 2.0
"""A generated token costs as much as so many of a prompt: it has a step of its own (Sheng et al. use 2)."""

_NUM_CLASSES = len(CLASSES)
_KEPT = 64  # counters of absent tenants that are kept before useless ones are searched for


BATCH = class_index(RANKS["batch"])


class Shares:
    """The counters of one class's tenants."""

    __slots__ = ("_counters", "_present")

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._present: dict[str, int] = {}  # tenant -> its sequences

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def enter(self, tenant: str) -> None:
        """Count one more sequence of the tenant, waiting or running."""
        if tenant in self._present:
            self._present[tenant] += 1
            return
        if self._present:
            least = min(self._counters[other] for other in self._present)
            self._counters[tenant] = max(self[tenant], least)
            if len(self._counters) > len(self._present) + _KEPT:
                # Counters at or below the least would be raised to it anyway.
                self._counters = {t: c for t, c in self._counters.items() if t in self._present or c > least}
        else:
            self._counters = {tenant: 0.0}  # the only tenant
        self._present[tenant] = 1

    def leave(self, tenant: str) -> None:
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]

    def charge(self, tenant: str, cost: float) -> None:
        """``cost``: tokens, weighted by kind and divided by the tenant's weight."""
        if tenant in self._counters:
            self._counters[tenant] += cost


class WaitingQueue:
    """The waiting sequences. ``discard`` is O(1): a discarded entry is dropped when it is reached."""

    __slots__ = ("_pushes", "_queues", "_tickets", "counts", "shares")

    def __init__(self, shares: list[Shares]) -> None:
        self.shares = shares
        self.counts = [0] * _NUM_CLASSES  # waiting, by class
        self._queues: list[dict[str, list[tuple[Rank, int, Sequence]]]] = [{} for _ in range(_NUM_CLASSES)]
        self._tickets: dict[Sequence, tuple[int, int]] = {}  # sequence -> (its entry, its class)
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def push(self, sequence: Sequence, rank: Rank) -> None:
        self._pushes += 1
        self._tickets[sequence] = (self._pushes, rank[0])
        self.counts[rank[0]] += 1
        heapq.heappush(self._queues[rank[0]].setdefault(sequence.tenant, []), (rank, self._pushes, sequence))

    def discard(self, sequence: Sequence) -> None:
        ticket = self._tickets.pop(sequence, None)
        if ticket is not None:
            self.counts[ticket[1]] -= 1

    @property
    def best_class(self) -> int:
        """The best class with a waiting sequence; beyond the last class where the queue is empty."""
        for place, count in enumerate(self.counts):
            if count:
                return place
        return _NUM_CLASSES

    def best(self) -> Sequence | None:
        """By class, then by the tenant's counter, then by arrival."""
        place = self.best_class
        if place == _NUM_CLASSES:
            return None
        shares = self.shares[place]
        return min(self._heads(place), key=lambda head: (shares[head[2].tenant], head[0]))[2]

    def first(self) -> Sequence | None:
        """By class, then by arrival, whatever the tenants' counters."""
        place = self.best_class
        return None if place == _NUM_CLASSES else min(self._heads(place))[2]

    def longest_below(self, place: int) -> Sequence | None:
        """The first arrival of all classes worse than ``place``."""
        heads = [head for worse in range(place + 1, _NUM_CLASSES) if self.counts[worse] for head in self._heads(worse)]
        return min(heads, key=lambda head: head[0][1:])[2] if heads else None

    def _heads(self, place: int) -> list[tuple[Rank, int, Sequence]]:
        """The first entry of each tenant."""
        found, empty = [], []
        for tenant, queue in self._queues[place].items():
            while queue and self._tickets.get(queue[0][2], (0, 0))[0] != queue[0][1]:
                heapq.heappop(queue)
            if queue:
                found.append(queue[0])
            else:
                empty.append(tenant)
        for tenant in empty:
            del self._queues[place][tenant]
        return found
