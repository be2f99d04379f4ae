"""The state of one accepted request, from its admission to its end. The pool changes it."""

from __future__ import annotations

import math
from typing import Protocol

from inferd.errors import InferdError
from inferd.router.stream import Stream
from inferd.types import GenerateRequest, PredictRequest, Relay, Request


class Runner(Protocol):
    """The part of a replica that a ticket in flight needs."""

    @property
    def index(self) -> int:
        """The number among the pool's replicas."""
        ...

    def cancel(self, request_id: str) -> None:
        """Cancel a request in flight."""

    def pause(self, request_id: str) -> None:
        """Stop reading a request's answer from its source, because the reader is slow."""

    def resume(self, request_id: str) -> None:
        """Continue after ``pause``."""


class Ticket:
    """The state of a request and of its attempts at replicas. Times are of the monotonic clock, in seconds.

    ``request`` is a GenerateRequest or a PredictRequest where a local replica may run it. ``relay`` is set where a
    remote server may run it. ``number`` is the order of arrival. ``expires_at`` is when the request leaves the queue
    with an error, by the model's ``queue.timeout_s``.
    """

    __slots__ = (
        "attempts",
        "cancel_error",
        "dispatched_at",
        "expires_at",
        "failed_replicas",
        "first_dispatched_at",
        "hedge_replica",
        "hedged_at",
        "is_charged",
        "is_waiting",
        "last_refusal",
        "number",
        "queued_at",
        "relay",
        "replica",
        "request",
        "runner",
        "seed",
        "stream",
        "token_ids",
        "worker_deaths",
    )

    def __init__(
        self, request: Request, stream: Stream, number: int, expires_at: float, relay: Relay | None = None
    ) -> None:
        self.request = request
        self.relay = relay
        self.stream = stream
        self.number = number
        self.expires_at = expires_at
        self.is_waiting = False
        self.queued_at = -math.inf  # when it was put into the queue, the last time
        self.is_charged = False  # the queue dispatched it once and charged its estimate to the tenant's fair share
        self.first_dispatched_at: float | None = None
        self.dispatched_at: float | None = None  # the last time
        self.runner: Runner | None = None  # the replica that it is in flight in
        self.hedge_replica: Runner | None = None  # the replica of the hedge, until one of the two has begun to answer
        self.replica: int | None = None  # the runner's index, or that of the last runner
        self.hedged_at: float | None = None  # when the hedge was sent
        self.failed_replicas: tuple[Runner, ...] = ()  # replicas that failed this request, which get it no more
        self.last_refusal: InferdError | None = None  # the error of the last of them
        self.attempts = 0  # dispatches, hedges included
        self.worker_deaths = 0  # workers that died while the request was in flight in them
        self.token_ids: list[int] | None = None  # of the answer so far, where another worker may continue it
        self.seed: int | None = None
        self.cancel_error: InferdError | None = None  # why the server cancelled it; the replica's end has the usage

    @property
    def deadline_at(self) -> float:
        """The time of the deadline; infinite without one."""
        deadline_s = self.request.deadline_s
        return math.inf if deadline_s is None else self.request.arrived_at + deadline_s

    @property
    def due_at(self) -> float:
        """The deadline; before the first output also the client's limit for the first byte, if that is earlier."""
        first_byte_s = self.request.first_byte_s
        if first_byte_s is None or self.stream.progress.has_output:
            return self.deadline_at
        return min(self.deadline_at, self.request.arrived_at + first_byte_s)

    @property
    def is_answer_unseen(self) -> bool:
        """Whether nothing of the answer has been sent to the client."""
        return self.stream.is_whole or not self.stream.progress.has_output

    @property
    def is_suspect(self) -> bool:
        """Whether a worker died with this request in flight, so that the request may be the cause."""
        return self.worker_deaths > 0

    @property
    def is_local(self) -> bool:
        """Whether a local replica can run it."""
        return isinstance(self.request, GenerateRequest | PredictRequest)

    def __lt__(self, other: Ticket) -> bool:
        return (self.request.priority, self.number) < (other.request.priority, other.number)
