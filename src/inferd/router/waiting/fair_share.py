"""One priority class of a queue: its tenants share it by weight. Pure.

Start-time fair queueing (Goyal, Vin, Cheng 1996) over estimated tokens, corrected by what a request turned
out to cost (as the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models",
2024). Each tenant has a start tag: the work it was given, by its weight. The tenant with the least start tag
goes next, and its tag grows by tokens / weight. A tenant that had nothing waiting begins where the least of
the others stands, so silence earns no credit; what it still owes is kept.

The law (tests/router/waiting/test_fair_share.py): over any time in which the tenants f and g both have requests
waiting that could be taken, with W the estimated tokens taken from each, l the largest of its requests and w
its weight, ``|W_f/w_f - W_g/w_g| <= l_f/w_f + l_g/w_g``; corrections shift it by their own size. Proof: f
is only taken from while start_f <= start_g, so start_f <= start_g + l_f/w_f always, and likewise for g; W_f/w_f is
how far start_f moved. So a request waits, within its class, at most for what the other tenants may be given
until their tags pass its own.

Requests that come back (their replica was lost or refused them) are paid for: they go first, by arrival.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from inferd.router.ticket import Ticket
from inferd.types import Request

LOOK_AHEAD: Final = 8
"""So many of a tenant's requests are offered to ``accepts``, the oldest first, before the next tenant's."""

_SLACK: Final = 64
_MAX_IDLE: Final = 4096  # tenants with nothing waiting whose debt is remembered

Accepts = Callable[[Ticket], bool]


class Place:
    """Where a ticket waits. One per stay: a ticket that comes back gets another."""

    __slots__ = ("flow", "is_live", "ticket")

    def __init__(self, ticket: Ticket, flow: Flow | None = None) -> None:
        self.ticket = ticket
        self.flow = flow  # None: among those that came back
        self.is_live = True

    def __lt__(self, other: Place) -> bool:
        return self.ticket.number < other.ticket.number


class Flow:
    """One tenant's part of a class."""

    __slots__ = ("num_live", "places", "stamp", "start", "weight")

    def __init__(self, start: float) -> None:
        self.start = start
        self.weight = 0.0  # while it has requests waiting: that of the first of them
        self.places: deque[Place] = deque()  # by arrival; some left meanwhile
        self.num_live = 0
        self.stamp = 0  # of its one valid entry in the class's heap

    def head(self) -> Place:
        while not self.places[0].is_live:
            self.places.popleft()
        return self.places[0]

    def first(self, accepts: Accepts | None) -> Place | None:
        head = self.head()
        if accepts is None or accepts(head.ticket):
            return head
        if self.num_live == 1:
            return None
        live = (place for place in self.places if place.is_live)
        ahead = itertools.islice(live, 1, LOOK_AHEAD)
        return next((place for place in ahead if accepts(place.ticket)), None)

    def drop(self, place: Place) -> None:
        """Take one out. What is left of those that went from the middle never outnumbers the others for long."""
        self.num_live -= 1
        if self.places[0] is place:
            self.places.popleft()
        elif len(self.places) > _SLACK + 2 * self.num_live:
            self.places = deque(other for other in self.places if other.is_live)


_Entry = tuple[float, int, int, Flow]
"""A turn: the start tag, its head's number, the stamp that makes it valid."""


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
        self._virtual = 0.0  # the start tag of who was served last: where a newcomer begins if nobody waits
        self._num_waiting = 0  # tenants with requests waiting
        self._weights = 0.0  # of these together
        self._flows: dict[str, Flow] = {}
        self._heap: list[_Entry] = []
        self._sweep_at = _SLACK
        self._stamps = itertools.count(1)
        self._returned: list[Place] = []
        self._suspects: list[Place] = []

    def push(self, ticket: Ticket) -> Place:
        self.num_live += 1
        if ticket.is_charged:
            place = Place(ticket)
            insort(self._suspects if ticket.is_suspect else self._returned, place)
            return place
        request = ticket.request
        flow = self._flows.get(request.tenant)
        if flow is None:
            self._sweep()
            flow = self._flows[request.tenant] = Flow(self._least())
        place = Place(ticket, flow)
        flow.places.append(place)
        if not flow.num_live:
            flow.start = max(flow.start, self._least())
            flow.num_live = 1
            flow.weight = request.weight
            self._weights += flow.weight
            self._num_waiting += 1
            self._line_up(flow)
        else:
            flow.num_live += 1
        return place

    def take(self, accepts: Accepts | None, with_suspects: bool) -> Place | None:
        """The next that may go, taken out; None: nobody."""
        place = self._comeback(accepts, with_suspects)
        if place is not None:
            self.drop(place)
            return place
        skipped: list[_Entry] = []
        flow = place = None
        while place is None and (flow := self._first()) is not None:
            skipped.append(heapq.heappop(self._heap))
            place = flow.first(accepts)
        if place is None or flow is None:
            self._heap = skipped  # all of it, in order
            return None
        skipped.pop()
        self._virtual = flow.start
        flow.stamp = 0
        self._pay(flow, place.ticket)
        self.drop(place)
        for *_, other in skipped:
            other.start = max(other.start, self._virtual)  # waiting for a certain replica earns no credit
            self._line_up(other)
        return place

    def drop(self, place: Place) -> None:
        """Take out one that is still waiting, and let it owe nothing more."""
        place.is_live = False
        self.num_live -= 1
        flow = place.flow
        if flow is not None:
            flow.drop(place)
            if flow.num_live and not flow.stamp:
                self._line_up(flow)
            elif not flow.num_live:
                flow.places.clear()
                flow.stamp = 0
                self._weights -= flow.weight
                self._num_waiting -= 1
                flow.weight = 0.0
                if not self.num_live:
                    self._weights = 0.0  # exactly
                    self._virtual = max(self._virtual, flow.start)  # the end of a busy time
        else:
            (self._suspects if place.ticket.is_suspect else self._returned).remove(place)

    def num_ahead(self, request: Request) -> int:
        """How many of those that wait are taken before a newcomer, at most, if requests cost alike and its tenant owes
        nothing: those that came back, its tenant's, and of each other tenant's as many as the law above allows."""
        flow = self._flows.get(request.tenant)
        own, own_weight = (flow.num_live, flow.weight) if flow is not None else (0, 0.0)
        back = len(self._returned) + len(self._suspects)
        num_rivals = self._num_waiting - (own > 0)
        share = math.ceil(own * max(0.0, self._weights - own_weight) / request.weight) + num_rivals
        return back + own + min(self.num_live - back - own, share)

    def settle(self, request: Request, num_tokens: int) -> None:
        """A request that was taken has cost so many tokens."""
        excess = num_tokens - _estimate(request)
        flow = self._flows.get(request.tenant)
        if flow is None:
            if excess <= 0:
                return
            self._sweep()
            flow = self._flows[request.tenant] = Flow(self._least())
        flow.start += excess / request.weight
        if flow.num_live:
            self._line_up(flow)

    def youngest_first(self) -> Iterator[Place]:
        """Those that never went out, of the tenant with the most of them first. To be left alone meanwhile."""
        for flow in sorted(self._flows.values(), key=lambda flow: -flow.num_live):
            yield from (place for place in reversed(flow.places) if place.is_live)

    def _pay(self, flow: Flow, ticket: Ticket) -> None:
        request = ticket.request
        flow.start += _estimate(request) / request.weight
        ticket.is_charged = True

    def _comeback(self, accepts: Accepts | None, with_suspects: bool) -> Place | None:
        """The oldest acceptable one of those that came back."""
        returned = _acceptable(self._returned, accepts)
        suspect = _acceptable(self._suspects, accepts) if with_suspects else None
        if returned is None or suspect is None:
            return returned or suspect
        return min(returned, suspect)

    def _line_up(self, flow: Flow) -> None:
        flow.stamp = next(self._stamps)
        heapq.heappush(self._heap, (flow.start, flow.head().ticket.number, flow.stamp, flow))
        if len(self._heap) > _SLACK + 4 * len(self._flows):
            self._heap = [entry for entry in self._heap if entry[3].stamp == entry[2]]
            heapq.heapify(self._heap)

    def _first(self) -> Flow | None:
        """Whose turn it is."""
        heap = self._heap
        while heap:
            _, _, stamp, flow = heap[0]
            if flow.stamp == stamp:
                return flow
            heapq.heappop(heap)
        return None

    def _least(self) -> float:
        """Where a newcomer begins."""
        first = self._first()
        return first.start if first is not None else self._virtual

    def _sweep(self) -> None:
        """Forget tenants without requests that owe nothing; beyond a bound also those that owe least."""
        if len(self._flows) < self._sweep_at:
            return
        least = self._least()
        idle = [(flow.start, tenant) for tenant, flow in self._flows.items() if not flow.num_live]
        idle.sort()
        for place, (start, tenant) in enumerate(idle):
            if start <= least or len(idle) - place > _MAX_IDLE:
                del self._flows[tenant]
        self._sweep_at = _SLACK + 2 * len(self._flows)


def _estimate(request: Request) -> int:
    """Of its cost, in tokens. No request is free, or a tenant without estimates would always be next."""
    return max(1, request.num_tokens)


def _acceptable(places: list[Place], accepts: Accepts | None) -> Place | None:
    if not places:
        return None
    if accepts is None:
        return places[0]
    return next((place for place in places[:LOOK_AHEAD] if accepts(place.ticket)), None)
