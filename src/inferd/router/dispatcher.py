"""The dispatch of one model's requests to its replicas: from the queue, as a retry, and as a hedge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from inferd import clock
from inferd.config import ModelConfig
from inferd.errors import Overloaded
from inferd.events import Emit, RequestRefused
from inferd.router.choosing.placement import Placement
from inferd.router.continuation import is_continuable
from inferd.router.hand_overs import HandOvers
from inferd.router.live_requests import LiveRequests
from inferd.router.queue_reporter import QueueReporter
from inferd.router.replicas.fleet import Fleet
from inferd.router.replicas.member import Member
from inferd.router.request_end import deadline_error
from inferd.router.retries import Retries
from inferd.router.ticket import Ticket
from inferd.router.waiting.availability import Availability
from inferd.router.waiting.queue import RequestQueue


class Dispatcher:
    """Gives waiting requests to replicas with room, and ends those that waited too long.

    ``demand`` is called when a request waits for a model that is not in memory. ``config`` is the model's current
    configuration. ``suspect`` is the suspect in flight (``Ticket.worker_deaths``) until its first output: suspects
    are dispatched one at a time, so that the death of a worker has one possible cause.
    """

    __slots__ = (
        "_availability",
        "_demand",
        "_emit",
        "_fleet",
        "_live",
        "_name",
        "_queue",
        "_reporter",
        "_timer",
        "_timer_at",
        "config",
        "hand_overs",
        "placement",
        "retries",
        "suspect",
    )

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        queue: RequestQueue,
        fleet: Fleet,
        availability: Availability,
        live: LiveRequests,
        reporter: QueueReporter,
        emit: Emit,
        demand: Callable[[], None],
    ) -> None:
        self._name = name
        self.config = config
        self._queue = queue
        self._fleet = fleet
        self._availability = availability
        self._live = live
        self._reporter = reporter
        self._emit = emit
        self._demand = demand
        random = Random()
        self.retries = Retries(name, config.retry, availability, random, emit, self._retry)
        self.placement = Placement(config, fleet, self.retries.abandoned, random)
        self.hand_overs = HandOvers(name, fleet, emit)
        self.suspect: Ticket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def configure(self, config: ModelConfig) -> None:
        """Use another configuration from now on."""
        self.config = config
        self.placement.config = config
        self.retries.configure(config.retry)

    def dispatch_waiting(self) -> None:
        """End requests that waited too long, dispatch those that replicas have room for, and set the timer for the
        others."""
        if self._availability.is_stopped:
            return
        if self._queue.entries:
            now = clock.now()
            for expired in self._queue.pop_expired(now):
                self._expire(expired, now, f"for {self.config.queue.timeout_s:g} s without a replica becoming free")
            for expired in self._queue.pop_waiting_since(self._availability.expired_before(now)):
                longest_s = self._availability.longest_wait_s(now)
                self._expire(expired, now, f"behind others for the {longest_s:.3g} s that requests may wait")
            while self._queue.entries:
                free = self._fleet.available(now)
                if not free:
                    break
                ticket = self._queue.pop(
                    accepts=lambda t, free=free: bool(self.placement.able(t, free)),  # type: ignore[misc]
                    with_suspects=self.suspect is None,
                )
                if ticket is None:
                    break
                self.dispatch(ticket, self.placement.able(ticket, free), now)
            if self._queue.entries:
                if self._availability.may_load_on_demand:
                    self._demand()
                self._set_timer(now)
        self._reporter.report()

    def dispatch(self, ticket: Ticket, able: Sequence[Member], now: float) -> None:
        """Send a request to one of ``able``: the replicas that have room for it, at least one."""
        member = self.placement.choose(ticket, able, now)
        ticket.new_tokens = self.placement.new_tokens(ticket)
        if ticket.worker_deaths:
            self.suspect = ticket
        ticket.attempts += 1
        ticket.use(member.replica, now)
        if ticket.first_dispatched_at is None:
            ticket.first_dispatched_at = now
            if ticket.outages_before is not None:
                self._availability.outages.end_wait(ticket, now)
            if self.config.resume_streams and member.kind == "local" and is_continuable(ticket.request):
                ticket.token_ids = []
        self.placement.sequence_replicas.note(ticket.request, member.replica)
        if member.breaker_state != "closed":
            self._fleet.health.request_began(member, now)
        self.hand_overs.dispatch(ticket, member, self.config.roles, self.placement.seen_bytes)
        if ticket.is_paused:
            member.replica.pause(ticket.request.id)
        if self.config.retry.hedge_after_s is not None and ticket.request.idempotent:
            loop = asyncio.get_running_loop()
            loop.call_later(self.config.retry.hedge_after_s, self._hedge, ticket, ticket.attempts)

    def stop(self) -> None:
        """Cancel the timer and all backoffs. Requests in backoff stay alive without a retry; the caller ends them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.retries.cancel_backoffs()

    def slot_freed(self) -> None:
        """A request left its replica: wake the tasks that wait for that, and dispatch waiting requests."""
        self._fleet.notify()
        if self._queue.entries:
            self.dispatch_waiting()

    def recheck_waiting(self) -> None:
        """The set of replicas changed: end the waiting requests that no replica can serve now, and dispatch the
        others."""
        now = clock.now()
        for ticket in self._queue.remove_if(
            lambda ticket: self._availability.replica_refusal(ticket, now)[0] is not None
        ):
            error, _ = self._availability.replica_refusal(ticket, now)
            assert error is not None
            if ticket.last_refusal is not None and not self._availability.is_stopped:
                self._live.end_refused(ticket, ticket.last_refusal)
            else:
                self._live.refuse_or_fail(ticket, error)
        self.dispatch_waiting()

    def requeue(self, ticket: Ticket) -> None:
        """Put a request back into the queue. It keeps its place by arrival and goes before new requests."""
        ticket.runner = None
        ticket.is_charged = True  # also where the queue was empty: a returning request goes before new ones
        ticket.queued_at = clock.now()
        ticket.expires_at = ticket.queued_at + self.config.queue.timeout_s
        self._queue.push(ticket)

    def clear_suspect(self, ticket: Ticket) -> None:
        """The ticket produced output or ended: if it was the suspect in flight, the next suspect may be dispatched."""
        if self.suspect is ticket:
            self.suspect = None

    # -- waiting too long --------------------------------------------------------------------

    def _set_timer(self, now: float) -> None:
        """Dispatch again when the next request has waited too long, or a breaker allows a probe."""
        times = (self._queue.next_expiry, self._availability.next_expiry(now))
        at = min((time for time in times if time is not None), default=None)
        for member in self._fleet.members:
            reopens_at = member.breaker.next_probe_at if member.breaker is not None else None
            if reopens_at is not None and reopens_at > now and (at is None or reopens_at < at):
                at = reopens_at
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - now) + 0.001, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.dispatch_waiting()

    def _expire(self, ticket: Ticket, now: float, why: str) -> None:
        """End a request that waited too long. ``why`` completes the sentence "The request waited ..."."""
        request = ticket.request
        if ticket.due_at <= now:
            self._live.fail(ticket, deadline_error(request, now))
            return
        self._emit(RequestRefused(model=self._name, reason="queue_timeout", tenant=request.tenant, was_queued=True))
        error = Overloaded(
            f"The request waited {why}; try again later.",
            retry_after_s=self._availability.retry_after_s(now),
            code="queue_timeout",
        )
        self._live.refuse_or_fail(ticket, error)

    # -- retries and hedges -----------------------------------------------------------------

    def _retry(self, ticket: Ticket) -> None:
        self.requeue(ticket)
        self.recheck_waiting()

    def _hedge(self, ticket: Ticket, attempt: int) -> None:
        """The replica was silent for ``hedge_after_s``: send a copy to a second one. The first answer is used."""
        runner = ticket.runner
        if runner is None or not self.retries.may_hedge(ticket, attempt):
            return
        now = clock.now()
        able = [m for m in self.placement.able(ticket, self._fleet.available(now)) if m.replica is not runner]
        if not able or not self.retries.grant("hedge", now):
            return
        member = self.placement.choose(ticket, able, now)
        ticket.new_tokens = self.placement.new_tokens(ticket)
        ticket.attempts += 1
        ticket.hedge_replica, ticket.hedged_at = member.replica, now
        self._fleet.health.request_began(member, now)
        member.replica.dispatch(ticket)
        self._reporter.report()
