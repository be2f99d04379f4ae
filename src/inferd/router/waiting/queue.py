"""The bounded queue in front of a model: ordered by class, then fair share, then arrival. Pure: time is an argument.

**Order.** Critical before interactive before normal before batch. Inside a class tenants share by weight
(``fair_share``), and inside a tenant requests are ordered by arrival. Requests that return because their replica
failed them go first in their class. Requests that were in flight in a worker when it died are suspects: one of them
may be the cause, so the caller dispatches them one at a time.

**No class starves.** Every ``aging_every``-th request taken comes from the class that was served least recently of
the classes with waiting requests. So while a class has requests that could be taken, at least one of the next
``4 * aging_every`` requests taken is its own. Proof: among them are four aged turns. An aged turn that passes the class
over goes to a class that was served less recently. That class is then served more recently, so each of the three other
classes is preferred at most once. (Where only better classes compete that are served all the time, the first aged turn
already goes to the class.) A request with k requests before it in its class therefore waits for at most
``4 * aging_every * (k + 1)`` dispatches. Which requests can come before it is bounded by the law of ``fair_share``.

**Bounds** in requests, tokens and bytes hold for new requests, for which the caller calls ``check`` first. While other
tenants wait, a tenant fills at most ``max_share_per_tenant`` of each bound. Returning requests are never refused, so
the queue may exceed its bounds by the requests that were in flight.
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
from inferd.router.ticket import QueuePlace, Ticket
from inferd.router.waiting.fair_share import Accepts, FairShare, QueueEntry
from inferd.types import CLASSES, Request, class_index, class_of

_SLACK: Final = 64
_MAX_DISPLACED: Final = 16


class RequestQueue:
    """Waiting tickets, each once. Methods take O(log n), apart from those whose docstrings say more."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._classes = tuple(FairShare() for _ in CLASSES)  # the best first
        self.entries: dict[Ticket, QueueEntry] = {}
        self._expiries: list[tuple[float, int, QueueEntry]] = []
        self._arrivals: deque[QueueEntry] = deque()  # all but batch work, by arrival; some are no longer live
        self._tie = itertools.count()
        self._total = _Totals()
        self._tenants: dict[str, _Totals] = {}
        self._counts = _TenantCounts()
        self.num_batch_work = 0  # waiting requests of batch work
        self._num_popped = 0
        self._served = [0] * len(CLASSES)  # for each class, the number of its last pop

    def configure(self, config: QueueConfig) -> None:
        """Set other bounds for new requests. Waiting requests stay."""
        self._config = config

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_tokens(self) -> int:
        """The estimated tokens of all waiting requests."""
        return self._total.tokens

    @property
    def num_bytes(self) -> int:
        """The bytes of all waiting requests."""
        return self._total.bytes

    @property
    def by_class(self) -> tuple[int, int, int, int]:
        """The number of waiting requests in each class, critical first."""
        critical, interactive, normal, batch = self._classes
        return critical.num_live, interactive.num_live, normal.num_live, batch.num_live

    def num_ahead(self, request: Request) -> int:
        """How many waiting requests would be taken before a new request, by class and fair share. An estimate."""
        class_number = class_index(request.priority)
        of_better = sum(better.num_live for better in self._classes[:class_number])
        return of_better + self._classes[class_number].num_ahead(request)

    def place_of(self, request: Request) -> QueuePlace:
        """What is in the queue before a new request enters it."""
        tenant, of_tenant = self._counts.largest
        better = self._classes[: class_index(request.priority) + 1]
        return QueuePlace(len(self.entries), sum([share.num_live for share in better]), tenant, of_tenant)

    # -- adding -----------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises Overloaded (queue_full, tenant_queue_full) when the request would exceed a bound."""
        problem = self._exceeded_bound(request, self._total, self._tenants.get(request.tenant, _Totals()))
        if problem is not None:
            try:
                raise problem
            finally:
                del problem  # its traceback refers to this frame: a reference cycle would delay freeing

    def make_room(self, request: Request) -> list[Ticket]:
        """Remove waiting requests of lower classes, the lowest and youngest first, so that the request fits.

        The caller must end the requests that are returned. The list is empty where the request fits as it is, and where
        it would not fit even so (``check`` raises the reason).
        """
        total = self._total.copy()
        own = self._tenants.get(request.tenant, _Totals()).copy()
        problem = self._exceeded_bound(request, total, own)
        victims: list[Ticket] = []
        for share in reversed(self._classes[class_index(request.priority) + 1 :]):
            for entry in share.youngest_first():
                if problem is None or len(victims) == _MAX_DISPLACED:
                    break
                victim = entry.ticket.request
                if problem.code == "tenant_queue_full" and victim.tenant != request.tenant:
                    continue
                total.subtract(victim)
                if victim.tenant == request.tenant:
                    own.subtract(victim)
                victims.append(entry.ticket)
                problem = self._exceeded_bound(request, total, own)
        if problem is not None:
            return []
        for ticket in victims:
            self.remove(ticket)
        return victims

    def push(self, ticket: Ticket) -> None:
        """Add a ticket. Later changes of its ``queued_at``, ``expires_at`` and ``due_at`` have no effect."""
        assert not ticket.is_waiting, f"request {ticket.request.id} waits twice"
        ticket.is_waiting = True
        request = ticket.request
        entry = self.entries[ticket] = self._classes[class_index(request.priority)].push(ticket)
        self._total.add(request)
        self.num_batch_work += is_batch_work(request)
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._tenants[request.tenant] = _Totals()
        self._counts.change(request.tenant, tenant.requests, tenant.requests + 1)
        tenant.add(request)
        expires_at = min(ticket.expires_at, ticket.due_at)
        if expires_at < math.inf:
            heapq.heappush(self._expiries, (expires_at, next(self._tie), entry))
        if not is_batch_work(request):
            self._arrivals.append(entry)

    # -- removing ---------------------------------------------------------------------------

    def pop(self, *, accepts: Accepts | None = None, with_suspects: bool = True) -> Ticket | None:
        """Remove and return the next ticket to dispatch; None: no ticket can be dispatched.

        ``accepts``: whether a replica with room can run a ticket. It is called for at most ``fair_share.LOOK_AHEAD``
        tickets of each tenant, the oldest first. Requests behind so many that cannot run wait with them.
        ``with_suspects``: whether suspects may be returned.
        """
        order = [index for index, share in enumerate(self._classes) if share.num_live]
        if (self._num_popped + 1) % self._config.aging_every == 0:
            order.sort(key=self._served.__getitem__)
        for index in order:
            entry = self._classes[index].pop(accepts, with_suspects)
            if entry is not None:
                self._num_popped += 1
                self._served[index] = self._num_popped
                self._removed(entry.ticket)
                return entry.ticket
        return None

    def remove(self, ticket: Ticket) -> None:
        """Remove a ticket. Idempotent."""
        entry = self.entries.get(ticket)
        if entry is not None:
            self._classes[class_index(ticket.request.priority)].remove(entry)
            self._removed(ticket)

    def pop_expired(self, now: float) -> list[Ticket]:
        """Remove and return the tickets whose ``expires_at`` or ``due_at`` has passed, in that order."""
        expired = []
        while self._expiries and (not self._expiries[0][2].is_live or self._expiries[0][0] <= now):
            entry = heapq.heappop(self._expiries)[2]
            if entry.is_live:
                self.remove(entry.ticket)
                expired.append(entry.ticket)
        return expired

    def pop_waiting_since(self, until: float) -> list[Ticket]:
        """Remove and return the tickets queued at ``until`` or before, by arrival. Batch work stays."""
        found = []
        while (oldest_at := self.oldest_at) is not None and oldest_at <= until:
            entry = self._arrivals.popleft()
            self.remove(entry.ticket)
            found.append(entry.ticket)
        return found

    @property
    def oldest_at(self) -> float | None:
        """When the ticket that has waited for the longest was queued, batch work not counted; None: none waits."""
        arrivals = self._arrivals
        while arrivals and not arrivals[0].is_live:
            arrivals.popleft()
        return arrivals[0].ticket.queued_at if arrivals else None

    @property
    def next_expiry(self) -> float | None:
        """The earliest time at which ``pop_expired`` may return a ticket; None: no ticket expires."""
        return self._expiries[0][0] if self._expiries else None

    def clear(self) -> list[Ticket]:
        """Remove and return all tickets, by class, then by arrival."""
        waiting = sorted(self.entries, key=lambda ticket: (class_index(ticket.request.priority), ticket.number))
        for ticket in waiting:
            self.remove(ticket)
        return waiting

    def remove_if(self, condition: Callable[[Ticket], bool]) -> list[Ticket]:
        """Remove and return the tickets that meet a condition, by arrival. Calls it for every waiting ticket."""
        found = sorted((ticket for ticket in self.entries if condition(ticket)), key=lambda ticket: ticket.number)
        for ticket in found:
            self.remove(ticket)
        return found

    def settle(self, ticket: Ticket, num_tokens: int) -> None:
        """Correct the tenant's charge for a dispatched request that ended, by the tokens that it really cost.

        Has no effect for a request that was never dispatched, or a second time.
        """
        if ticket.is_charged:
            ticket.is_charged = False
            request = ticket.request
            self._classes[class_index(request.priority)].settle(request, num_tokens)

    def _removed(self, ticket: Ticket) -> None:
        ticket.is_waiting = False
        del self.entries[ticket]
        request = ticket.request
        self._total.subtract(request)
        self.num_batch_work -= is_batch_work(request)
        tenant = self._tenants[request.tenant]
        self._counts.change(request.tenant, tenant.requests, tenant.requests - 1)
        tenant.subtract(request)
        if not tenant.requests:
            del self._tenants[request.tenant]
        if len(self._expiries) > _SLACK + 4 * len(self.entries):
            # Expiries of removed tickets are cleared: without dispatches they would grow with every cancellation.
            self._expiries = [expiry for expiry in self._expiries if expiry[2].is_live]
            heapq.heapify(self._expiries)
        if len(self._arrivals) > _SLACK + 4 * len(self.entries):
            self._arrivals = deque(entry for entry in self._arrivals if entry.is_live)

    def _exceeded_bound(self, request: Request, total: _Totals, own: _Totals) -> Overloaded | None:
        config = self._config
        bounds = (
            ("requests", total.requests, 1, config.max_requests, own.requests),
            ("tokens", total.tokens, request.num_tokens, config.max_tokens, own.tokens),
            ("bytes", total.bytes, request.num_bytes, config.max_bytes, own.bytes),
        )
        for noun, used, more, bound, _ in bounds:
            if used + more > bound:
                return Overloaded(
                    f"The model's queue is full: {used} {noun} wait already, the request has {more}, and {bound} may "
                    "wait. Try again later.",
                    code="queue_full",
                )
        if not own.requests or own.requests == total.requests:
            return None
        for noun, _, more, bound, used in bounds:
            if used + more > config.max_share_per_tenant * bound:
                return Overloaded(
                    f"Your share of the model's queue is full while others wait: {used} of your {noun} wait already, "
                    f"the request has {more}, and {int(config.max_share_per_tenant * bound)} may wait. "
                    "Try again later.",
                    code="tenant_queue_full",
                )
        return None


class _TenantCounts:
    """The tenants by their number of waiting requests. Every change by one takes the same time."""

    __slots__ = ("_most", "_tenants")

    def __init__(self) -> None:
        self._tenants: dict[int, dict[str, None]] = {}  # by number of requests, none is empty
        self._most = 0

    @property
    def largest(self) -> tuple[str, int]:
        """A tenant with most requests, and their number; 0: none waits."""
        return (next(iter(self._tenants[self._most])), self._most) if self._most else ("", 0)

    def change(self, tenant: str, before: int, after: int) -> None:
        """The number of a tenant's requests changes by one."""
        if before:
            others = self._tenants[before]
            del others[tenant]
            if not others:
                del self._tenants[before]
        if after:
            self._tenants.setdefault(after, {})[tenant] = None
        if after > self._most or (before == self._most and before not in self._tenants):
            self._most = after


class _Totals:
    """The requests, tokens and bytes of several waiting requests."""

    __slots__ = ("bytes", "requests", "tokens")

    def __init__(self, requests: int = 0, tokens: int = 0, num_bytes: int = 0) -> None:
        self.requests = requests
        self.tokens = tokens
        self.bytes = num_bytes

    def copy(self) -> _Totals:
        return _Totals(self.requests, self.tokens, self.bytes)

    def add(self, request: Request) -> None:
        self.requests += 1
        self.tokens += request.num_tokens
        self.bytes += request.num_bytes

    def subtract(self, request: Request) -> None:
        self.requests -= 1
        self.tokens -= request.num_tokens
        self.bytes -= request.num_bytes


def is_batch_work(request: Request) -> bool:
    """Whether the request has the class batch, which may wait without a bound in time."""
    return class_of(request.priority) == "batch"
