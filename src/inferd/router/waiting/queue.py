"""The bounded queue in front of a model: class, then a fair share, then arrival. Pure: time is an argument.

**Order.** Critical before interactive before normal before batch; inside a class tenants share by weight
(``fair_share``); inside a tenant by arrival. Requests that come back after their replica failed them go first
in their class. Those that were in a worker when it died are suspects: one of them may have killed it, so
the caller lets them out one at a time.

**No class starves.** Every ``aging_every``-th request taken comes from the class that was served least recently
of those that wait. So while a class has requests that could be taken, at least one of the next ``4 *
aging_every`` requests taken is its own. Proof: each of the four aged turns among them that passes the class over
goes to another one that was served less recently; that one is then served more recently, so each of the
three others is preferred at most once. (While only better classes that are served all the time are in its
way, the first aged turn is already its own.) A request with k others before it in its class therefore
waits for at most ``4 * aging_every * (k + 1)`` dispatches; which others can come before it is bounded in turn
by the law of ``fair_share``.

**Bounds** in requests, tokens and bytes hold for whoever comes anew: ask ``check`` first. While others wait,
a tenant fills ``max_share_per_tenant`` of each at most. What comes back was counted when it came; it is never
refused, so it may stand above the bounds by as much as was in flight.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Final

from inferd.config import QueueConfig
from inferd.errors import Overloaded
from inferd.router.ticket import Ticket
from inferd.router.waiting.fair_share import Accepts, FairShare, Place
from inferd.types import CLASSES, Request, class_index, class_of

_SLACK: Final = 64
_MAX_DISPLACED: Final = 16


class RequestQueue:
    """Waiting tickets, each once. Each step is O(log n), apart from those that say what they look at."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._classes = tuple(FairShare() for _ in CLASSES)  # the best first
        self._places: dict[Ticket, Place] = {}
        self._expiries: list[tuple[float, int, Place]] = []
        self._arrivals: deque[Place] = deque()  # of all but batch work, in this order; some left meanwhile
        self._tie = itertools.count()
        self._total = _Sum()
        self._tenants: dict[str, _Sum] = {}
        self._num_popped = 0
        self._served = [0] * len(CLASSES)  # the number of the last pop that was each class's

    def configure(self, config: QueueConfig) -> None:
        """Other bounds from now on. Who waits already stays."""
        self._config = config

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_tokens(self) -> int:
        return self._total.tokens

    @property
    def num_bytes(self) -> int:
        return self._total.bytes

    @property
    def by_class(self) -> tuple[int, int, int, int]:
        """How many wait in each class, the best first."""
        critical, interactive, normal, batch = self._classes
        return critical.num_live, interactive.num_live, normal.num_live, batch.num_live

    def num_ahead(self, request: Request) -> int:
        """How many of those that wait would be taken before a newcomer, by class and fair share. An estimate."""
        line = class_index(request.priority)
        return sum(better.num_live for better in self._classes[:line]) + self._classes[line].num_ahead(request)

    # -- coming -----------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises Overloaded (queue_full, tenant_queue_full) when the request may not wait as well."""
        problem = self._problem(request, self._total, self._tenants.get(request.tenant, _Sum()))
        if problem is not None:
            try:
                raise problem
            finally:
                del problem  # its traceback has this frame: a circle, which would be freed late

    def make_room(self, request: Request) -> list[Ticket]:
        """Take out waiting requests of lower classes, the lowest and youngest first, if the request can
        wait in their place; they must be ended. Empty: it fits as it is, or not even so (``check`` says why)."""
        total = self._total.copy()
        own = self._tenants.get(request.tenant, _Sum()).copy()
        problem = self._problem(request, total, own)
        victims: list[Ticket] = []
        for line in reversed(self._classes[class_index(request.priority) + 1 :]):
            for place in line.youngest_first():
                if problem is None or len(victims) == _MAX_DISPLACED:
                    break
                victim = place.ticket.request
                if problem.code == "tenant_queue_full" and victim.tenant != request.tenant:
                    continue
                total.subtract(victim)
                if victim.tenant == request.tenant:
                    own.subtract(victim)
                victims.append(place.ticket)
                problem = self._problem(request, total, own)
        if problem is not None:
            return []
        for ticket in victims:
            self.remove(ticket)
        return victims

    def push(self, ticket: Ticket) -> None:
        """Let a ticket wait. Its ``queued_at``, ``expires_at`` and ``due_at`` count as they are now."""
        assert not ticket.is_waiting, f"request {ticket.request.id} waits twice"
        ticket.is_waiting = True
        request = ticket.request
        place = self._places[ticket] = self._classes[class_index(request.priority)].push(ticket)
        self._total.add(request)
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._tenants[request.tenant] = _Sum()
        tenant.add(request)
        expires_at = min(ticket.expires_at, ticket.due_at)
        if expires_at < math.inf:
            heapq.heappush(self._expiries, (expires_at, next(self._tie), place))
        if not is_batch_work(request):
            self._arrivals.append(place)

    # -- leaving ----------------------------------------------------------------------------

    def pop(self, *, accepts: Accepts | None = None, with_suspects: bool = True) -> Ticket | None:
        """The next ticket to be worked on; None: there is none that may go.

        ``accepts``: whether a replica that has room can run it. Of each tenant at most
        ``fair_share.LOOK_AHEAD`` tickets are asked about, the oldest first: what a tenant sends behind so
        many that cannot run waits with them.
        """
        order = [index for index, line in enumerate(self._classes) if line.num_live]
        if (self._num_popped + 1) % self._config.aging_every == 0:
            order.sort(key=self._served.__getitem__)
        for index in order:
            place = self._classes[index].take(accepts, with_suspects)
            if place is not None:
                self._num_popped += 1
                self._served[index] = self._num_popped
                self._left(place.ticket)
                return place.ticket
        return None

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out. Idempotent."""
        place = self._places.get(ticket)
        if place is not None:
            self._classes[class_index(ticket.request.priority)].drop(place)
            self._left(ticket)

    def pop_expired(self, now: float) -> list[Ticket]:
        """Every ticket that has waited too long, in the order of expiry; they wait no more."""
        expired = []
        while self._expiries and (not self._expiries[0][2].is_live or self._expiries[0][0] <= now):
            place = heapq.heappop(self._expiries)[2]
            if place.is_live:
                self.remove(place.ticket)
                expired.append(place.ticket)
        return expired

    def pop_longest(self, until: float) -> list[Ticket]:
        """Every ticket that has waited since ``until`` or before, by arrival; they wait no more. Batch work stays."""
        found = []
        while (oldest_at := self.oldest_at) is not None and oldest_at <= until:
            place = self._arrivals.popleft()
            self.remove(place.ticket)
            found.append(place.ticket)
        return found

    @property
    def oldest_at(self) -> float | None:
        """Since when the one that has waited for the longest does. Batch work does not count."""
        arrivals = self._arrivals
        while arrivals and not arrivals[0].is_live:
            arrivals.popleft()
        return arrivals[0].ticket.queued_at if arrivals else None

    @property
    def next_expiry(self) -> float | None:
        """When ``pop_expired`` has something to do, at the earliest."""
        return self._expiries[0][0] if self._expiries else None

    def clear(self) -> list[Ticket]:
        """Take everything out: by class, then by arrival."""
        waiting = sorted(self._places, key=lambda ticket: (class_index(ticket.request.priority), ticket.number))
        for ticket in waiting:
            self.remove(ticket)
        return waiting

    def remove_if(self, condition: Callable[[Ticket], bool]) -> list[Ticket]:
        """Take out all that meet a condition, by arrival. Asks about each that waits."""
        found = sorted((ticket for ticket in self._places if condition(ticket)), key=lambda ticket: ticket.number)
        for ticket in found:
            self.remove(ticket)
        return found

    def settle(self, ticket: Ticket, num_tokens: int) -> None:
        """A request that had been taken ended and has cost so many tokens: what its tenant paid more is given
        back, what it paid less is charged. Once for each; nothing happens for one that was never taken."""
        if ticket.is_charged:
            ticket.is_charged = False
            request = ticket.request
            self._classes[class_index(request.priority)].settle(request, num_tokens)

    def _left(self, ticket: Ticket) -> None:
        ticket.is_waiting = False
        del self._places[ticket]
        request = ticket.request
        self._total.subtract(request)
        tenant = self._tenants[request.tenant]
        tenant.subtract(request)
        if not tenant.requests:
            del self._tenants[request.tenant]
        if len(self._expiries) > _SLACK + 4 * len(self._places):
            # A queue that stands still must not grow with every client that leaves.
            self._expiries = [expiry for expiry in self._expiries if expiry[2].is_live]
            heapq.heapify(self._expiries)
        if len(self._arrivals) > _SLACK + 4 * len(self._places):
            self._arrivals = deque(place for place in self._arrivals if place.is_live)

    def _problem(self, request: Request, total: _Sum, own: _Sum) -> Overloaded | None:
        config = self._config
        bounds = (
            ("requests", total.requests, 1, config.max_requests, own.requests),
            ("tokens", total.tokens, request.num_tokens, config.max_tokens, own.tokens),
            ("bytes", total.bytes, request.num_bytes, config.max_bytes, own.bytes),
        )
        for noun, used, more, bound, _ in bounds:
            if used + more > bound:
                return Overloaded(
                    f"The model's queue is full: {used} {noun} wait already, the request has {more}, and {bound} may wait. "
                    "Try again later.",
                    code="queue_full",
                )
        if not own.requests or own.requests == total.requests:
            return None
        for noun, _, more, bound, used in bounds:
            if used + more > config.max_share_per_tenant * bound:
                return Overloaded(
                    f"Your share of the model's queue is full while others wait: {used} of your {noun} wait already, "
                    f"the request has {more}, and {int(config.max_share_per_tenant * bound)} may wait. Try again later.",
                    code="tenant_queue_full",
                )
        return None


class _Sum:
    """What waiting requests take of the bounds."""

    __slots__ = ("bytes", "requests", "tokens")

    def __init__(self, requests: int = 0, tokens: int = 0, num_bytes: int = 0) -> None:
        self.requests = requests
        self.tokens = tokens
        self.bytes = num_bytes

    def copy(self) -> _Sum:
        return _Sum(self.requests, self.tokens, self.bytes)

    def add(self, request: Request) -> None:
        self.requests += 1
        self.tokens += request.num_tokens
        self.bytes += request.num_bytes

    def subtract(self, request: Request) -> None:
        self.requests -= 1
        self.tokens -= request.num_tokens
        self.bytes -= request.num_bytes


def is_batch_work(request: Request) -> bool:
    """Whether it may wait for long: batch work."""
    return class_of(request.priority) == "batch"
