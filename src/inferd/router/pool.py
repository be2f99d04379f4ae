"""The requests of one model, from their admission to their end.

All code here runs in one event loop, so a request is in exactly one state at a time: queued, in backoff before a
retry, in flight in one replica (hedged: in two), or ended. The fleet decides which replicas exist. Queue order, the
choice of a replica, circuit breakers and retry budgets are in modules of their own, which are pure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import msgspec

from inferd import clock
from inferd.config import ModelConfig
from inferd.errors import (
    InferdError,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    WorkerDied,
)
from inferd.events import Emit, RequestEnded, RequestRefused, Retried, StepDone
from inferd.router.choosing.placement import Placement
from inferd.router.continuation import continuation, is_continuable, record_output
from inferd.router.queue_reporter import QueueReporter
from inferd.router.replicas.fleet import Fleet
from inferd.router.replicas.member import Member
from inferd.router.replicas.replica import LocalReplica, Replica
from inferd.router.request_end import complete_end, deadline_error, ended_event, is_deadline_end
from inferd.router.retries import Retries
from inferd.router.status import Applied, ModelStatus
from inferd.router.stream import Stream
from inferd.router.ticket import Runner, Ticket
from inferd.router.waiting.availability import Availability, Refusal
from inferd.router.waiting.queue import RequestQueue, is_batch_work
from inferd.types import (
    End,
    Failure,
    GenerateRequest,
    Output,
    Relay,
    Relayed,
    Request,
    StepStats,
)
from inferd.worker.supervisor import Patience

_log = logging.getLogger("inferd.router")

CANCEL_WAIT_S = 2.0  # for replicas to report the usage of cancelled requests
MAX_WORKER_DEATHS = 2  # with one request in flight, before that request fails


class Pool:
    """Accepts requests for one model and ends each exactly once.

    ``demand`` is called when a request waits for a model that is not in memory. ``on_idle`` is called when no request
    is queued or in flight any more. ``may_surge`` and ``pin_below`` are passed to the fleet.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        emit: Emit,
        *,
        command: Sequence[str],
        patience: Patience,
        demand: Callable[[Pool], None],
        may_surge: Callable[[Pool, Member], bool],
        on_idle: Callable[[Pool], None],
        pin_below: Path | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self._emit = emit
        self._demand = demand
        self._on_idle = on_idle
        self._queue = RequestQueue(config.queue)
        self.fleet = Fleet(
            name, config, self, emit, command, patience, lambda member: may_surge(self, member), pin_below
        )
        self.availability = Availability(name, config, self._queue, self.fleet)
        random = Random()
        self._retries = Retries(name, config.retry, self.availability, random, emit, self._retry)
        self._placement = Placement(config, self.fleet, self._retries.abandoned, random)
        self._reporter = QueueReporter(name, self._queue, self.fleet, lambda: len(self._retries.backing_off), emit)
        self._live: dict[str, Ticket] = {}
        self._num_direct = 0  # requests in flight on the direct path, which have no ticket
        self._num_accepted = 0
        self._suspect: Ticket | None = None  # the suspect in flight, until its first output (Ticket.is_suspect)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._is_stopped = False
        self.last_used_at = clock.now()
        self.idle = asyncio.Event()  # no request is queued or in flight
        self.idle.set()
        self.settled = asyncio.Event()  # every replica has been ready, has failed or does not answer

    # -- admission --------------------------------------------------------------------------

    def submit(self, request: Request, relay: Relay | None = None) -> Stream:
        """Accept a request: dispatch it to a replica, or put it into the queue.

        Raises Overloaded when the queue is full or the deadline cannot be met, Unavailable when the model cannot be
        served, DeadlineExceeded when the deadline has passed, InvalidRequest when the id is in use.
        """
        now = clock.now()
        if request.id in self._live or request.id in self._retries.abandoned:
            raise InvalidRequest(f"A request with the id {request.id!r} is already running.", param="request_id")
        if not request.arrived_at:
            request = msgspec.structs.replace(request, arrived_at=now)
        stream = Stream(
            request.id,
            lambda: self._cancel(ticket),
            lambda is_paused: self._pause(ticket, is_paused),
            is_whole=isinstance(request, GenerateRequest) and not request.stream,
        )
        ticket = Ticket(request, stream, self._num_accepted, now + self.config.queue.timeout_s, relay)
        if ticket.due_at <= now:
            stream.drop_callbacks()
            raise deadline_error(request, now)
        ticket.queued_at = now
        self._retries.budget.note(now)
        able = () if self._is_stopped or len(self._queue) else self._placement.able(ticket, self.fleet.available(now))
        if not able:
            self._check_may_wait(ticket, now)
        self._num_accepted += 1
        self._live[request.id] = ticket
        self.idle.clear()
        if able:
            self._dispatch(ticket, able, now)
            self._reporter.report()
        else:
            self._queue.push(ticket)
            self._dispatch_waiting()
        return stream

    def _check_may_wait(self, ticket: Ticket, now: float) -> None:
        """Raise the error of a request that cannot be dispatched at once and may not wait either."""
        error, reason = self.availability.replica_refusal(ticket, now)
        if error is None:
            error, reason = self.availability.wait_refusal(ticket, now)
        if error is None:
            error, reason = self._queue_refusal(ticket, now)
        if error is not None:
            self._emit(RequestRefused(model=self.name, reason=reason, tenant=ticket.request.tenant))
            ticket.stream.drop_callbacks()
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: a reference cycle would keep the request alive

    def _queue_refusal(self, ticket: Ticket, now: float) -> Refusal:
        """Make room in the queue by refusing requests of lower classes; the refusal where the request still does not
        fit."""
        for displaced in self._queue.make_room(ticket.request):
            self._emit(RequestRefused(model=self.name, reason="queue_full", tenant=displaced.request.tenant))
            self._refuse_or_fail(displaced, self._displaced_error(now))
        try:
            self._queue.check(ticket.request)
        except Overloaded as full:
            full.retry_after_s = self.availability.retry_after_s(now)
            return full, "tenant_queue_full" if full.code == "tenant_queue_full" else "queue_full"
        return None, "queue_full"

    def _displaced_error(self, now: float) -> Overloaded:
        return Overloaded(
            "The model's queue is full, and requests of a higher priority came; try again later.",
            code="queue_full",
            retry_after_s=self.availability.retry_after_s(now),
        )

    def _cancel(self, ticket: Ticket) -> None:
        """The reader closed the stream: end a waiting request, and ask the replicas to cancel one in flight."""
        request_id = ticket.request.id
        if ticket.is_waiting:
            self._queue.remove(ticket)
            self._end(ticket, End("cancelled"))
        elif self._retries.cancel_backoff(request_id):
            self._end(ticket, End("cancelled"))
        else:
            for replica in (ticket.runner, ticket.hedge_replica):
                if replica is not None:
                    replica.cancel(request_id)

    def _pause(self, ticket: Ticket, is_paused: bool) -> None:
        replica = ticket.runner
        if replica is None:
            return
        if is_paused:
            replica.pause(ticket.request.id)
        else:
            replica.resume(ticket.request.id)

    # -- dispatch ---------------------------------------------------------------------------

    def _dispatch_waiting(self) -> None:
        """End requests that waited too long, dispatch those that replicas have room for, and set the timer for the
        others."""
        if self._is_stopped:
            return
        if len(self._queue):
            now = clock.now()
            for expired in self._queue.pop_expired(now):
                self._expire(expired, now, f"for {self.config.queue.timeout_s:g} s without a replica becoming free")
            for expired in self._queue.pop_waiting_since(self.availability.expired_before(now)):
                longest_s = self.availability.longest_wait_s(now)
                self._expire(expired, now, f"behind others for the {longest_s:.3g} s that requests may wait")
            while len(self._queue):
                free = self.fleet.available(now)
                if not free:
                    break
                ticket = self._queue.pop(
                    accepts=lambda t, free=free: bool(self._placement.able(t, free)),  # type: ignore[misc]
                    with_suspects=self._suspect is None,
                )
                if ticket is None:
                    break
                self._dispatch(ticket, self._placement.able(ticket, free), now)
            if len(self._queue):
                if self.availability.may_load_on_demand:
                    self._demand(self)
                self._set_timer(now)
        self._reporter.report()

    def _dispatch(self, ticket: Ticket, able: Sequence[Member], now: float) -> None:
        """Send a request to one of ``able``: the replicas that have room for it, at least one."""
        member = self._placement.choose(ticket, able, now)
        if ticket.is_suspect:
            self._suspect = ticket
        ticket.attempts += 1
        ticket.dispatched_at = now
        if ticket.first_dispatched_at is None:
            ticket.first_dispatched_at = now
            if self.config.resume_streams and member.kind == "local" and is_continuable(ticket.request):
                ticket.token_ids = []
        ticket.runner = member.replica
        ticket.replica = member.index
        self._placement.sequence_replicas.note(ticket.request, member.replica)
        self.fleet.health.request_began(member, now)
        member.replica.dispatch(ticket)
        if ticket.stream.is_paused:
            member.replica.pause(ticket.request.id)
        if self.config.retry.hedge_after_s is not None and ticket.request.idempotent:
            loop = asyncio.get_running_loop()
            loop.call_later(self.config.retry.hedge_after_s, self._hedge, ticket, ticket.attempts)

    def _set_timer(self, now: float) -> None:
        """Dispatch again when the next request has waited too long, or a breaker allows a probe."""
        times = (self._queue.next_expiry, self.availability.next_expiry(now))
        at = min((time for time in times if time is not None), default=None)
        for member in self.fleet.members:
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
        self._dispatch_waiting()

    def _expire(self, ticket: Ticket, now: float, why: str) -> None:
        request = ticket.request
        if ticket.due_at <= now:
            self._fail(ticket, deadline_error(request, now))
            return
        self._emit(RequestRefused(model=self.name, reason="queue_timeout", tenant=request.tenant))
        error = Overloaded(
            f"The request waited {why}; try again later.",
            retry_after_s=self.availability.retry_after_s(now),
            code="queue_timeout",
        )
        self._refuse_or_fail(ticket, error)

    def _recheck_waiting(self) -> None:
        """The set of replicas changed: end the waiting requests that no replica can serve now, and dispatch the
        others."""
        now = clock.now()

        for ticket in self._queue.remove_if(
            lambda ticket: self.availability.replica_refusal(ticket, now)[0] is not None
        ):
            error, _ = self.availability.replica_refusal(ticket, now)
            assert error is not None
            if ticket.last_refusal is not None and not self._is_stopped:
                self._end_refused(ticket, ticket.last_refusal)
            else:
                self._refuse_or_fail(ticket, error)
        self._dispatch_waiting()

    # -- the direct path (``direct_relay``, ``direct_prediction``) --------------------------------------

    def direct_member(self, now: float, tenant: str = "", body: bytes = b"") -> Member | None:
        """The replica for a request without region, session or sequence that can be sent at once.

        None: requests are queued, no replica has room, or the model's requests may be hedged. ``body`` is given for
        requests to remote servers: with ``tenant`` it finds the server that has probably cached the prompt's beginning.
        """
        if self._is_stopped or len(self._queue) or self.config.retry.hedge_after_s is not None:
            return None
        available = self.fleet.available(now)
        if not available:
            return None
        if len(available) > 1:
            available = [member for member in available if not member.is_last_resort] or available
        if body:
            return self._placement.choose_relayed(tenant, body, available, now)
        return available[0] if len(available) == 1 else self._placement.pick(available, now)

    def direct_began(self, member: Member, now: float) -> None:
        """Count a request that begins on the direct path."""
        self._retries.budget.note(now)
        self._num_direct += 1
        if self._num_direct == 1:
            self.idle.clear()
        self.fleet.health.request_began(member, now)
        if not self._reporter.is_scheduled:
            self._reporter.report()

    def direct_ended(self, ended: RequestEnded, sent_at: float, now: float) -> None:
        """Count a request that was answered on the direct path."""
        self._num_direct -= 1
        self.availability.wait_bound.answered(now - sent_at)
        self.availability.drain_rate.ended(now, has_waiting=len(self._queue) > 0)
        self.last_used_at = now
        self._emit(ended)
        if not self._num_direct and not self._live:
            self._became_idle()
        if not self._reporter.is_scheduled:
            self._reporter.report()
        self._slot_freed()

    def adopt_direct(
        self, request: Request, relay: Relay | None, member: Member, sent_at: float, first_at: float | None
    ) -> Ticket:
        """The ticket of a request in flight that leaves the direct path for the general one.

        Its state is as if it had been dispatched to ``member`` at ``sent_at``. ``first_at``: when the answer began.
        """
        self._num_direct -= 1
        stream = Stream(request.id, lambda: self._cancel(ticket), lambda is_paused: self._pause(ticket, is_paused))
        ticket = Ticket(request, stream, self._num_accepted, clock.now() + self.config.queue.timeout_s, relay)
        self._num_accepted += 1
        ticket.attempts = 1
        ticket.queued_at = sent_at
        ticket.dispatched_at = ticket.first_dispatched_at = sent_at
        ticket.runner, ticket.replica = member.replica, member.index
        stream.progress.first_at = first_at
        stream.progress.has_output = first_at is not None
        self._live[request.id] = ticket
        return ticket

    # -- retries and hedges -----------------------------------------------------------------

    def _retry(self, ticket: Ticket) -> None:
        self._requeue(ticket)
        self._recheck_waiting()

    def _requeue(self, ticket: Ticket) -> None:
        ticket.runner = None
        ticket.is_charged = True  # also where the queue was empty: a returning request goes before new ones
        ticket.queued_at = clock.now()
        ticket.expires_at = ticket.queued_at + self.config.queue.timeout_s
        self._queue.push(ticket)

    def _hedge(self, ticket: Ticket, attempt: int) -> None:
        """The replica was silent for ``hedge_after_s``: send a copy to a second one. The first answer is used."""
        runner = ticket.runner
        if runner is None or not self._retries.may_hedge(ticket, attempt):
            return
        now = clock.now()
        able = [m for m in self._placement.able(ticket, self.fleet.available(now)) if m.replica is not runner]
        if not able or not self._retries.grant("hedge", now):
            return
        member = self._placement.choose(ticket, able, now)
        ticket.attempts += 1
        ticket.hedge_replica, ticket.hedged_at = member.replica, now
        self.fleet.health.request_began(member, now)
        member.replica.dispatch(ticket)
        ticket.replica = runner.index
        self._reporter.report()

    def _clear_suspect(self, ticket: Ticket) -> None:
        """The ticket produced output or ended: if it was the suspect in flight, the next suspect may be dispatched."""
        if self._suspect is ticket:
            self._suspect = None

    # -- calls from replicas (``FleetOwner``) -------------------------------------------------

    def replica_ready(self, replica: Replica) -> None:
        member = self.fleet.member_of(replica)
        if member is None:
            return
        if replica.info is not None:
            self.availability.info = replica.info
        self.availability.load_error = None
        self._placement.forget(replica.index)
        self.fleet.ready(member)
        self._note_settled()
        self._dispatch_waiting()

    def replica_has_room(self) -> None:
        self._dispatch_waiting()

    def replica_outputs(self, replica: Replica, outputs: list[Output], stats: StepStats | None) -> None:
        now = clock.now()
        has_room = False
        for output in outputs:
            ticket = replica.ticket(output.request_id)
            if ticket is None:
                continue
            try:
                self._process_output(replica, ticket, output, now)
            except Exception:
                # A request boundary: a defect ends this request, and no other of the frame.
                _log.exception("what a worker said of request %s could not be taken", output.request_id)
                replica.cancel(output.request_id)
                error = InternalError("The server met an internal error; the log has the details.")
                self.replica_broke(replica, ticket, error)
            has_room = has_room or output.end is not None
        if stats is not None:
            if stats.not_batched and self.availability.info is not None:
                self.availability.info = msgspec.structs.replace(self.availability.info, not_batched=stats.not_batched)
            self._emit(StepDone(model=self.name, replica=replica.index, stats=stats))
        if has_room:
            self.fleet.notify()
        if has_room or (len(self._queue) and self._suspect is None):
            self._dispatch_waiting()

    def _process_output(self, replica: Replica, ticket: Ticket, output: Output, now: float) -> None:
        end = output.end
        if end is not None:
            replica.release(ticket)
        if ticket.runner is not replica or ticket.hedge_replica is not None:
            has_content = output.deltas or output.prompt is not None or output.prediction is not None
            has_begun = has_content or (end is not None and end.outcome == "done")
            if has_begun and replica in (ticket.runner, ticket.hedge_replica):
                self._settle_hedge(ticket, replica, now)
            else:
                if end is not None:
                    self._retries.drop_attempt(ticket, replica)
                return
        if output.deltas or output.prediction is not None or end is not None:
            self._clear_suspect(ticket)
            if not ticket.stream.progress.has_output:
                if end is None or end.outcome in ("done", "refused") or output.deltas or output.prediction is not None:
                    self._note_answered(ticket, replica, now)
                else:
                    self._note_unanswered(ticket, replica, now)
        if ticket.token_ids is not None:
            output = record_output(ticket, output)
        if end is None:
            ticket.stream.push(output, now)
        else:
            self._note_drained(end, now)
            self._end(ticket, end, output)

    def replica_relayed(self, replica: Replica, ticket: Ticket, item: Relayed) -> None:
        now = clock.now()
        end = item.end
        if end is not None:
            replica.release(ticket)
        if ticket.runner is not replica or ticket.hedge_replica is not None:
            if replica in (ticket.runner, ticket.hedge_replica) and (end is None or end.outcome == "done"):
                self._settle_hedge(ticket, replica, now)
            else:
                if end is not None:
                    self._retries.drop_attempt(ticket, replica)
                    self._slot_freed()
                return
        is_cleared = ticket is self._suspect
        if not ticket.stream.progress.has_output:
            self._clear_suspect(ticket)
            if item.head is not None:
                self._note_answered(ticket, replica, now)
            else:
                self._note_unanswered(ticket, replica, now)
        if end is None:
            ticket.stream.relay(item, now)
            if is_cleared and len(self._queue):
                self._dispatch_waiting()
            return
        if end.outcome == "failed" and not is_deadline_end(end):
            member = self.fleet.member_of(replica)
            if member is not None:
                self.fleet.health.failed(member, ticket.dispatched_at, now, "an answer broke off")
        self._note_drained(end, now)
        self._end(ticket, end, item)
        self._slot_freed()

    def _note_drained(self, end: End, now: float) -> None:
        """Measure the drain rate. A cancelled request, or one past its deadline, was not served and is not counted."""
        if end.outcome != "cancelled" and not is_deadline_end(end):
            self.availability.drain_rate.ended(now, has_waiting=len(self._queue) > 0)
        elif not len(self._queue):
            self.availability.drain_rate.paused()

    def _note_answered(self, ticket: Ticket, replica: Replica, now: float) -> None:
        member, begun_at = self.fleet.member_of(replica), ticket.dispatched_at
        if member is not None and begun_at is not None:
            self.fleet.health.answered(member, now - begun_at, begun_at, now)

    def _note_unanswered(self, ticket: Ticket, replica: Runner, now: float) -> None:
        """Note that an attempt at this replica ended without output, for the detection of slow replicas."""
        member = self.fleet.member_of(replica)
        begun_at = ticket.hedged_at if replica is ticket.hedge_replica else ticket.dispatched_at
        if member is not None and begun_at is not None:
            self.fleet.health.waited(member, now - begun_at, now)

    def _settle_hedge(self, ticket: Ticket, replica: Replica, now: float) -> None:
        """This replica of a hedge's two has begun to answer: use its answer and cancel the other attempt."""
        other = ticket.hedge_replica if replica is ticket.runner else ticket.runner
        if other is not None:
            self._note_unanswered(ticket, other, now)
        self._retries.settle_hedge(ticket, replica)

    def replica_refused(
        self, replica: Replica, ticket: Ticket, error: InferdError, *, counts: bool, retry: bool
    ) -> None:
        now = clock.now()
        replica.release(ticket)
        member = self.fleet.member_of(replica)
        self._note_unanswered(ticket, replica, now)
        if counts and member is not None:
            begun_at = ticket.hedged_at if replica is ticket.hedge_replica else ticket.dispatched_at
            self.fleet.health.failed(member, begun_at, now, error.message)
        self._clear_suspect(ticket)
        ticket.failed_replicas, ticket.last_refusal = (*ticket.failed_replicas, replica), error
        if not self._retries.drop_attempt(ticket, replica):
            if ticket.stream.is_closed:
                self._end(ticket, End("cancelled"))
            elif retry and self._retries.may_retry(ticket, now):
                self._retries.back_off(ticket)
            else:
                self._end_refused(ticket, error)
        self._slot_freed()

    def _end_refused(self, ticket: Ticket, error: InferdError) -> None:
        """End a request with the error of the last replica that refused it, as no other replica is left."""
        if isinstance(error, Overloaded | Unavailable):
            self._refuse(ticket, error)
        else:
            self._fail(ticket, error)

    def replica_broke(self, replica: Replica, ticket: Ticket, error: InferdError) -> None:
        if replica.ticket(ticket.request.id) is ticket:
            replica.release(ticket)
        if self._live.get(ticket.request.id) is ticket and ticket.runner is replica:
            self._clear_suspect(ticket)
            self._fail(ticket, error)
        self._slot_freed()

    def _slot_freed(self) -> None:
        self.fleet.notify()
        if len(self._queue):
            self._dispatch_waiting()

    def replica_lost(self, replica: Replica, tickets: list[Ticket], reason: str) -> None:
        """A worker died. Its requests are retried or continued elsewhere where ``_run_again`` allows it; others end."""
        member = self.fleet.member_of(replica)
        if member is not None and tickets:
            self.fleet.health.failed(member, None, clock.now(), reason)
        self._placement.forget(replica.index)
        for ticket in tickets:
            self._clear_suspect(ticket)
            if self._retries.drop_attempt(ticket, replica):
                continue
            ticket.worker_deaths += 1
            self._run_again(ticket, "The model's worker stopped")
        self.fleet.notify()
        self._recheck_waiting()

    def reassign(self, replica: Replica) -> None:
        """A replica is removed while requests are in flight in it. They run again elsewhere and become no suspects."""
        for ticket in replica.release_all():
            replica.cancel(ticket.request.id)
            self._clear_suspect(ticket)
            if not self._retries.drop_attempt(ticket, replica):
                self._run_again(ticket, "The model's replica was replaced")

    def _run_again(self, ticket: Ticket, what_happened: str) -> None:
        """Put a request whose replica is gone back into the queue, or end it.

        A request runs again from its beginning if the client has received nothing, and within the retry budget if
        anything was computed. One that another worker can continue is continued. ``what_happened`` begins the error.
        """
        request = ticket.request
        so_far = continuation(ticket)
        if ticket.stream.is_closed:
            self._end(ticket, End("cancelled", ticket.stream.progress.usage))
        elif self._is_stopped:
            self._refuse_or_fail(ticket, self.availability.unavailable())
        elif ticket.stream.progress.has_output and so_far is None and not ticket.stream.is_whole:
            self._fail(
                ticket,
                WorkerDied(
                    f"{what_happened} after output had been sent. The answer is incomplete; send the request again."
                ),
            )
        elif not request.idempotent:
            self._fail(ticket, WorkerDied(f"{what_happened}, and this request may not be run twice."))
        elif ticket.worker_deaths >= MAX_WORKER_DEATHS:
            self._fail(
                ticket,
                WorkerDied(
                    f"{ticket.worker_deaths} workers died while they worked on this request, so it is not tried again.",
                    code="poison_request",
                ),
            )
        elif so_far is not None:
            assert isinstance(request, GenerateRequest)
            ticket.request = msgspec.structs.replace(request, resumes=so_far)
            ticket.relay = None  # a remote server cannot continue an answer
            self._emit(Retried(model=self.name, kind="continuation", granted=True))
            self._requeue(ticket)
        elif ticket.stream.progress.has_output and not self._retries.may_retry(ticket, clock.now()):
            self._fail(
                ticket,
                WorkerDied(f"{what_happened} before the answer was complete, and it may not be tried again now."),
            )
        else:
            if ticket.stream.is_whole:
                ticket.stream.restart()
            self._requeue(ticket)

    def replica_failed(self, replica: Replica) -> None:
        self.fleet.notify()
        self._note_settled()
        self._recheck_waiting()

    def replica_unreachable(self, replica: Replica) -> None:
        self.replica_failed(replica)

    def members_changed(self) -> None:
        self.fleet.notify()
        self._note_settled()
        if not self._is_stopped:
            self._recheck_waiting()

    def _note_settled(self) -> None:
        if self.fleet.is_settled:
            self.settled.set()

    # -- the end of a request ---------------------------------------------------------------

    def _fail(self, ticket: Ticket, error: InferdError) -> None:
        self._end(ticket, End("failed", ticket.stream.progress.usage, failure=error.to_failure()))

    def _refuse(self, ticket: Ticket, error: InferdError) -> None:
        self._end(ticket, End("refused", failure=error.to_failure()))

    def _refuse_or_fail(self, ticket: Ticket, error: InferdError) -> None:
        if ticket.stream.progress.has_output:
            self._fail(ticket, error)
        else:
            self._refuse(ticket, error)

    def _end(self, ticket: Ticket, end: End, last: Output | Relayed | None = None) -> None:
        """End a request: pass on its last item, settle its cost and emit its event.

        ``last`` is the replica's final item; None where the pool ends the request.
        """
        now = clock.now()
        request, stream = ticket.request, ticket.stream
        del self._live[request.id]
        end = complete_end(end, ticket, last, now)
        ticket.runner = None
        self._note_wait(ticket, end, now)
        if isinstance(last, Relayed):
            stream.relay(Relayed(request.id, last.head, last.data, end), now)
        else:
            deltas, prompt, prediction = (
                (last.deltas, last.prompt, last.prediction) if last is not None else ((), None, None)
            )
            stream.push(Output(request.id, deltas, prompt, end, prediction), now)
        num_tokens = end.usage.prompt_tokens + end.usage.completion_tokens
        if num_tokens or end.outcome != "done":  # else the replica did not report the usage
            self._queue.settle(ticket, num_tokens)
        self.last_used_at = now
        self._emit(ended_event(ticket, end))
        if self.is_idle:
            self._became_idle()
        self._reporter.report()

    def _note_wait(self, ticket: Ticket, end: End, now: float) -> None:
        """Report the outcome to the bound of waiting: answers, and work for clients that had given up. Batch work does
        not count."""
        begun_at = ticket.dispatched_at
        if begun_at is None:
            return
        if end.outcome == "done":
            self.availability.wait_bound.answered(now - begun_at)
        elif (
            (end.outcome == "cancelled" or is_deadline_end(end))
            and ticket.is_answer_unseen
            and not is_batch_work(ticket.request)
        ):
            self.availability.wait_bound.given_up(begun_at - ticket.queued_at, begun_at, now)

    def _became_idle(self) -> None:
        self.idle.set()
        self.fleet.notify()
        self._on_idle(self)

    def cancel_all(self, error: InferdError | None = None) -> None:
        """Accept no more requests and cancel all.

        Waiting requests end at once. Requests in flight end when their replica has reported the usage; ``idle`` is set
        then. ``error`` is their error; without it the error says that the server shuts down.
        """
        self._is_stopped = self.availability.is_stopped = True
        error = error or self.availability.unavailable()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for ticket in self._queue.clear():
            self._refuse_or_fail(ticket, error)
        self._retries.cancel_backoffs()
        for member in self.fleet.members:
            member.replica.convert_direct()
        for ticket in list(self._live.values()):
            if ticket.runner is None:  # it was in backoff before a retry
                self._fail(ticket, error)
            elif ticket.cancel_error is None and not ticket.stream.is_closed:
                ticket.cancel_error = error
                self._cancel(ticket)

    async def cancel_and_wait(self, error: InferdError | None = None) -> None:
        """Cancel all requests and wait until they have ended, at most ``CANCEL_WAIT_S`` seconds."""
        self.cancel_all(error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_WAIT_S):
                await self.idle.wait()

    def abort(self, error: InferdError | None = None) -> None:
        """Cancel and end all requests at once, with the usage that is known, and stop changes to the fleet."""
        self.cancel_all(error)
        error = error or self.availability.unavailable()
        for member in self.fleet.members:
            for ticket in member.replica.release_all():
                member.replica.cancel(ticket.request.id)
        for ticket in list(self._live.values()):
            self._fail(ticket, error)
        self._retries.abandoned.clear()
        self.settled.set()
        self.fleet.halt()

    # -- lifecycle --------------------------------------------------------------------------

    def start(self) -> None:
        """Start the replicas; does not wait for them."""
        self.fleet.start()
        self._note_settled()

    async def stop(self) -> None:
        """End all requests at once and stop the replicas."""
        self.abort()
        await self.fleet.stop()

    def refuse_loads(self, error: InferdError | None) -> None:
        """Set the error for requests that need the model in memory; None: the next such request loads it again."""
        if not self._is_stopped:
            self.availability.load_error = error
            self._recheck_waiting()

    async def configure(self, config: ModelConfig) -> Applied:
        """Apply another configuration of the model, without dropping a request."""
        old, self.config = self.config, config
        self.availability.config = config
        self._queue.configure(config.queue)
        self.availability.wait_bound.configure(config.queue.max_wait_s)
        self._placement.config = config
        self._retries.configure(config.retry)
        applied = await self.fleet.apply(config)
        names = [name for name in IN_PLACE_FIELDS if getattr(old, name) != getattr(config, name)]
        if names:
            applied.done.append(f"{self.name}: {', '.join(names)} changed")
        self._recheck_waiting()
        return applied

    async def remove(self) -> None:
        """Remove the model: accepted requests get ``drain_s`` seconds to finish, then the replicas stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s):
                await self.idle.wait()
        removed = Unavailable(f"The model {self.name!r} was removed from this server.", code="model_removed")
        await self.cancel_and_wait(removed)
        self.abort(removed)
        await self.fleet.unload("removed", 0.0, is_idle=lambda: True)
        await self.stop()

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued, in backoff or in flight."""
        return not self._live and not self._num_direct

    # -- status -----------------------------------------------------------------------------

    def ready_replica(self) -> LocalReplica:
        """The ready worker with the least work, for calls of its tokenizer.

        Raises Unavailable; InvalidRequest where the model has no local replicas.
        """
        if not self.config.num_local:
            raise InvalidRequest(f"The model {self.name!r} runs on another server: its tokenizer is not here.")
        ready = [m.replica for m in self.fleet.locals if m.replica.is_ready and isinstance(m.replica, LocalReplica)]
        if not ready or self._is_stopped:
            if self.availability.may_load_on_demand:
                self._demand(self)
            raise self.availability.unavailable()
        return min(ready, key=lambda replica: replica.outstanding)

    @property
    def replicas(self) -> list[Replica]:
        return [member.replica for member in self.fleet.members]

    @property
    def load_failure(self) -> Failure | None:
        """Why the model cannot be served; None: it is served, or may still become ready."""
        return self.availability.load_failure

    @property
    def status(self) -> ModelStatus:
        return self.availability.status(len(self._retries.backing_off))


IN_PLACE_FIELDS = (
    "queue",
    "routing",
    "breaker",
    "retry",
    "cache",
    "region",
    "load",
    "idle_after_s",
    "resume_streams",
    "drain_s",
    "versions",
)
"""Settings that change without another worker. The fleet applies the other settings."""
