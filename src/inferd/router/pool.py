"""One model: its queue, its replicas, and every request between the door and its one end.

All of it runs in one event loop, so a request is in exactly one place at a time: waiting in the queue,
in flight in one replica, or ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from inferd import clock
from inferd.config import ModelConfig
from inferd.errors import DeadlineExceeded, InferdError, InvalidRequest, Overloaded, Unavailable, WorkerDied
from inferd.events import Emit, QueueChanged, RequestEnded, RequestRefused, StepDone
from inferd.router.policy import choose
from inferd.router.queue import RequestQueue
from inferd.router.replica import LocalReplica, Replica
from inferd.router.status import ModelState, ModelStatus
from inferd.router.stream import Stream
from inferd.router.ticket import Ticket
from inferd.types import End, Failure, GenerateRequest, ModelInfo, Output, Relay, Relayed, Request, StepStats
from inferd.worker.supervisor import Patience

MAX_KILLS = 2  # workers that a request may have been in when they died
_RETRY_AFTER_S = (1.0, 60.0)
_RATE_WINDOW_S = 30.0


class Pool:
    """Accepts requests for one model and ends each exactly once."""

    def __init__(
        self, name: str, config: ModelConfig, emit: Emit, *, command: Sequence[str], patience: Patience
    ) -> None:
        self._name = name
        self._config = config
        self._emit = emit
        self._queue = RequestQueue(config.queue.max_requests)
        self._replicas = [
            LocalReplica(name, index, config, self, emit, command, patience) for index in range(config.replicas)
        ]
        self._live: dict[str, Ticket] = {}
        self._num_accepted = 0
        self._suspect: Ticket | None = None  # in flight, and not yet cleared by an output
        self._ends: deque[float] = deque(maxlen=64)  # times of the last ends, for the drain rate
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._telling = False
        self._is_stopped = False
        self._created = clock.wall()
        self._info: ModelInfo | None = None
        self.idle = asyncio.Event()  # nothing is waiting or in flight
        self.idle.set()
        self.settled = asyncio.Event()  # every replica has been ready or has failed
        if not self._replicas:
            self.settled.set()

    # -- the door ---------------------------------------------------------------------------

    def submit(self, request: Request, relay: Relay | None = None) -> Stream:
        """Raises Overloaded when the queue is full, Unavailable when the model cannot be served."""
        if self._is_stopped or self._has_failed:
            self._emit(RequestRefused(model=self._name, reason="unavailable"))
            raise self._unavailable()
        if request.id in self._live:
            raise InvalidRequest(f"A request with the id {request.id!r} is already running.", param="request_id")
        if self._queue.is_full and (len(self._queue) or choose(self._replicas) is None):
            self._emit(RequestRefused(model=self._name, reason="queue_full"))
            raise Overloaded(
                f"{len(self._queue)} requests are already waiting for the model {self._name!r}; try again later.",
                retry_after_s=self._retry_after_s(),
            )
        now = clock.now()
        if not request.arrived_at:
            request = msgspec.structs.replace(request, arrived_at=now)
        stream = Stream(request.id, lambda: self._cancel(ticket))
        ticket = Ticket(request, stream, self._num_accepted, now + self._config.queue.timeout_s, relay)
        self._num_accepted += 1
        self._live[request.id] = ticket
        self.idle.clear()
        self._queue.push(ticket)
        self._pump()
        return stream

    def _cancel(self, ticket: Ticket) -> None:
        """The reader left: what waits never runs; what runs is told to stop."""
        if ticket.is_waiting:
            self._queue.remove(ticket)
            self._end(ticket, End("cancelled"))
        elif ticket.replica is not None:
            self._replicas[ticket.replica].cancel(ticket.request.id)

    # -- moving on --------------------------------------------------------------------------

    def _pump(self) -> None:
        """Give the replicas what they can take, then look at the clock for the rest."""
        now = clock.now()
        for expired in self._queue.pop_expired(now):
            self._expire(expired, now)
        while len(self._queue):
            replica = choose(self._replicas)
            if replica is None:
                break
            ticket = self._queue.pop(with_suspects=self._suspect is None)
            if ticket is None:
                break
            if ticket.is_suspect:
                self._suspect = ticket
            ticket.dispatched_at = now
            ticket.replica = replica.index
            replica.dispatch(ticket)
        self._arm(now)
        self._tell()

    def _arm(self, now: float) -> None:
        expiry = self._queue.next_expiry
        if expiry is None or (self._timer is not None and self._timer_at <= expiry):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = expiry
        self._timer = asyncio.get_running_loop().call_later(max(0.0, expiry - now) + 0.001, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    def _expire(self, ticket: Ticket, now: float) -> None:
        request = ticket.request
        if ticket.deadline_at <= now:
            error: InferdError = DeadlineExceeded(
                f"The request's deadline of {request.deadline_s:g} s passed while it waited. "
                "Allow more time, or try when the server is less busy."
            )
            self._end(ticket, End("failed", failure=error.to_failure()))
            return
        self._emit(RequestRefused(model=self._name, reason="queue_timeout"))
        error = Overloaded(
            f"The request waited for {self._config.queue.timeout_s:g} s without a replica becoming free; try again later.",
            retry_after_s=self._retry_after_s(),
            code="queue_timeout",
        )
        self._end(ticket, End("refused", failure=error.to_failure()))

    def _clear(self, ticket: Ticket) -> None:
        """A suspect produced something or ended: the next one may go."""
        if self._suspect is ticket:
            self._suspect = None

    # -- the replicas' owner ----------------------------------------------------------------

    def replica_ready(self, replica: Replica) -> None:
        self._info = replica.info
        self._settle()
        self._pump()

    def replica_has_room(self) -> None:
        self._pump()

    def replica_outputs(self, replica: Replica, outputs: list[Output], stats: StepStats | None) -> None:
        now = clock.now()
        has_room = False
        for output in outputs:
            ticket = replica.ticket(output.request_id)
            if ticket is None:
                continue
            if output.deltas or output.end is not None:
                self._clear(ticket)
            if output.end is None:
                ticket.stream.push(output, now)
            else:
                replica.release(ticket)
                self._ends.append(now)
                self._end(ticket, output.end, output)
                has_room = True
        if stats is not None:
            self._emit(StepDone(model=self._name, replica=replica.index, stats=stats))
        if has_room or (len(self._queue) and self._suspect is None):
            self._pump()

    def replica_lost(self, replica: Replica, tickets: list[Ticket], reason: str) -> None:
        """Requests that had shown nothing run again; the others end here."""
        now = clock.now()
        for ticket in tickets:
            self._clear(ticket)
            ticket.kills += 1
            if ticket.stream.is_closed:
                self._end(ticket, End("cancelled", ticket.stream.progress.usage))
            elif self._is_stopped:
                self._fail(ticket, self._unavailable())
            elif ticket.stream.progress.has_output:
                self._fail(
                    ticket,
                    WorkerDied(
                        "The model's worker stopped after output had been sent. The answer is incomplete; send the request again."
                    ),
                )
            elif ticket.kills >= MAX_KILLS:
                self._fail(
                    ticket,
                    WorkerDied(
                        f"{ticket.kills} workers died while they worked on this request, so it is not tried again.",
                        code="poison_request",
                    ),
                )
            else:
                ticket.expires_at = now + self._config.queue.timeout_s
                self._queue.push(ticket)
        self._pump()

    def replica_unreachable(self, replica: Replica) -> None:
        self._tell()

    def replica_relayed(self, replica: Replica, ticket: Ticket, item: Relayed) -> None:
        raise NotImplementedError

    def replica_refused(
        self, replica: Replica, ticket: Ticket, error: InferdError, *, counts: bool, retry: bool
    ) -> None:
        raise NotImplementedError

    def replica_failed(self, replica: Replica) -> None:
        self._settle()
        if self._has_failed:
            for ticket in self._queue.clear():
                self._fail(ticket, self._unavailable())
        self._tell()

    def _settle(self) -> None:
        if all(replica.was_ready or replica.failure is not None for replica in self._replicas):
            self.settled.set()

    # -- the one end ------------------------------------------------------------------------

    def _fail(self, ticket: Ticket, error: InferdError) -> None:
        self._end(ticket, End("failed", ticket.stream.progress.usage, failure=error.to_failure()))

    def _end(self, ticket: Ticket, end: End, last: Output | None = None) -> None:
        """``last`` is the worker's final output, when the end comes from there."""
        now = clock.now()
        request, progress = ticket.request, ticket.stream.progress
        del self._live[request.id]
        arrived = request.arrived_at
        timings = msgspec.structs.replace(
            end.timings,
            dispatched=ticket.dispatched_at - arrived if ticket.dispatched_at is not None else None,
            finished=end.timings.finished if end.timings.finished is not None else now - arrived,
        )
        if timings.first_token is None and progress.first_at is not None:
            timings = msgspec.structs.replace(timings, first_token=progress.first_at - arrived)
        end = msgspec.structs.replace(end, timings=timings)
        deltas, prompt = (last.deltas, last.prompt) if last is not None else ((), None)
        ticket.stream.push(Output(request.id, deltas, prompt, end), now)
        self._emit(_ended(ticket, end))
        if not self._live:
            self.idle.set()
        self._tell()

    def abort(self) -> None:
        """End everything that is still alive, and accept nothing more."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for ticket in self._queue.clear():
            self._fail(ticket, self._unavailable())
        for replica in self._replicas:
            for ticket in replica.release_all():
                replica.cancel(ticket.request.id)
                self._fail(ticket, self._unavailable())

    # -- start, stop, tell ------------------------------------------------------------------

    def start(self) -> None:
        for replica in self._replicas:
            replica.start()

    async def stop(self) -> None:
        self.abort()
        await asyncio.gather(*(replica.stop() for replica in self._replicas))

    def ready_replica(self) -> LocalReplica:
        """One to ask something of the tokenizer. Raises Unavailable."""
        ready = [replica for replica in self._replicas if replica.is_ready]
        if not ready or self._is_stopped:
            raise self._unavailable()
        return min(ready, key=lambda replica: replica.outstanding)

    @property
    def replicas(self) -> Sequence[LocalReplica]:
        return self._replicas

    @property
    def load_failure(self) -> Failure | None:
        """Why the model cannot be served; None while there is hope."""
        return self._replicas[0].failure if self._has_failed else None

    @property
    def status(self) -> ModelStatus:
        ready = sum(replica.is_ready for replica in self._replicas)
        return ModelStatus(
            name=self._name,
            state=self._state(ready),
            info=self._info,
            replicas=len(self._replicas),
            replicas_ready=ready,
            detail=self._detail(),
            created=self._created,
            waiting=len(self._queue),
            in_flight=sum(replica.num_in_flight for replica in self._replicas),
        )

    def _state(self, ready: int) -> ModelState:
        if self._is_stopped:
            return "stopped"
        if ready == len(self._replicas):
            return "ready"
        if ready:
            return "degraded"
        return "failed" if self._has_failed else "loading"

    def _detail(self) -> str:
        """Fit for everybody's eyes: what exactly went wrong, with its paths, is in the log."""
        not_ready = [f"replica {r.index} is {r.state}" for r in self._replicas if not r.is_ready]
        return "; ".join(not_ready)

    @property
    def _has_failed(self) -> bool:
        return bool(self._replicas) and all(replica.failure is not None for replica in self._replicas)

    def _unavailable(self) -> Unavailable:
        if self._is_stopped:
            return Unavailable("The server is shutting down; send the request again.", code="shutting_down")
        if self._has_failed:
            return Unavailable(
                f"The model {self._name!r} could not be loaded; the server's log says why.", code="model_failed"
            )
        return Unavailable(f"The model {self._name!r} is not ready yet; try again in a moment.", code="model_loading")

    def _retry_after_s(self) -> float:
        """Seconds until the queue should have moved on, going by the rate of the last ends."""
        now = clock.now()
        recent = [at for at in self._ends if at > now - _RATE_WINDOW_S]
        if len(recent) < 2 or recent[-1] <= recent[0]:
            return _RETRY_AFTER_S[0]
        rate = (len(recent) - 1) / (recent[-1] - recent[0])
        return min(_RETRY_AFTER_S[1], max(_RETRY_AFTER_S[0], (len(self._queue) + 1) / rate))

    def _tell(self) -> None:
        """One QueueChanged for everything that happens in a turn of the event loop."""
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._told)

    def _told(self) -> None:
        self._telling = False
        in_flight = sum(replica.num_in_flight for replica in self._replicas)
        self._emit(QueueChanged(model=self._name, waiting=len(self._queue), in_flight=in_flight))


def _ended(ticket: Ticket, end: End) -> RequestEnded:
    request, progress = ticket.request, ticket.stream.progress
    return RequestEnded(
        model=request.model,
        replica=ticket.replica,
        request_id=request.id,
        tenant=request.tenant,
        outcome=end.outcome,
        finish_reasons=tuple(reason for _, reason in sorted(progress.finish_reasons.items())),
        error_kind=end.failure.kind if end.failure is not None else None,
        usage=end.usage,
        timings=end.timings,
        inter_token_s=tuple(progress.inter_token_s),
        n=request.sampling.n if isinstance(request, GenerateRequest) else 1,
        max_tokens=request.sampling.max_tokens if isinstance(request, GenerateRequest) else None,
        priority=request.priority,
        num_preemptions=end.num_preemptions,
    )
