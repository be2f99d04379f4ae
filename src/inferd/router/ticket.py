"""One accepted request, from the door to its one end. Plain books: who moves it is the pool."""

from __future__ import annotations

import math
from typing import Protocol

from inferd.errors import InferdError
from inferd.router.stream import Stream
from inferd.types import GenerateRequest, PredictRequest, Relay, Request


class Runner(Protocol):
    """A replica, as a request that is in flight in it sees it."""

    @property
    def index(self) -> int: ...
    def cancel(self, request_id: str) -> None: ...
    def pause(self, request_id: str) -> None: ...
    def resume(self, request_id: str) -> None: ...


class Ticket:
    """What is known of a request and of its tries.

    ``request`` is a GenerateRequest or a PredictRequest where a local replica may run it; ``relay`` is there where a remote
    one may. ``number`` orders arrivals; ``expires_at`` is when it has waited too long.
    """

    __slots__ = (
        "attempts",
        "avoid",
        "dispatched_at",
        "expires_at",
        "first_dispatched_at",
        "is_paid",
        "is_waiting",
        "kills",
        "number",
        "queued_at",
        "refusal",
        "relay",
        "replica",
        "request",
        "reserve",
        "reserve_at",
        "runner",
        "seed",
        "stream",
        "token_ids",
        "verdict",
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
        self.queued_at = -math.inf  # when it began to wait, the last time
        self.is_paid = False  # the queue gave it out once: its tenant's share has paid for it
        self.first_dispatched_at: float | None = None
        self.dispatched_at: float | None = None  # the last time
        self.runner: Runner | None = None  # where it is in flight
        self.reserve: Runner | None = None  # a second one that was asked as well, while neither has answered
        self.replica: int | None = None  # the runner's index, or that of the last one
        self.reserve_at: float | None = None  # when the second one was asked
        self.avoid: tuple[Runner, ...] = ()  # replicas that failed it: it goes to none of them again
        self.refusal: InferdError | None = None  # what the last of them said
        self.attempts = 0  # replicas it was given to
        self.kills = 0  # workers that died with it in flight
        self.token_ids: list[int] | None = None  # of its answer, where it may be continued elsewhere
        self.seed: int | None = None
        self.verdict: InferdError | None = None  # why it is called off; its replica's end says what was computed

    @property
    def deadline_at(self) -> float:
        deadline_s = self.request.deadline_s
        return math.inf if deadline_s is None else self.request.arrived_at + deadline_s

    @property
    def due_at(self) -> float:
        """When its answer is worthless, or the first byte of an answer that has not begun."""
        first_byte_s = self.request.first_byte_s
        if first_byte_s is None or self.stream.progress.has_output:
            return self.deadline_at
        return min(self.deadline_at, self.request.arrived_at + first_byte_s)

    @property
    def is_for_nothing(self) -> bool:
        """Whether its client, were it to leave now, has seen nothing of an answer."""
        return self.stream.is_whole or not self.stream.progress.has_output

    @property
    def is_suspect(self) -> bool:
        """It was in a worker that died: one of those may have been the reason."""
        return self.kills > 0

    @property
    def is_local(self) -> bool:
        """Whether a local replica can run it."""
        return isinstance(self.request, GenerateRequest | PredictRequest)

    def __lt__(self, other: Ticket) -> bool:
        return (self.request.priority, self.number) < (other.request.priority, other.number)
