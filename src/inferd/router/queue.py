"""The bounded queue in front of a model: priority class, then arrival. Pure: time is an argument.

Requests that were in a worker when it died come back with the place their arrival gave them. They are
suspects: one of them may have killed it, so they go out one at a time.
"""

from __future__ import annotations

import heapq
import itertools
import math

from inferd.router.ticket import Ticket as Ticket

_SLACK = 64


class RequestQueue:
    """Waiting tickets. Removal is lazy: a ticket knows whether it waits."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._fresh: list[Ticket] = []
        self._suspects: list[Ticket] = []
        self._expiries: list[tuple[float, int, Ticket]] = []
        self._tie = itertools.count()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def is_full(self) -> bool:
        return self._num_waiting >= self._max_requests

    def push(self, ticket: Ticket) -> None:
        """Let a ticket wait. The bound is for who comes anew: ask ``is_full`` before."""
        assert not ticket.is_waiting
        ticket.is_waiting = True
        self._num_waiting += 1
        heapq.heappush(self._suspects if ticket.is_suspect else self._fresh, ticket)
        expires_at = min(ticket.expires_at, ticket.deadline_at)
        if expires_at < math.inf:
            heapq.heappush(self._expiries, (expires_at, next(self._tie), ticket))

    def pop(self, *, with_suspects: bool = True) -> Ticket | None:
        """The next ticket to be worked on; None: nobody waits, or only suspects while these are not wanted."""
        fresh, suspects = _head(self._fresh), _head(self._suspects)
        if suspects is None or not with_suspects:
            chosen, heap = fresh, self._fresh
        elif fresh is None or suspects < fresh:
            chosen, heap = suspects, self._suspects
        else:
            chosen, heap = fresh, self._fresh
        if chosen is not None:
            heapq.heappop(heap)
            self.remove(chosen)
        return chosen

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out. Idempotent."""
        if ticket.is_waiting:
            ticket.is_waiting = False
            self._num_waiting -= 1
            if len(self._fresh) + len(self._suspects) + len(self._expiries) > _SLACK + 4 * self._num_waiting:
                self._compact()

    def _compact(self) -> None:
        """Forget tickets that wait no more: a queue that stands still must not grow with every client that leaves."""
        for heap in (self._fresh, self._suspects):
            heap[:] = [ticket for ticket in heap if ticket.is_waiting]
            heapq.heapify(heap)
        self._expiries[:] = [expiry for expiry in self._expiries if expiry[2].is_waiting]
        heapq.heapify(self._expiries)

    def pop_expired(self, now: float) -> list[Ticket]:
        """Every ticket that has waited too long, in the order of expiry; they wait no more."""
        expired = []
        while self._expiries and (not self._expiries[0][2].is_waiting or self._expiries[0][0] <= now):
            ticket = heapq.heappop(self._expiries)[2]
            if ticket.is_waiting:
                self.remove(ticket)
                expired.append(ticket)
        return expired

    @property
    def next_expiry(self) -> float | None:
        """When ``pop_expired`` has something to do, at the earliest."""
        return self._expiries[0][0] if self._expiries else None

    def clear(self) -> list[Ticket]:
        """Take everything out, in order."""
        waiting = sorted(ticket for ticket in self._fresh + self._suspects if ticket.is_waiting)
        for ticket in waiting:
            self.remove(ticket)
        return waiting


def _head(heap: list[Ticket]) -> Ticket | None:
    while heap and not heap[0].is_waiting:
        heapq.heappop(heap)
    return heap[0] if heap else None
