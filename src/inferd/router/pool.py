"""The requests of one model, from their admission to their end.

All code here runs in one event loop, so a request is in exactly one state at a time. It is queued, in backoff before a
retry, in flight in one replica (hedged: in two), or ended. ``Pool`` admits requests and receives replicas' outputs.
``dispatcher`` sends requests to replicas, ``live_requests`` ends them, and the fleet decides which replicas exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

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
from inferd.events import Emit, RequestRefused, Retried, StepDone
from inferd.router.adapters import PoolAdapters
from inferd.router.continuation import continuation, record_output
from inferd.router.dispatcher import Dispatcher
from inferd.router.live_requests import LiveRequests
from inferd.router.queue_reporter import QueueReporter
from inferd.router.replicas.fleet import Fleet, RemoteMaker
from inferd.router.replicas.machines import Machines
from inferd.router.replicas.member import Member
from inferd.router.replicas.replica import LocalReplica, Replica
from inferd.router.request_end import deadline_error, is_deadline_end
from inferd.router.status import Applied, Demand, ModelStatus, ReplicaStatus
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
    Sink,
    StepStats,
)
from inferd.worker.supervisor import Patience

_log = logging.getLogger("inferd.router")

CANCEL_WAIT_S = 2.0  # for replicas to report the usage of cancelled requests
MAX_WORKER_DEATHS = 2  # with one request in flight, before that request fails


class Pool:
    """Accepts requests for one model and ends each exactly once.

    ``demand`` is called when a request waits for a model that is not in memory. ``on_idle`` is called when no request
    is queued or in flight any more. ``may_surge``, ``pin_below`` and ``make_remote`` are passed to the fleet.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        emit: Emit,
        *,
        machines: Machines,
        patience: Patience,
        demand: Callable[[Pool], None],
        may_surge: Callable[[Pool, Member], bool],
        on_idle: Callable[[Pool], None],
        pin_below: Path | None = None,
        make_remote: RemoteMaker | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self._emit = emit
        self._demand = demand
        self._on_idle = on_idle
        self._queue = RequestQueue(config.queue)
        self.fleet = Fleet(
            name,
            config,
            self,
            emit,
            machines,
            patience,
            lambda member: may_surge(self, member),
            pin_below,
            make_remote,
        )
        self.availability = Availability(name, config, self._queue, self.fleet)
        self._reporter = QueueReporter(name, self._queue, self.fleet, lambda: len(self._retries.backing_off), emit)
        self._live = live = LiveRequests(self._queue, self.availability, self._reporter, emit, self._became_idle)
        self._dispatcher = Dispatcher(
            name,
            config,
            self._queue,
            self.fleet,
            self.availability,
            live,
            self._reporter,
            emit,
            demand=lambda: demand(self),
        )
        self._retries = self._dispatcher.retries
        self.placement = self._dispatcher.placement
        self.adapters = PoolAdapters(config, self.fleet, self._num_using)
        self._num_accepted = 0
        self._num_batch_work = 0  # of them
        self.settled = asyncio.Event()  # every replica has been ready, has failed or does not answer

    # -- admission --------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink, relay: Relay | None = None) -> Ticket:
        """Accept a request: dispatch it to a replica, or put it into the queue. ``sink`` gets its items and its end.

        Raises Overloaded when the queue is full or the deadline cannot be met; Unavailable when the model cannot be
        served. Raises DeadlineExceeded when the deadline has passed; InvalidRequest when the id is in use.
        """
        now = clock.now()
        if request.id in self._live.tickets or request.id in self._retries.abandoned:
            raise InvalidRequest(f"A request with the id {request.id!r} is already running.", param="request_id")
        if not request.arrived_at:
            request = msgspec.structs.replace(request, arrived_at=now)
        ticket = Ticket(request, sink, self, self._num_accepted, now + self.config.queue.timeout_s, relay)
        if (request.deadline_s is not None or request.first_byte_s is not None) and ticket.due_at <= now:
            raise deadline_error(request, now)
        ticket.queued_at = now
        self._retries.budget.note(now)
        able: Sequence[Member] = ()
        if not self.availability.is_stopped and not self._queue.entries:
            able = self.placement.able(ticket, self.fleet.available(now))
        if not able:
            self._check_may_wait(ticket, now)
        self._num_accepted += 1
        self._num_batch_work += is_batch_work(request)
        self._live.add(ticket)
        if able:
            self._dispatcher.dispatch(ticket, able, now)
            if not self._reporter.is_scheduled:
                self._reporter.report()
        else:
            ticket.place = self._queue.place_of(request)
            self.availability.outages.begin_wait(ticket, now)
            self._queue.push(ticket)
            self._dispatcher.dispatch_waiting()
        return ticket

    def _num_using(self, adapter: str) -> int:
        """The requests of an adapter that have not ended."""
        return sum(getattr(ticket.request, "adapter", "") == adapter for ticket in self._live.tickets.values())

    def _check_may_wait(self, ticket: Ticket, now: float) -> None:
        """Raise the error of a request that cannot be dispatched at once and may not wait either."""
        if ticket.request.is_copy:
            ticket.drop_callbacks()
            raise Overloaded("A copy does not wait for a replica.", code="copy_dropped")
        error, reason = self.availability.replica_refusal(ticket, now)
        if error is None:
            error, reason = self.availability.wait_refusal(ticket, now)
        if error is None:
            error, reason = self._queue_refusal(ticket, now)
        if error is not None:
            self._emit(RequestRefused(model=self.name, reason=reason, tenant=ticket.request.tenant))
            ticket.drop_callbacks()
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: a reference cycle would keep the request alive

    def _queue_refusal(self, ticket: Ticket, now: float) -> Refusal:
        """Make room in the queue by refusing requests of lower classes; the refusal where the request still does not
        fit."""
        for displaced in self._queue.make_room(ticket.request):
            tenant = displaced.request.tenant
            self._emit(RequestRefused(model=self.name, reason="queue_full", tenant=tenant, was_queued=True))
            self._live.refuse_or_fail(displaced, self._displaced_error(now))
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

    def cancel(self, ticket: Ticket) -> None:
        """The client disconnected: end a waiting request, and ask the replicas to cancel one in flight."""
        request_id = ticket.request.id
        if ticket.is_waiting:
            self._queue.remove(ticket)
            self._live.end(ticket, End("cancelled"))
        elif self._retries.cancel_backoff(request_id):
            self._live.end(ticket, End("cancelled"))
        else:
            for replica in (ticket.runner, ticket.hedge_replica):
                if replica is not None:
                    replica.cancel(request_id)

    def pause(self, ticket: Ticket, is_paused: bool) -> None:
        """Tell the replica of a request in flight that its reader is slow, or no longer slow."""
        replica = ticket.runner
        if replica is None:
            return
        if is_paused:
            replica.pause(ticket.request.id)
        else:
            replica.resume(ticket.request.id)

    # -- calls from replicas (``FleetOwner``) -------------------------------------------------

    def replica_ready(self, replica: Replica) -> None:
        """A replica became ready: dispatch waiting requests to it."""
        member = self.fleet.member_of(replica)
        if member is None:
            return
        if replica.info is not None:
            self.availability.info = replica.info
        self.availability.load_error = None
        self.placement.forget(replica.index)
        self.fleet.ready(member)
        self.availability.outages.update(clock.now())
        self._note_settled()
        self._dispatcher.dispatch_waiting()

    def replica_has_room(self) -> None:
        """A replica can take requests again: dispatch waiting requests."""
        self._dispatcher.dispatch_waiting()

    def replica_outputs(self, replica: Replica, outputs: list[Output], stats: StepStats | None) -> None:
        """Outputs of a worker arrived, with the statistics of the engine's step if there was one."""
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
        if has_room or (self._queue.entries and self._dispatcher.suspect is None):
            self._dispatcher.dispatch_waiting()

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
            replica.prompt_computed(output.request_id)
            self._dispatcher.clear_suspect(ticket)
            if not ticket.has_output:
                if end is None or end.outcome in ("done", "refused") or output.deltas or output.prediction is not None:
                    self._note_answered(ticket, replica, now)
                else:
                    self._note_unanswered(ticket, replica, now)
        if ticket.token_ids is not None:
            output = record_output(ticket, output)
        if end is None:
            ticket.deliver_output(output, now)
        else:
            self._live.note_drained(end, now)
            self._live.end(ticket, end, output, now)

    def replica_relayed(self, replica: Replica, ticket: Ticket, item: Relayed) -> None:
        """A piece of a relayed answer arrived."""
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
                    self._dispatcher.slot_freed()
                return
        if item.data:
            replica.prompt_computed(item.request_id)
        is_cleared = ticket is self._dispatcher.suspect
        if not ticket.has_output:
            if is_cleared:
                self._dispatcher.suspect = None
            if item.head is not None:
                self._note_answered(ticket, replica, now)
            else:
                self._note_unanswered(ticket, replica, now)
        if end is None:
            ticket.deliver_piece(item, now)
            if is_cleared and self._queue.entries:
                self._dispatcher.dispatch_waiting()
            return
        if end.outcome == "failed" and not is_deadline_end(end):
            member = self.fleet.member_of(replica)
            if member is not None:
                self.fleet.health.failed(member, ticket.dispatched_at, now, "an answer broke off")
        self._live.note_drained(end, now)
        self._live.end(ticket, end, item, now)
        self._dispatcher.slot_freed()

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
        """A replica ended a request before its answer began: retry it, or end it with ``error``."""
        now = clock.now()
        replica.release(ticket)
        member = self.fleet.member_of(replica)
        self._note_unanswered(ticket, replica, now)
        if counts and member is not None:
            begun_at = ticket.hedged_at if replica is ticket.hedge_replica else ticket.dispatched_at
            self.fleet.health.failed(member, begun_at, now, error.message)
        self._dispatcher.clear_suspect(ticket)
        ticket.failed_replicas, ticket.last_refusal = (*ticket.failed_replicas, replica), error
        if not self._retries.drop_attempt(ticket, replica):
            if ticket.is_closed:
                self._live.end(ticket, End("cancelled"))
            elif retry and self._retries.may_retry(ticket, now):
                self._retries.back_off(ticket)
            else:
                self._live.end_refused(ticket, error)
        self._dispatcher.slot_freed()

    def replica_broke(self, replica: Replica, ticket: Ticket, error: InferdError) -> None:
        """An exception was raised while an output was processed: end the request with ``error``."""
        if replica.ticket(ticket.request.id) is ticket:
            replica.release(ticket)
        if self._live.tickets.get(ticket.request.id) is ticket and ticket.runner is replica:
            self._dispatcher.clear_suspect(ticket)
            self._live.fail(ticket, error)
        self._dispatcher.slot_freed()

    def replica_lost(self, replica: Replica, tickets: list[Ticket], reason: str, *, is_machine_lost: bool) -> None:
        """A worker died. Its requests are retried or continued elsewhere where ``_run_again`` allows it; others end.

        ``is_machine_lost``: it ended with its machine, which counts against no request.
        """
        member = self.fleet.member_of(replica)
        if member is not None and tickets:
            self.fleet.health.failed(member, None, clock.now(), reason)
        self.placement.forget(replica.index)
        self.availability.outages.update(clock.now())
        for ticket in tickets:
            self._dispatcher.clear_suspect(ticket)
            if self._retries.drop_attempt(ticket, replica):
                continue
            ticket.worker_deaths += not is_machine_lost
            self._run_again(ticket, "The model's worker stopped")
        self.fleet.notify()
        self._dispatcher.recheck_waiting()

    def reassign(self, replica: Replica) -> None:
        """A replica is removed while requests are in flight in it. They run again elsewhere and become no suspects."""
        for ticket in replica.release_all():
            replica.cancel(ticket.request.id)
            self._dispatcher.clear_suspect(ticket)
            if not self._retries.drop_attempt(ticket, replica):
                self._run_again(ticket, "The model's replica was replaced")

    def _run_again(self, ticket: Ticket, what_happened: str) -> None:
        """Put a request whose replica is gone back into the queue, or end it.

        A request runs again from its beginning if the client has received nothing, and within the retry budget if
        anything was computed. One that another worker can continue is continued. ``what_happened`` begins the error.
        """
        request = ticket.request
        so_far = continuation(ticket)
        if ticket.is_closed:
            self._live.end(ticket, End("cancelled", ticket.usage))
        elif self.availability.is_stopped:
            self._live.refuse_or_fail(ticket, self.availability.unavailable())
        elif ticket.has_output and so_far is None and not ticket.is_whole:
            self._live.fail(
                ticket,
                WorkerDied(
                    f"{what_happened} after output had been sent. The answer is incomplete; send the request again."
                ),
            )
        elif not request.idempotent:
            self._live.fail(ticket, WorkerDied(f"{what_happened}, and this request may not be run twice."))
        elif ticket.worker_deaths >= MAX_WORKER_DEATHS:
            self._live.fail(
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
            self._dispatcher.requeue(ticket)
        elif ticket.has_output and not self._retries.may_retry(ticket, clock.now()):
            self._live.fail(
                ticket,
                WorkerDied(f"{what_happened} before the answer was complete, and it may not be tried again now."),
            )
        else:
            if ticket.is_whole:
                ticket.restart()
            self._dispatcher.requeue(ticket)

    def replica_unplaced(self, replica: Replica) -> None:
        """No machine may run the replica's worker now: the start of the server does not wait for it."""
        self.fleet.notify()
        self._note_settled()

    def replica_failed(self, replica: Replica) -> None:
        """A worker has failed for good: end the requests that no other replica can serve."""
        self.availability.outages.update(clock.now())
        self.fleet.notify()
        self._note_settled()
        self._dispatcher.recheck_waiting()

    def replica_unreachable(self, replica: Replica) -> None:
        """A remote server does not answer: end the requests that no other replica can serve."""
        self.replica_failed(replica)

    def members_changed(self) -> None:
        """Replicas were added or removed: check again which waiting requests can be served."""
        self.fleet.notify()
        self.availability.outages.update(clock.now())
        self._note_settled()
        if not self.availability.is_stopped:
            self._dispatcher.recheck_waiting()

    def _note_settled(self) -> None:
        if self.fleet.is_settled:
            self.settled.set()

    # -- the end of all requests ------------------------------------------------------------

    def _became_idle(self) -> None:
        self.fleet.notify()
        self._on_idle(self)

    def cancel_all(self, error: InferdError | None = None) -> None:
        """Accept no more requests and cancel all.

        Waiting requests end at once. Requests in flight end when their replica has reported the usage; ``idle`` is set
        then. ``error`` is their error; without it the error says that the server shuts down.
        """
        self.availability.is_stopped = True
        error = error or self.availability.unavailable()
        self._dispatcher.stop()
        for ticket in self._queue.clear():
            self._live.refuse_or_fail(ticket, error)
        for ticket in list(self._live.tickets.values()):
            if ticket.runner is None:  # it was in backoff before a retry
                self._live.fail(ticket, error)
            elif ticket.cancel_error is None and not ticket.is_closed:
                ticket.cancel_error = error
                self.cancel(ticket)

    async def cancel_and_wait(self, error: InferdError | None = None) -> None:
        """Cancel all requests and wait until they have ended, at most ``CANCEL_WAIT_S`` seconds."""
        self.cancel_all(error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_WAIT_S):
                await self._live.idle.wait()

    def abort(self, error: InferdError | None = None) -> None:
        """Cancel and end all requests at once, with the usage that is known, and stop changes to the fleet."""
        self.cancel_all(error)
        error = error or self.availability.unavailable()
        for member in self.fleet.members:
            for ticket in member.replica.release_all():
                member.replica.cancel(ticket.request.id)
        for ticket in list(self._live.tickets.values()):
            self._live.fail(ticket, error)
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
        self.adapters.halt()
        self.abort()
        await self.fleet.stop()

    def refuse_loads(self, error: InferdError | None) -> None:
        """Set the error for requests that need the model in memory; None: the next such request loads it again."""
        if not self.availability.is_stopped:
            self.availability.load_error = error
            self._dispatcher.recheck_waiting()

    async def configure(self, config: ModelConfig) -> Applied:
        """Apply another configuration of the model, without dropping a request."""
        old, self.config = self.config, config
        self.availability.config = config
        self._queue.configure(config.queue)
        self.availability.wait_bound.configure(config.queue.max_wait_s)
        self._dispatcher.configure(config)
        applied = await self.fleet.apply(config)
        if old.adapters or config.adapters:
            adapters = await self.adapters.configure(self.name, config)
            applied.done += adapters.done
            applied.failed += adapters.failed
        names = [name for name in IN_PLACE_FIELDS if getattr(old, name) != getattr(config, name)]
        if names:
            applied.done.append(f"{self.name}: {', '.join(names)} changed")
        self._dispatcher.recheck_waiting()
        return applied

    async def set_adapters(self, adapters: Mapping[str, str]) -> None:
        """Have other adapters (name -> source), with all other settings as they are; returns when the ready replicas
        have loaded them, as far as they can."""
        self.config = msgspec.structs.replace(self.config, adapters=dict(adapters))
        await self.adapters.configure(self.name, self.config)

    async def remove(self) -> None:
        """Remove the model: accepted requests get ``drain_s`` seconds to finish, then the replicas stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s):
                await self._live.idle.wait()
        removed = Unavailable(f"The model {self.name!r} was removed from this server.", code="model_removed")
        await self.cancel_and_wait(removed)
        self.abort(removed)
        await self.fleet.unload("removed", 0.0, is_idle=lambda: True)
        await self.stop()

    # -- status -----------------------------------------------------------------------------

    @property
    def idle(self) -> asyncio.Event:
        """Set while no request is queued, in backoff or in flight."""
        return self._live.idle

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued, in backoff or in flight."""
        return self._live.is_idle

    @property
    def last_used_at(self) -> float:
        """When the last request ended, or the pool was made."""
        return self._live.last_used_at

    def ready_replica(self) -> LocalReplica:
        """The ready worker with the least work, for calls of its tokenizer.

        Raises Unavailable; InvalidRequest where the model has no local replicas.
        """
        if not self.config.num_local:
            raise InvalidRequest(f"The model {self.name!r} runs on another server: its tokenizer is not here.")
        ready = [m.replica for m in self.fleet.locals if m.replica.is_ready and isinstance(m.replica, LocalReplica)]
        if not ready or self.availability.is_stopped:
            if self.availability.may_load_on_demand:
                self._demand(self)
            raise self.availability.unavailable()
        return min(ready, key=lambda replica: replica.outstanding)

    @property
    def replicas(self) -> list[Replica]:
        """The replicas of the model, those being removed included."""
        return [member.replica for member in self.fleet.members]

    @property
    def replica_statuses(self) -> tuple[ReplicaStatus, ...]:
        """The status of every replica."""
        return tuple([member.status() for member in self.fleet.members])

    @property
    def demand(self) -> Demand:
        """The load of the model, and its local replicas."""
        now, info = clock.now(), self.availability.info
        locals_ = self.fleet.locals
        ready = [member for member in locals_ if member.replica.is_ready]
        failed = sum(member.replica.failure is not None for member in locals_)
        oldest_at = self._queue.oldest_at
        # Batch work takes what is left, and is counted apart.
        deferred, accepted = self._live.num_batch_work, self._num_accepted - self._num_batch_work
        tickets = self._live.tickets
        backing_off = sum([not is_batch_work(tickets[name].request) for name in self._retries.backing_off])
        in_flight = sum(member.replica.num_but_batch_work for member in self.fleet.members)
        ahead = sum([_ahead(member.replica) for member in ready])
        return Demand(
            accepted=accepted,
            ended=accepted - (len(tickets) - deferred),
            waiting=len(self._queue) - self._queue.num_batch_work + backing_off + ahead,
            deferred=deferred,
            oldest_wait_s=0.0 if oldest_at is None else now - oldest_at,
            in_flight=in_flight - ahead,
            busy=sum(
                member.replica.utilization
                for member in ready
                if isinstance(member.replica, LocalReplica) and member.replica.num_in_flight
            ),
            ready=len(ready),
            starting=len(locals_) - len(ready) - failed,
            failed=failed,
            leaving=sum(member.kind == "local" and member.is_leaving for member in self.fleet.members),
            ready_s=self.fleet.load_s,
            idle_s=now - self._live.last_used_at if self._live.is_idle else 0.0,
            num_threads=0 if info is None else info.num_threads,
            num_cores=0 if info is None else len(info.cores),
            is_changing=self.fleet.is_changing,
        )

    @property
    def load_failure(self) -> Failure | None:
        """Why the model cannot be served; None: it is served, or may still become ready."""
        return self.availability.load_failure

    @property
    def status(self) -> ModelStatus:
        """The status of the model."""
        return self.availability.status(len(self._retries.backing_off))


def _ahead(replica: Replica) -> int:
    """Requests that wait in the worker: a replica has more than it computes together."""
    together = 0 if replica.info is None else replica.info.max_num_seqs
    return max(0, replica.num_but_batch_work - together) if together else 0


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
    "rollout",
    "drift",
    "scaling",
    "placement",
)
"""Settings that change without another worker. The fleet applies the other settings."""
