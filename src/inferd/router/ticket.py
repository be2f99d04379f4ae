"""The record of one accepted request: its progress, its attempts at replicas, and its end.

The pool moves a ticket between queue and replicas, and replicas add outputs. The ticket passes them to its sink. It is
the router's only object for a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from inferd.errors import InferdError
from inferd.router.merging import MergedOutput, joined
from inferd.router.progress import Progress
from inferd.types import (
    End,
    GenerateRequest,
    HandOver,
    Item,
    Output,
    PredictRequest,
    Relay,
    Relayed,
    Request,
    Sink,
    Usage,
)


class Runner(Protocol):
    """The part of a replica that a ticket in flight needs."""

    @property
    def index(self) -> int:
        """The number among the pool's replicas."""
        ...

    @property
    def kind(self) -> str:
        """``local`` for a worker, ``remote`` for a remote server."""
        ...

    def cancel(self, request_id: str) -> None:
        """Cancel a request in flight."""

    def pause(self, request_id: str) -> None:
        """Stop reading a request's answer from its source, because the reader is slow."""

    def resume(self, request_id: str) -> None:
        """Continue after ``pause``."""


class TicketOwner(Protocol):
    """The part of the pool that a ticket needs."""

    def cancel(self, ticket: Ticket, /) -> None:
        """End a waiting request, and ask the replicas to cancel one in flight."""

    def pause(self, ticket: Ticket, is_paused: bool, /) -> None:
        """The reader is slow, or no longer slow."""


class QueuePlace(NamedTuple):
    """What is in the queue when a request enters it."""

    ahead: int = 0  # requests
    ahead_of_class: int = 0  # of them, those of its class or a better one
    tenant: str = ""  # with most of them
    ahead_of_tenant: int = 0  # of them, those of that tenant


class Ticket:
    """The state of a request and of its attempts at replicas. Times are of the monotonic clock, in seconds.

    ``request`` is a GenerateRequest or a PredictRequest where a local replica may run it. ``relay`` is set where a
    remote server may run it. ``number`` is the order of arrival. ``expires_at`` is when the request leaves the queue
    with an error, by the model's ``queue.timeout_s``.
    """

    # Class attributes are the defaults, because most requests change few of these.
    attempts = 0  # dispatches, hedges included
    failed_replicas: tuple[Runner, ...] = ()  # replicas that failed this request, which get it no more
    dispatched_at: float | None = None  # the last time
    end: End | None = None
    first_at: float | None = None  # when the answer began
    first_dispatched_at: float | None = None
    has_output = False
    is_closed = False  # cancelled by the client
    is_charged = False  # the queue dispatched it once and charged its estimate to the tenant's fair share
    is_paused = False  # the reader is slow
    is_waiting = False
    is_whole = False
    worker_deaths = 0  # workers that died while the request was in flight in them
    progress: Progress | None = None  # of a generated text
    last_refusal: InferdError | None = None  # the error of the last of them
    replica: int | None = None  # the runner's index, or that of the last runner
    is_remote = False  # that runner is a remote server
    place: QueuePlace | None = None  # in the queue, when it was put into it for the first time
    load_s = 0.0  # of its first wait: while the model was loaded
    restart_s = 0.0  # of its first wait: while no replica worked because workers were lost
    outages_before: tuple[float, float] | None = None  # while it waits for the first time (``waiting.outages``)
    hedged_at: float | None = None  # when the hedge was sent
    hand_over: HandOver | None = None  # of the last attempt, where the model has roles
    seed: int | None = None
    token_ids: list[int] | None = None  # of the answer so far, where another worker may continue it
    width = 1  # sequences computed for it
    new_tokens = 0  # of its prompt, about: what the replica of its last dispatch has not received before
    cancel_error: InferdError | None = None  # why the server cancelled it; the replica's end has the usage
    _is_prompt_sent = False
    _listener: Callable[[], None] | None = None

    def __init__(
        self,
        request: Request,
        sink: Sink,
        owner: TicketOwner,
        number: int,
        expires_at: float,
        relay: Relay | None = None,
    ) -> None:
        self.request = request
        self.relay = relay
        self.number = number
        self.expires_at = expires_at
        self.queued_at = -math.inf  # when it was put into the queue, the last time
        self.runner: Runner | None = None  # the replica that it is in flight in
        self.hedge_replica: Runner | None = None  # the replica of the hedge, until one of the two has begun to answer
        self._held: Output | MergedOutput | None = None
        self._sink: Sink | None = sink
        self._owner: TicketOwner | None = owner
        # The sink gets an answer that is not streamed as one item at the end. Until then it can be computed again.
        if isinstance(request, GenerateRequest):
            self.is_whole = not request.stream
            self.width = request.width

    # -- called by the sink -----------------------------------------------------------------

    def cancel(self) -> None:
        """The client has disconnected: stop computing. Idempotent. The end still comes, with the usage."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._owner is not None:
            self._held = None
            self._owner.cancel(self)

    def pause(self) -> None:
        """The reader is slow: pause the replica, where that is possible. Idempotent."""
        if not self.is_paused:
            self.is_paused = True
            if self._owner is not None:
                self._owner.pause(self, True)

    def resume(self) -> None:
        """Continue after ``pause``. Idempotent."""
        if self.is_paused:
            self.is_paused = False
            if self._owner is not None:
                self._owner.pause(self, False)

    def when_over(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` once, when the request ends. Only for a request that has not ended."""
        assert self.end is None, "it has ended already"
        self._listener = listener

    # -- called by the pool -----------------------------------------------------------------

    def deliver_output(self, output: Output, now: float) -> None:
        """Pass on an output that a worker sent at ``now``. Nothing may follow an output with ``end``."""
        if output.prediction is not None:
            self.has_output = True
        elif output.deltas or output.prompt is not None:
            progress = self.progress
            if progress is None:
                progress = self.progress = Progress()
            progress.note(output, now)
            if output.deltas:
                self.has_output = True
                self.first_at = progress.first_at
        if output.end is None and self.is_closed:
            return  # there is no reader; the end still has the usage
        shown = self._show(output) if self.is_whole else output
        if shown is not None:
            self._deliver(shown)

    def deliver_piece(self, piece: Relayed, now: float) -> None:
        """Pass on a piece of a relayed answer that arrived at ``now``. Nothing may follow a piece with ``end``."""
        self.has_output = True
        if self.first_at is None and piece.data:
            self.first_at = now
        if piece.end is not None or not self.is_closed:
            self._deliver(piece)

    def _deliver(self, item: Item) -> None:
        sink = self._sink
        assert sink is not None, f"request {self.request.id} ended twice"
        if item.end is not None:
            self.end = item.end
            self._sink = self._owner = None  # as in ``drop_callbacks``
            if self._listener is not None:
                listener, self._listener = self._listener, None
                try:
                    sink.deliver(item)
                finally:
                    listener()
                return
        sink.deliver(item)

    def _show(self, output: Output) -> Output | None:
        """The part of an output that the sink of a whole answer gets: the first prompt report at once, the rest with
        the end."""
        prompt = None if self._is_prompt_sent else output.prompt
        self._is_prompt_sent = self._is_prompt_sent or prompt is not None
        answer = Output(output.request_id, output.deltas, None, output.end)
        self._held = held = answer if self._held is None else joined(self._held, answer)
        if output.end is None:
            return None if prompt is None else Output(output.request_id, (), prompt)
        self._held = None
        whole = held.output() if isinstance(held, MergedOutput) else held
        return Output(whole.request_id, whole.deltas, prompt, whole.end)

    def restart(self) -> None:
        """Discard the answer so far, of which the sink has got nothing: it is computed again from its beginning."""
        assert self.is_whole, "the sink has already got a part of the answer"
        self._held = None
        self.progress, self.has_output, self.first_at = None, False, None

    def drop_callbacks(self) -> None:
        """Drop the pool and the sink, which refer back to this ticket: a reference cycle would delay freeing."""
        self._sink = self._owner = self._listener = None

    def use(self, runner: Runner, dispatched_at: float | None) -> None:
        """Continue with the attempt at a replica that began at ``dispatched_at``."""
        self.runner, self.dispatched_at = runner, dispatched_at
        self.replica, self.is_remote = runner.index, runner.kind == "remote"

    # -- values -----------------------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        """The usage in the outputs so far, for a request whose worker cannot report it any more."""
        return self.progress.usage if self.progress is not None else Usage()

    @property
    def deadline_at(self) -> float:
        """The time of the deadline; infinite without one."""
        deadline_s = self.request.deadline_s
        return math.inf if deadline_s is None else self.request.arrived_at + deadline_s

    @property
    def due_at(self) -> float:
        """The deadline; before the first output also the client's limit for the first byte, if that is earlier."""
        first_byte_s = self.request.first_byte_s
        if first_byte_s is None or self.has_output:
            return self.deadline_at
        return min(self.deadline_at, self.request.arrived_at + first_byte_s)

    @property
    def is_answer_unseen(self) -> bool:
        """Whether nothing of the answer has been sent to the client."""
        return self.is_whole or not self.has_output

    @property
    def is_local(self) -> bool:
        """Whether a local replica can run it."""
        return isinstance(self.request, GenerateRequest | PredictRequest)
