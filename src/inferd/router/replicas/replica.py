"""One copy of a model as the router sees it: is it ready, what is in flight in it, is there room.

``Replica`` is the shape; ``LocalReplica`` sits between a pool and the supervisor of a worker process, a
remote one (``remote_replica``) between a pool and a server that speaks the client's protocol itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from inferd.config import ModelConfig
from inferd.errors import InferdError, InternalError, Overloaded, Unavailable, from_failure
from inferd.events import Emit
from inferd.router.replicas.pinned_files import PinnedFiles
from inferd.router.ticket import Ticket
from inferd.types import (
    CLASSES,
    Chat,
    End,
    Failure,
    GenerateRequest,
    ModelInfo,
    Output,
    Prediction,
    PredictRequest,
    Relayed,
    StepStats,
    TextPrompt,
    class_index,
)
from inferd.worker.messages import Cancel, Check, Checked, Detokenize, Detokenized, Pause, Submit, Tokenize, Tokenized
from inferd.worker.supervisor import Patience, State, Supervisor

_log = logging.getLogger("inferd.router")

MAX_CALLS = 1024
_CALL_TIMEOUT_S = 60.0


Kind = Literal["local", "remote"]
Answered = Tokenized | Detokenized | Checked
ReplicaState = State | Literal["unreachable"]


class Replica(Protocol):
    """One place where a model runs. It owns what is in flight in it until it gives that back."""

    @property
    def index(self) -> int:
        """Unique among the pool's replicas of the moment; free again once it is gone."""
        ...

    @property
    def kind(self) -> Kind: ...
    @property
    def name(self) -> str:
        """For people: a host, or the worker's number."""
        ...

    @property
    def info(self) -> ModelInfo | None: ...
    @property
    def failure(self) -> Failure | None:
        """Why it can never become ready; None while there is hope."""
        ...

    @property
    def state(self) -> ReplicaState: ...
    @property
    def reason(self) -> str:
        """Why it is in this state, for its operator; empty where there is nothing to say."""
        ...

    @property
    def is_ready(self) -> bool: ...
    @property
    def was_ready(self) -> bool: ...
    @property
    def weight(self) -> float: ...
    @property
    def region(self) -> str: ...
    @property
    def is_fallback(self) -> bool:
        """Used only while no other replica can take a request."""
        ...

    @property
    def outstanding(self) -> int:
        """Sequences it has been given and has not finished."""
        ...

    @property
    def num_in_flight(self) -> int: ...
    @property
    def can_take(self) -> bool:
        """Ready, and there is room for one more."""
        ...

    def runs(self, ticket: Ticket) -> bool:
        """Whether it understands the request at all."""
        ...

    def has_room(self, ticket: Ticket) -> bool:
        """Whether there is room for this one, where it can take some."""
        ...

    def start(self) -> None: ...
    def probe(self) -> None:
        """It failed again and again: see whether it is still there. Idempotent."""

    async def stop(self) -> None:
        """Leave nothing behind. What was in flight is given back by ``replica_lost`` or was released before."""

    def dispatch(self, ticket: Ticket) -> None:
        """Begin to work on it; its outputs come through the owner, never before this returns."""

    def cancel(self, request_id: str) -> None:
        """Its end comes back through the owner; nothing happens for an id that is not in flight."""

    def pause(self, request_id: str) -> None:
        """Its reader is slow: take no more of its answer from the source, where that can be helped."""

    def resume(self, request_id: str) -> None: ...
    def ticket(self, request_id: str) -> Ticket | None: ...
    def release(self, ticket: Ticket) -> None:
        """It is not in flight here any more."""

    def convert_direct(self) -> None:
        """What is on a direct path becomes ordinary requests in flight."""

    def release_all(self) -> list[Ticket]: ...


class ReplicaOwner(Protocol):
    """Who gives it work: the pool. Called from the event loop, never from within ``dispatch`` or ``cancel``.

    Outputs, relayed items and refusals come while the ticket is still in flight: the pool releases it
    when it sees the end. Tickets of ``replica_lost`` have been released by the replica.
    """

    def replica_ready(self, replica: Replica) -> None: ...
    def replica_lost(self, replica: Replica, tickets: list[Ticket], reason: str) -> None: ...
    def replica_failed(self, replica: Replica) -> None: ...
    def replica_unreachable(self, replica: Replica) -> None:
        """It does not answer, and is tried again and again; what was in flight gets its own end."""

    def replica_outputs(self, replica: Replica, outputs: list[Output], stats: StepStats | None) -> None: ...
    def replica_relayed(self, replica: Replica, ticket: Ticket, item: Relayed) -> None: ...
    def replica_refused(
        self, replica: Replica, ticket: Ticket, error: InferdError, *, counts: bool, retry: bool
    ) -> None:
        """Ended before anything of an answer came. ``counts``: a failure for the breaker (and not the
        request's own fault); ``retry``: another try may fare better."""

    def replica_broke(self, replica: Replica, ticket: Ticket, error: InferdError) -> None:
        """Something was raised here between the replica and the request: it ends, if it has not ended."""

    def replica_has_room(self) -> None: ...


class DirectPrediction(Protocol):
    """A prediction that is in flight without a ticket (``router.direct_prediction``)."""

    class_number: int
    request: PredictRequest

    def complete(self, prediction: Prediction, end: End) -> bool:
        """It is answered; False: the answer could not be delivered, and the request needs a ticket."""
        ...

    def flush(self) -> None:
        """Let the client have what was delivered."""

    def convert(self) -> None:
        """Become an ordinary request in flight."""


class LocalReplica:
    """Owns what is in flight in one worker."""

    kind: Kind = "local"
    weight = 1.0
    is_fallback = False

    __slots__ = (
        "_by_class",
        "_call_ids",
        "_calls",
        "_in_flight",
        "_model",
        "_owner",
        "_source",
        "_supervisor",
        "capacity",
        "direct",
        "failure",
        "index",
        "info",
        "is_ready",
        "outstanding",
        "pinned_files",
        "region",
    )

    def __init__(
        self,
        model: str,
        index: int,
        config: ModelConfig,
        owner: ReplicaOwner,
        emit: Emit,
        command: Sequence[str],
        patience: Patience,
        pinned_files: PinnedFiles,
    ) -> None:
        self._model = model
        self._source = config.source
        self._owner = owner
        self._supervisor = Supervisor(
            model, index, config, self, emit, command=command, patience=patience, again=pinned_files.config_to_load
        )
        self.pinned_files = pinned_files
        self._in_flight: dict[str, Ticket] = {}
        self.direct: dict[str, DirectPrediction] = {}  # in flight as well, on the direct path
        self._by_class = [0] * len(CLASSES)
        self._calls: dict[int, asyncio.Future[Answered]] = {}
        self._call_ids = itertools.count()
        self.index = index
        self.info: ModelInfo | None = None
        self.failure: Failure | None = None
        self.is_ready = False
        self.capacity = 0
        self.outstanding = 0
        self.region = config.region or ""

    @property
    def name(self) -> str:
        return f"{self._model}/{self.index}"

    @property
    def state(self) -> State:
        return self._supervisor.state

    @property
    def reason(self) -> str:
        return self.failure.message if self.failure is not None else self._supervisor.reason

    @property
    def rss_bytes(self) -> int:
        """Resident memory of the worker, as last heard."""
        return self._supervisor.rss_bytes

    @property
    def restarts(self) -> int:
        """Of its worker, so far."""
        return self._supervisor.restarts

    def measure_rss(self) -> int:
        """Likewise, of this moment."""
        return self._supervisor.measure_rss()

    @property
    def pid(self) -> int | None:
        """The worker's process id, for people and tests."""
        return self._supervisor.pid

    @property
    def was_ready(self) -> bool:
        return self._supervisor.was_ready

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight) + len(self.direct)

    @property
    def can_take(self) -> bool:
        return (
            self.is_ready
            and len(self._in_flight) + len(self.direct) < len(CLASSES) * self.capacity
            and self._supervisor.is_writable
        )

    def runs(self, ticket: Ticket) -> bool:
        return ticket.is_local

    def has_room(self, ticket: Ticket) -> bool:
        """Work of a worse class takes no room from a better one: the engine lets the better one go first, so
        it must not wait out here for the worse to end."""
        return self.has_class_room(class_index(ticket.request.priority))

    def has_class_room(self, class_number: int) -> bool:
        """Likewise for a class, by its place."""
        return sum(self._by_class[: class_number + 1]) < self.capacity

    def start(self) -> None:
        self._supervisor.start()

    def probe(self) -> None:
        """Its supervisor looks all the time."""

    async def stop(self) -> None:
        await self._supervisor.stop()

    # -- the direct path (``one``) ---------------------------------------------------------

    def send_direct(self, one: DirectPrediction) -> None:
        request = one.request
        self.direct[request.id] = one
        self._by_class[one.class_number] += 1
        self.outstanding += 1
        self._supervisor.send(Submit(request))

    def restore_direct(self, one: DirectPrediction) -> None:
        """It could not be delivered, and is in flight again."""
        self.direct[one.request.id] = one
        self._by_class[one.class_number] += 1
        self.outstanding += 1

    def adopt(self, ticket: Ticket) -> None:
        """An one becomes an ordinary request in flight."""
        del self.direct[ticket.request.id]
        self._in_flight[ticket.request.id] = ticket

    def _complete_direct(self, outputs: list[Output]) -> list[Output]:
        """What the outputs say to direct is done; the others are returned."""
        direct = self.direct
        others: list[Output] = []
        done: list[DirectPrediction] = []
        for output in outputs:
            one = direct.get(output.request_id)
            if one is None:
                others.append(output)
                continue
            if output.end is not None and output.end.outcome == "done" and output.prediction is not None:
                del direct[output.request_id]
                self._by_class[one.class_number] -= 1
                self.outstanding -= 1
                if one.complete(output.prediction, output.end):
                    done.append(one)
                else:
                    others.append(_failed(output.request_id))
            else:
                one.convert()
                others.append(output)
        for one in done:
            try:
                one.flush()
            except Exception:
                # A request boundary: the others of this frame are told all the same.
                _log.exception("request %s could not be told that it ended", one.request.id)
        return others

    # -- generating -------------------------------------------------------------------------

    def dispatch(self, ticket: Ticket) -> None:
        request = ticket.request
        assert isinstance(request, GenerateRequest | PredictRequest)
        self._in_flight[request.id] = ticket
        self._by_class[class_index(ticket.request.priority)] += 1
        self.outstanding += request.width
        self._supervisor.send(Submit(request))

    def cancel(self, request_id: str) -> None:
        """The worker is told; its slot is free when the end comes back."""
        self._supervisor.send(Cancel(request_id))

    def pause(self, request_id: str) -> None:
        """Pieces of a text go on: while they wait they merge into one. Whole answers do not merge."""
        self._pause(request_id, True)

    def resume(self, request_id: str) -> None:
        self._pause(request_id, False)

    def _pause(self, request_id: str, is_paused: bool) -> None:
        ticket = self._in_flight.get(request_id)
        if ticket is not None and isinstance(ticket.request, PredictRequest):
            self._supervisor.send(Pause(request_id, is_paused))

    def ticket(self, request_id: str) -> Ticket | None:
        return self._in_flight.get(request_id)

    def release(self, ticket: Ticket) -> None:
        """The worker has ended a request."""
        del self._in_flight[ticket.request.id]
        self._by_class[class_index(ticket.request.priority)] -= 1
        self.outstanding -= ticket.request.width

    def convert_direct(self) -> None:
        for one in tuple(self.direct.values()):
            one.convert()

    def release_all(self) -> list[Ticket]:
        self.convert_direct()
        tickets = list(self._in_flight.values())
        self._in_flight.clear()
        self._by_class = [0] * len(CLASSES)
        self.outstanding = 0
        return tickets

    # -- calls ------------------------------------------------------------------------------

    async def tokenize(
        self, prompt: Chat | TextPrompt, want_strings: bool, tenant: str
    ) -> tuple[list[int], list[str] | None]:
        answer = await self._call(lambda call_id: Tokenize(call_id, prompt, want_strings, tenant))
        if not isinstance(answer, Tokenized) or answer.token_ids is None:
            raise InternalError("The worker answered a tokenize call without tokens.")
        return answer.token_ids, answer.strings

    async def detokenize(self, token_ids: list[int]) -> str:
        answer = await self._call(lambda call_id: Detokenize(call_id, token_ids))
        if not isinstance(answer, Detokenized) or answer.text is None:
            raise InternalError("The worker answered a detokenize call without text.")
        return answer.text

    async def check(self, requests: list[GenerateRequest]) -> None:
        """Raises what the first request is refused for that cannot be prepared."""
        await self._call(lambda call_id: Check(call_id, requests))

    async def _call(self, message: Callable[[int], Tokenize | Detokenize | Check]) -> Answered:
        """Raises what the worker failed with; Unavailable when it is lost meanwhile."""
        if len(self._calls) >= MAX_CALLS:
            raise Overloaded(f"{MAX_CALLS} tokenizer calls are already waiting; try again later.")
        call_id = next(self._call_ids)
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._supervisor.send(message(call_id))
        try:
            answer = await asyncio.wait_for(future, _CALL_TIMEOUT_S)
        except TimeoutError:
            raise Overloaded(f"The tokenizer did not answer within {_CALL_TIMEOUT_S:g} s; try again later.") from None
        finally:
            self._calls.pop(call_id, None)
        if answer.failure is not None:
            raise from_failure(answer.failure)
        return answer

    # -- the supervisor's owner -------------------------------------------------------------

    def worker_ready(self, info: ModelInfo) -> None:
        self.pinned_files.note_loaded(info.artifact)
        self.info = info if info.source == self._source else msgspec.structs.replace(info, source=self._source)
        self.capacity = max(2 * info.max_num_seqs, info.max_num_seqs + 8)
        self.is_ready = True
        self._owner.replica_ready(self)

    def worker_lost(self, reason: str) -> None:
        self.is_ready = False
        for future in self._calls.values():
            if not future.done():
                future.set_exception(
                    Unavailable(f"The worker of the model {self._model!r} stopped before it answered; try again.")
                )
        self._owner.replica_lost(self, self.release_all(), reason)

    def worker_failed(self, failure: Failure) -> None:
        self.failure = failure
        self._owner.replica_failed(self)

    def worker_outputs(self, outputs: list[Output], stats: StepStats | None) -> None:
        if self.direct:
            outputs = self._complete_direct(outputs)
        self._owner.replica_outputs(self, outputs, stats)

    def worker_answered(self, answer: Answered) -> None:
        future = self._calls.get(answer.call_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def worker_writable(self) -> None:
        self._owner.replica_has_room()


def _failed(request_id: str) -> Output:
    error = InternalError("The server met an internal error; the log has the details.")
    return Output.ended(request_id, End("failed", failure=error.to_failure()))
