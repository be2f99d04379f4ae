"""Replicas of a model as the router sees them: readiness, requests in flight, room for more.

``Replica`` is the protocol. ``LocalReplica`` connects a pool with the supervisor of a worker process.
``remote_replica.RemoteReplica`` connects a pool with a server that speaks the client's protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import msgspec

from inferd.config import ModelConfig
from inferd.eager import in_task
from inferd.errors import InferdError, InternalError, InvalidRequest, Overloaded, Unavailable, from_failure
from inferd.events import Emit
from inferd.router.replicas.machines import Spot
from inferd.router.replicas.pinned_files import PinnedFiles
from inferd.router.replicas.prompt_work import PromptWork
from inferd.router.replicas.prompts import Ended, Prompts
from inferd.router.replicas.utilization import Utilization
from inferd.router.ticket import Ticket
from inferd.router.waiting.queue import is_batch_work
from inferd.types import (
    CLASSES,
    AdapterState,
    Chat,
    Failure,
    GenerateRequest,
    Handed,
    Link,
    ModelInfo,
    Output,
    PredictRequest,
    Relayed,
    Role,
    StepStats,
    TextPrompt,
    class_index,
)
from inferd.worker.messages import (
    AdaptersSet,
    Cancel,
    Check,
    Checked,
    Detokenize,
    Detokenized,
    Pause,
    SetAdapters,
    Submit,
    Tokenize,
    Tokenized,
    Withdraw,
)
from inferd.worker.supervisor import Patience, State, Supervisor

_log = logging.getLogger("inferd.router")

MAX_CALLS = 1024
_CALL_TIMEOUT_S = 60.0


Kind = Literal["local", "remote"]
Answered = Tokenized | Detokenized | Checked | AdaptersSet
ReplicaState = State | Literal["unreachable"]


class Replica(Protocol):
    """One copy of a model. It owns the tickets in flight in it until it releases them."""

    @property
    def index(self) -> int:
        """The number among the pool's replicas. It is used again after the replica is removed."""
        ...

    @property
    def kind(self) -> Kind:
        """``local`` for a worker, ``remote`` for a remote server."""
        ...

    @property
    def name(self) -> str:
        """The name for operators: a host, or the model and the worker's number."""
        ...

    @property
    def info(self) -> ModelInfo | None:
        """The model as its worker described it; None before that, and for remote servers."""
        ...

    @property
    def failure(self) -> Failure | None:
        """Why the replica can never become ready; None: it is ready, or may become so."""
        ...

    @property
    def state(self) -> ReplicaState:
        """The state of the worker or of the remote server."""
        ...

    @property
    def reason(self) -> str:
        """The reason of the state, for the operator; may be empty."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether the replica can compute requests now."""
        ...

    @property
    def was_ready(self) -> bool:
        """Whether the replica has ever been ready."""
        ...

    @property
    def weight(self) -> float:
        """The share of requests relative to other replicas; above 0."""
        ...

    @property
    def region(self) -> str:
        """The region of the replica; empty: none."""
        ...

    @property
    def is_fallback(self) -> bool:
        """Whether the replica is used only while no other one can take a request."""
        ...

    @property
    def outstanding(self) -> int:
        """Sequences dispatched to the replica and not finished."""
        ...

    @property
    def load(self) -> float:
        """The outstanding work: sequences, and prompts that are not computed yet (``prompt_work.py``)."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Requests in flight."""
        ...

    @property
    def num_but_batch_work(self) -> int:
        """Requests in flight but batch work."""
        ...

    @property
    def can_take(self) -> bool:
        """Whether the replica is ready and has room for one more request of some class."""
        ...

    def runs(self, ticket: Ticket) -> bool:
        """Whether the replica can compute this kind of request."""
        ...

    def accepts(self, ticket: Ticket) -> bool:
        """Whether the replica can run the request and has room for it. Only while ``can_take``."""
        ...

    def start(self) -> None:
        """Start the replica; does not wait until it is ready."""

    def probe(self) -> None:
        """Check whether the server still answers, after repeated failures. Idempotent."""

    async def stop(self) -> None:
        """Stop the replica. Tickets in flight were released before, or are returned by ``replica_lost``."""

    def dispatch(self, ticket: Ticket) -> None:
        """Begin to compute a request. The owner gets its outputs, never before this call returns."""

    def cancel(self, request_id: str) -> None:
        """Cancel a request. The owner gets its end. No effect for an id that is not in flight."""

    def pause(self, request_id: str) -> None:
        """Stop reading a request's answer from its source, where possible, because the reader is slow."""

    def resume(self, request_id: str) -> None:
        """Continue after ``pause``."""

    def prompt_computed(self, request_id: str) -> None:
        """The answer of a request has begun, so its prompt is computed. Idempotent."""

    def ticket(self, request_id: str) -> Ticket | None:
        """The ticket in flight with this id; None: there is none."""
        ...

    def release(self, ticket: Ticket) -> None:
        """Remove a ticket whose request is no longer in flight here."""

    def release_all(self) -> list[Ticket]:
        """Remove and return all tickets, after ``convert_direct``."""
        ...


class ReplicaOwner(Protocol):
    """The pool, as its replicas see it. Called in the event loop, never from within ``dispatch`` or ``cancel``.

    The ticket is still in flight during ``replica_outputs``, ``replica_relayed`` and ``replica_refused``: the pool
    releases it when it gets the end. The replica has released the tickets of ``replica_lost``.
    """

    def replica_ready(self, replica: Replica) -> None:
        """The replica became ready, for the first time or again."""

    def replica_lost(self, replica: Replica, tickets: list[Ticket], reason: str, *, is_machine_lost: bool) -> None:
        """The worker died. ``tickets`` were in flight and have been released.

        ``is_machine_lost``: it ended with its machine, so none of them is to blame.
        """

    def replica_unplaced(self, replica: Replica) -> None:
        """No machine may run the replica's worker now; it is started when one may."""

    def replica_failed(self, replica: Replica) -> None:
        """The replica can never become ready."""

    def replica_unreachable(self, replica: Replica) -> None:
        """The server does not answer and is probed repeatedly. Requests in flight get their own ends."""

    def replica_outputs(self, replica: Replica, outputs: list[Output], stats: StepStats | None) -> None:
        """Outputs of a worker arrived, with the statistics of the engine's step if there was one."""

    def replica_relayed(self, replica: Replica, ticket: Ticket, item: Relayed) -> None:
        """A piece of a relayed answer arrived; the last one has ``end``."""

    def replica_refused(
        self, replica: Replica, ticket: Ticket, error: InferdError, *, counts: bool, retry: bool
    ) -> None:
        """The replica ended a request before its answer began. ``counts``: the breaker counts a failure, as the request
        itself was not the cause. ``retry``: another attempt may succeed."""

    def replica_broke(self, replica: Replica, ticket: Ticket, error: InferdError) -> None:
        """An exception was raised while an output was processed: end the request, if it has not ended."""

    def replica_has_room(self) -> None:
        """The replica can take requests again."""


class LocalReplica:
    """The requests in flight in one worker process, on this machine or on a node."""

    kind: Kind = "local"
    weight = 1.0
    is_fallback = False

    __slots__ = (
        "_awaited",
        "_by_class",
        "_call_ids",
        "_calls",
        "_in_flight",
        "_model",
        "_num_batch_work",
        "_owner",
        "_prompt_work",
        "_source",
        "_supervisor",
        "_tasks",
        "_utilization",
        "_wanted_adapters",
        "adapters",
        "capacity",
        "failure",
        "index",
        "info",
        "is_ready",
        "link",
        "outstanding",
        "pinned_files",
        "prompts",
        "region",
        "spot",
    )

    def __init__(
        self,
        model: str,
        index: int,
        config: ModelConfig,
        owner: ReplicaOwner,
        emit: Emit,
        spot: Spot,
        patience: Patience,
        pinned_files: PinnedFiles,
        link: Link | None = None,
    ) -> None:
        """``link``: how it takes part in hand-overs; None: it does not."""
        self.link = link
        self._model = model
        self._source = config.source
        self._owner = owner
        self._supervisor = Supervisor(
            model, index, config, self, emit, spot, patience=patience, again=self._config_to_load, link=link
        )
        self.prompts = Prompts(self._supervisor.send)
        self._awaited: dict[str, Prompts] = {}  # where the prompts of requests in flight are computed
        self._wanted_adapters = dict(config.adapters)
        self.adapters: Mapping[str, AdapterState] = {}  # as the worker told last
        self._tasks: set[asyncio.Task[None]] = set()
        self.spot = spot
        spot.rss_bytes = lambda: self._supervisor.rss_bytes
        self.pinned_files = pinned_files
        self._in_flight: dict[str, Ticket] = {}
        self._prompt_work = PromptWork()
        self._by_class = [0] * len(CLASSES)
        self._calls: dict[int, asyncio.Future[Answered]] = {}
        self._call_ids = itertools.count()
        self.index = index
        self.info: ModelInfo | None = None
        self.failure: Failure | None = None
        self.is_ready = False
        self.capacity = 0
        self.outstanding = 0
        self._num_batch_work = 0
        self._utilization = Utilization()
        self.region = config.region or ""

    @property
    def name(self) -> str:
        return f"{self._model}/{self.index}"

    @property
    def state(self) -> State:
        return self._supervisor.state

    @property
    def utilization(self) -> float:
        """The part of its time in which full steps would have done the work of the latest ones."""
        return self._utilization.mean

    @property
    def reason(self) -> str:
        return self.failure.message if self.failure is not None else self._supervisor.reason

    @property
    def rss_bytes(self) -> int:
        """Resident memory of the worker in bytes, by its last report."""
        return self._supervisor.rss_bytes

    @property
    def node(self) -> str:
        """The node that the worker is on; empty: this machine, or none."""
        return self.spot.node

    @property
    def is_unplaced(self) -> bool:
        """Whether no machine may run the worker now."""
        return self._supervisor.is_unplaced

    @property
    def restarts(self) -> int:
        """How often the worker was restarted."""
        return self._supervisor.restarts

    def measure_rss(self) -> int:
        """Resident memory of the worker in bytes, measured now."""
        return self._supervisor.measure_rss()

    @property
    def pid(self) -> int | None:
        """The worker's process id, for operators and tests."""
        return self._supervisor.pid

    @property
    def was_ready(self) -> bool:
        return self._supervisor.was_ready

    @property
    def role(self) -> Role:
        """What it computes."""
        return "both" if self.link is None else self.link.role

    @property
    def load(self) -> float:
        return self.outstanding + self._prompt_work.load

    @property
    def num_in_flight(self) -> int:
        """Requests in flight, and prompts for other replicas."""
        return len(self._in_flight) + len(self.prompts)

    @property
    def num_but_batch_work(self) -> int:
        return self.num_in_flight - self._num_batch_work

    @property
    def num_answers(self) -> int:
        """Requests in flight that compute their answers, or their prompts here."""
        return len(self._in_flight) - len(self._awaited)

    @property
    def can_take(self) -> bool:
        return self.is_ready and self.num_in_flight < len(CLASSES) * self.capacity and self._supervisor.is_writable

    def runs(self, ticket: Ticket) -> bool:
        return ticket.is_local

    def accepts(self, ticket: Ticket) -> bool:
        """Requests of lower classes take no room from higher ones: the engine prefers the higher class, so its requests
        must not wait in the queue for lower ones to end."""
        if len(self._in_flight) >= self.capacity:
            better = self._by_class[: class_index(ticket.request.priority) + 1]
            return sum(better, 0) < self.capacity and ticket.is_local
        return ticket.is_local

    def start(self) -> None:
        self._supervisor.start()

    def probe(self) -> None:
        """No effect: the supervisor checks the worker all the time."""

    async def stop(self) -> None:
        await self._supervisor.stop()
        self.spot.leave()

    # -- generating -------------------------------------------------------------------------

    def dispatch(self, ticket: Ticket) -> None:
        self._hold(ticket)
        self._prompt_work.add(ticket.request.id, ticket.new_tokens)
        self._submit(ticket)

    def dispatch_after(self, ticket: Ticket, prompts: Prompts, num_tokens: int, limit_s: float, ended: Ended) -> None:
        """Have another replica compute the prompt first. The answer begins here when ``ended`` was called, with
        whatever was handed over. ``num_tokens`` and ``limit_s`` as of ``Prompts.begin``."""
        request = ticket.request
        assert isinstance(request, GenerateRequest)
        assert self.link is not None
        self._hold(ticket)
        self._awaited[request.id] = prompts

        def go_on(handed: Handed) -> None:
            ended(handed)
            del self._awaited[request.id]
            self._submit(ticket)

        prompts.begin(request, self.link.address, num_tokens, limit_s, go_on)

    def _hold(self, ticket: Ticket) -> None:
        self._in_flight[ticket.request.id] = ticket
        self._by_class[class_index(ticket.request.priority)] += 1
        self.outstanding += ticket.width
        self._num_batch_work += is_batch_work(ticket.request)

    def _submit(self, ticket: Ticket) -> None:
        request = ticket.request
        assert isinstance(request, GenerateRequest | PredictRequest)
        self._supervisor.send(Submit(request))

    def _cease_to_await(self, request_id: str) -> None:
        prompts = self._awaited.pop(request_id, None)
        if prompts is not None:
            prompts.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """Send the cancellation to the worker. The request stays in flight until its end arrives."""
        if request_id in self._awaited:  # the worker, which does not have it yet, gives every request its end
            self._cease_to_await(request_id)
            self._submit(self._in_flight[request_id])
        self._supervisor.send(Cancel(request_id))

    def pause(self, request_id: str) -> None:
        """Pause a request with several predictions. Text outputs are not paused, as waiting ones are merged."""
        self._pause(request_id, True)

    def resume(self, request_id: str) -> None:
        self._pause(request_id, False)

    def _pause(self, request_id: str, is_paused: bool) -> None:
        ticket = self._in_flight.get(request_id)
        if ticket is not None and isinstance(ticket.request, PredictRequest):
            self._supervisor.send(Pause(request_id, is_paused))

    def prompt_computed(self, request_id: str) -> None:
        self._prompt_work.remove(request_id)

    def ticket(self, request_id: str) -> Ticket | None:
        return self._in_flight.get(request_id)

    def release(self, ticket: Ticket) -> None:
        """Remove the ticket of a request that has ended."""
        self._prompt_work.remove(ticket.request.id)
        self._cease_to_await(ticket.request.id)
        del self._in_flight[ticket.request.id]
        self._by_class[class_index(ticket.request.priority)] -= 1
        self.outstanding -= ticket.width
        self._num_batch_work -= is_batch_work(ticket.request)

    def release_all(self) -> list[Ticket]:
        for request_id in tuple(self._awaited):
            self._cease_to_await(request_id)
        self.prompts.lose("its replica is gone")
        tickets = list(self._in_flight.values())
        self._in_flight.clear()
        self._by_class = [0] * len(CLASSES)
        self.outstanding = 0
        self._num_batch_work = 0
        self._prompt_work.clear()
        return tickets

    # -- adapters ---------------------------------------------------------------------------

    async def set_adapters(self, wanted: Mapping[str, str]) -> None:
        """Have the worker load and unload adapters until they are these (name -> source). A worker that is not ready
        loads them before it is."""
        self._wanted_adapters = dict(wanted)
        if self.is_ready:
            with contextlib.suppress(Unavailable):  # the worker died: the next one loads them
                await self._bring_adapters()

    async def _bring_adapters(self) -> None:
        """Raises Unavailable when the worker dies."""
        wanted = self._wanted_adapters
        try:
            answer = await self._call(lambda call_id: SetAdapters(call_id, wanted), timeout_s=None)
        except InvalidRequest as error:  # the model takes none
            failure = error.to_failure()
            self.adapters = {name: AdapterState(source=source, failure=failure) for name, source in wanted.items()}
            return
        if isinstance(answer, AdaptersSet):
            self.adapters = answer.states

    async def _config_to_load(self) -> ModelConfig:
        config = await self.pinned_files.config_to_load()
        return msgspec.structs.replace(config, adapters=self._wanted_adapters)

    async def _catch_up(self, info: ModelInfo) -> None:
        """The wanted adapters changed while the worker loaded: it is ready when it has them."""
        with contextlib.suppress(Unavailable):
            await self._bring_adapters()
            self._become_ready(info)

    # -- calls ------------------------------------------------------------------------------

    async def tokenize(
        self, prompt: Chat | TextPrompt, want_strings: bool, tenant: str
    ) -> tuple[list[int], list[str] | None]:
        """Token ids of a prompt, and each token's string if wanted.

        Raises Unavailable, Overloaded, and the worker's error.
        """
        answer = await self._call(lambda call_id: Tokenize(call_id, prompt, want_strings, tenant))
        if not isinstance(answer, Tokenized) or answer.token_ids is None:
            raise InternalError("The worker answered a tokenize call without tokens.")
        return answer.token_ids, answer.strings

    async def detokenize(self, token_ids: list[int]) -> str:
        """The text of token ids. Raises as ``tokenize``."""
        answer = await self._call(lambda call_id: Detokenize(call_id, token_ids))
        if not isinstance(answer, Detokenized) or answer.text is None:
            raise InternalError("The worker answered a detokenize call without text.")
        return answer.text

    async def check(self, requests: list[GenerateRequest]) -> None:
        """Raises the error of the first request that cannot be prepared."""
        await self._call(lambda call_id: Check(call_id, requests), withdraw=Withdraw)

    async def _call(
        self,
        message: Callable[[int], Tokenize | Detokenize | Check | SetAdapters],
        timeout_s: float | None = _CALL_TIMEOUT_S,
        withdraw: Callable[[int], Withdraw] | None = None,
    ) -> Answered:
        """Call the worker and wait for its answer. Raises the worker's error; Unavailable when the worker dies.

        ``withdraw``: the message that stops the worker's work where the answer is not waited for until it comes."""
        if len(self._calls) >= MAX_CALLS:
            raise Overloaded(f"{MAX_CALLS} tokenizer calls are already waiting; try again later.")
        call_id = next(self._call_ids)
        await in_task()
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._supervisor.send(message(call_id))
        try:
            answer = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise Overloaded(f"The tokenizer did not answer within {_CALL_TIMEOUT_S:g} s; try again later.") from None
        finally:
            self._calls.pop(call_id, None)
            if withdraw is not None and future.cancelled():  # by the limit of time, or the caller's end
                self._supervisor.send(withdraw(call_id))
        if answer.failure is not None:
            raise from_failure(answer.failure)
        return answer

    # -- calls from the supervisor ------------------------------------------------------------

    def worker_ready(self, info: ModelInfo) -> None:
        self.adapters = info.adapters
        if {name: state.source for name, state in info.adapters.items()} == self._wanted_adapters:
            self._become_ready(info)
            return
        task = asyncio.get_running_loop().create_task(self._catch_up(info))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _become_ready(self, info: ModelInfo) -> None:
        self.pinned_files.note_loaded(info.artifact)
        self.spot.loaded()
        self.info = info if info.source == self._source else msgspec.structs.replace(info, source=self._source)
        self.capacity = max(2 * info.max_num_seqs, info.max_num_seqs + 8)
        self._utilization = Utilization()
        self.is_ready = True
        self._owner.replica_ready(self)

    def worker_lost(self, reason: str, *, is_machine_lost: bool) -> None:
        self.is_ready = False
        for future in self._calls.values():
            if not future.done():
                future.set_exception(
                    Unavailable(f"The worker of the model {self._model!r} stopped before it answered; try again.")
                )
        self._owner.replica_lost(self, self.release_all(), reason, is_machine_lost=is_machine_lost)

    def worker_unplaced(self) -> None:
        self._owner.replica_unplaced(self)

    def worker_failed(self, failure: Failure) -> None:
        self.failure = failure
        self._owner.replica_failed(self)

    def worker_handed_over(self, handed: Handed) -> None:
        self.prompts.handed(handed)

    def worker_outputs(self, outputs: list[Output], stats: StepStats | None) -> None:
        if stats is not None and stats.step_sequences:
            self._utilization.add(stats.step_s, stats.utilization)
        if stats is not None and stats.not_batched and self.info is not None:
            self.info = msgspec.structs.replace(self.info, not_batched=stats.not_batched, max_num_seqs=1)
        if self.role == "prefill":
            outputs = self.prompts.without_ends(outputs)
        self._owner.replica_outputs(self, outputs, stats)

    def worker_answered(self, answer: Answered) -> None:
        future = self._calls.get(answer.call_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def worker_writable(self) -> None:
        self._owner.replica_has_room()
