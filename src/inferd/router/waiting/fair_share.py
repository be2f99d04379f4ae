"""One priority class of a queue, whose tenants share it by weight. Pure.

Start-time fair queueing (Goyal, Vin, Cheng 1996) over estimated tokens. The estimates are corrected by the tokens that
a request really cost, as in the virtual token counter of Sheng et al. ("Fairness in Serving Large Language Models",
2024). Each tenant has a start tag: the tokens that it was given, divided by its weight. The tenant with the least start
tag is next, and its tag grows by tokens / weight. A tenant without waiting requests begins again at the least tag of
the others, so that it earns no credit by silence. A tag above that is kept, as a debt.

The law (tests/router/waiting/test_fair_share.py) holds over any time in which the tenants f and g both have waiting
requests that could be taken. W is the sum of the estimated tokens taken from a tenant, l its largest request, w its
weight. Then ``|W_f/w_f - W_g/w_g| <= l_f/w_f + l_g/w_g``; corrections shift this by their own size. Proof: f is taken
from only while start_f <= start_g, so start_f <= start_g + l_f/w_f always, and likewise for g. W_f/w_f is the growth of
start_f. So a request waits, within its class, at most for what the other tenants may be given until their tags pass
the tag of its tenant.

Requests that return, because their replica was lost or refused them, are charged already: they go first, by arrival.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Final

from inferd.router.ticket import Ticket
from inferd.types import Request

LOOK_AHEAD: Final = 8
"""Requests of a tenant that are offered to ``accepts``, the oldest first, before those of the next tenant."""

_SLACK: Final = 64
_MAX_IDLE: Final = 4096  # tenants without waiting requests whose debt is kept

Accepts = Callable[[Ticket], bool]


class QueueEntry:
    """A waiting ticket. A ticket that returns to the queue gets a new entry."""

    __slots__ = ("flow", "is_live", "ticket")

    def __init__(self, ticket: Ticket, flow: Flow | None = None) -> None:
        self.ticket = ticket
        self.flow = flow  # None: a returned request
        self.is_live = True

    @property
    def number(self) -> int:
        """The order of the ticket's arrival."""
        return self.ticket.number


class Flow:
    """The waiting requests of one tenant in a class, and the tenant's start tag."""

    __slots__ = ("entries", "num_live", "stamp", "start", "weight")

    def __init__(self, start: float) -> None:
        self.start = start
        self.weight = 0.0  # of the first waiting request; 0 without waiting requests
        self.entries: deque[QueueEntry] = deque()  # by arrival; some are no longer live
        self.num_live = 0
        self.stamp = 0  # of its valid entry in the heap of the class; 0: it has none

    def head(self) -> QueueEntry:
        """The oldest waiting request; there must be one."""
        while not self.entries[0].is_live:
            self.entries.popleft()
        return self.entries[0]

    def first(self, accepts: Accepts | None) -> QueueEntry | None:
        """The oldest request that ``accepts`` allows, among ``LOOK_AHEAD``; None: there is none."""
        head = self.head()
        if accepts is None or accepts(head.ticket):
            return head
        if self.num_live == 1:
            return None
        live = (entry for entry in self.entries if entry.is_live)
        ahead = itertools.islice(live, 1, LOOK_AHEAD)
        return next((entry for entry in ahead if accepts(entry.ticket)), None)

    def remove(self, entry: QueueEntry) -> None:
        """Remove an entry. Dead entries in the middle are cleared when they outnumber the live ones."""
        self.num_live -= 1
        if self.entries[0] is entry:
            self.entries.popleft()
        elif len(self.entries) > _SLACK + 2 * self.num_live:
            self.entries = deque(other for other in self.entries if other.is_live)


_HeapEntry = tuple[float, int, int, Flow]
"""A turn of a tenant: the start tag, the number of its oldest ticket, the stamp that makes the turn valid, the flow."""


class FairShare:
    """The tickets of one class."""

    __slots__ = (
        "_flows",
        "_heap",
        "_num_waiting",
        "_returned",
        "_stamps",
        "_suspects",
        "_sweep_at",
        "_virtual",
        "_weights",
        "num_live",
    )

    def __init__(self) -> None:
        self.num_live = 0
        self._virtual = 0.0  # the start tag of the tenant served last: where a tenant begins if no other waits
        self._num_waiting = 0  # tenants with waiting requests
        self._weights = 0.0  # the sum of their weights
        self._flows: dict[str, Flow] = {}
        self._heap: list[_HeapEntry] = []
        self._sweep_at = _SLACK
        self._stamps = itertools.count(1)
        self._returned: list[QueueEntry] = []
        self._suspects: list[QueueEntry] = []

    def push(self, ticket: Ticket) -> QueueEntry:
        """Add a ticket; a new one of its tenant, or a returned one."""
        self.num_live += 1
        if ticket.is_charged:
            entry = QueueEntry(ticket)
            insort(self._suspects if ticket.worker_deaths else self._returned, entry, key=attrgetter("number"))
            return entry
        request = ticket.request
        flow = self._flows.get(request.tenant)
        if flow is None:
            self._forget_idle()
            flow = self._flows[request.tenant] = Flow(self._least_start())
        entry = QueueEntry(ticket, flow)
        flow.entries.append(entry)
        if not flow.num_live:
            flow.start = max(flow.start, self._least_start())
            flow.num_live = 1
            flow.weight = request.weight
            self._weights += flow.weight
            self._num_waiting += 1
            self._schedule(flow)
        else:
            flow.num_live += 1
        return entry

    def pop(self, accepts: Accepts | None, with_suspects: bool) -> QueueEntry | None:
        """Remove and return the next request that ``accepts`` allows; None: there is none."""
        entry = self._returned_entry(accepts, with_suspects)
        if entry is not None:
            self.remove(entry)
            return entry
        skipped: list[_HeapEntry] = []
        flow = entry = None
        while entry is None and (flow := self._first()) is not None:
            skipped.append(heapq.heappop(self._heap))
            entry = flow.first(accepts)
        if entry is None or flow is None:
            self._heap = skipped  # every turn, still in the order of the heap
            return None
        skipped.pop()
        self._virtual = flow.start
        flow.stamp = 0
        self._charge(flow, entry.ticket)
        self.remove(entry)
        for *_, other in skipped:
            other.start = max(other.start, self._virtual)  # waiting for a certain replica earns no credit
            self._schedule(other)
        return entry

    def remove(self, entry: QueueEntry) -> None:
        """Remove an entry that is still waiting. Its tenant is not charged for it."""
        entry.is_live = False
        self.num_live -= 1
        flow = entry.flow
        if flow is not None:
            flow.remove(entry)
            if flow.num_live and not flow.stamp:
                self._schedule(flow)
            elif not flow.num_live:
                flow.entries.clear()
                flow.stamp = 0
                self._weights -= flow.weight
                self._num_waiting -= 1
                flow.weight = 0.0
                if not self.num_live:
                    self._weights = 0.0  # without the rounding errors of the sum
                    self._virtual = max(self._virtual, flow.start)  # the end of a busy time
        else:
            (self._suspects if entry.ticket.worker_deaths else self._returned).remove(entry)

    def num_ahead(self, request: Request) -> int:
        """How many waiting requests are taken before a new one, at most, if requests cost alike and its tenant has no
        debt.

        These are the returned requests, its tenant's, and as many of each other tenant's as the law above allows.
        """
        flow = self._flows.get(request.tenant)
        own, own_weight = (flow.num_live, flow.weight) if flow is not None else (0, 0.0)
        back = len(self._returned) + len(self._suspects)
        num_rivals = self._num_waiting - (own > 0)
        share = math.ceil(own * max(0.0, self._weights - own_weight) / request.weight) + num_rivals
        return back + own + min(self.num_live - back - own, share)

    def settle(self, request: Request, num_tokens: int) -> None:
        """Correct the charge for a request that was taken, by the tokens that it really cost."""
        excess = num_tokens - _estimate(request)
        flow = self._flows.get(request.tenant)
        if flow is None:
            if excess <= 0:
                return
            self._forget_idle()
            flow = self._flows[request.tenant] = Flow(self._least_start())
        flow.start += excess / request.weight
        if flow.num_live:
            self._schedule(flow)

    def youngest_first(self) -> Iterator[QueueEntry]:
        """Requests that were never taken: those of the tenant with the most of them first, the youngest first.

        The queue must not change during the iteration.
        """
        for flow in sorted(self._flows.values(), key=lambda flow: -flow.num_live):
            yield from (entry for entry in reversed(flow.entries) if entry.is_live)

    def _charge(self, flow: Flow, ticket: Ticket) -> None:
        request = ticket.request
        flow.start += _estimate(request) / request.weight
        ticket.is_charged = True

    def _returned_entry(self, accepts: Accepts | None, with_suspects: bool) -> QueueEntry | None:
        """The oldest acceptable one of the returned requests."""
        returned = _acceptable(self._returned, accepts)
        suspect = _acceptable(self._suspects, accepts) if with_suspects else None
        if returned is None or suspect is None:
            return returned or suspect
        return min(returned, suspect, key=attrgetter("number"))

    def _schedule(self, flow: Flow) -> None:
        flow.stamp = next(self._stamps)
        heapq.heappush(self._heap, (flow.start, flow.head().ticket.number, flow.stamp, flow))
        if len(self._heap) > _SLACK + 4 * len(self._flows):
            self._heap = [turn for turn in self._heap if turn[3].stamp == turn[2]]
            heapq.heapify(self._heap)

    def _first(self) -> Flow | None:
        """The tenant whose turn it is."""
        heap = self._heap
        while heap:
            _, _, stamp, flow = heap[0]
            if flow.stamp == stamp:
                return flow
            heapq.heappop(heap)
        return None

    def _least_start(self) -> float:
        """The start tag with which a tenant begins."""
        first = self._first()
        return first.start if first is not None else self._virtual

    def _forget_idle(self) -> None:
        """Forget tenants without waiting requests and debt; above ``_MAX_IDLE`` also those with the least debt."""
        if len(self._flows) < self._sweep_at:
            return
        least = self._least_start()
        idle = [(flow.start, tenant) for tenant, flow in self._flows.items() if not flow.num_live]
        idle.sort()
        for number, (start, tenant) in enumerate(idle):
            if start <= least or len(idle) - number > _MAX_IDLE:
                del self._flows[tenant]
        self._sweep_at = _SLACK + 2 * len(self._flows)


def _estimate(request: Request) -> int:
    """The estimated cost in tokens, at least 1: a tenant whose requests cost nothing would always be next."""
    return max(1, request.num_tokens)


def _acceptable(entries: list[QueueEntry], accepts: Accepts | None) -> QueueEntry | None:
    if not entries:
        return None
    if accepts is None:
        return entries[0]
    return next((entry for entry in entries[:LOOK_AHEAD] if accepts(entry.ticket)), None)
