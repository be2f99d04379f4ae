"""What the gateway needs from the router, as a shape.

``inferd.router.router.Router`` has this shape; tests put a small fake of the same shape here. The
gateway asks for nothing else and never sees a replica or a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from inferd.types import Chat, End, GenerateRequest, ModelInfo, Output, Relay, Relayed, Request, TextPrompt

if TYPE_CHECKING:
    from inferd.router.direct_prediction import PredictionSlot
    from inferd.router.direct_relay import RelaySlot

ModelState = Literal["loading", "ready", "degraded", "unavailable", "failed", "stopped", "unloaded"]


class ModelStatus(Protocol):
    """What the router knows of one served model."""

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> ModelState: ...
    @property
    def info(self) -> ModelInfo | None: ...
    @property
    def replicas(self) -> int: ...
    @property
    def replicas_ready(self) -> int: ...
    @property
    def detail(self) -> str: ...
    @property
    def created(self) -> float: ...
    @property
    def waiting(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def load(self) -> Literal["startup", "on_demand"]: ...
    @property
    def has_local(self) -> bool: ...
    @property
    def has_remote(self) -> bool: ...
    @property
    def memory_bytes(self) -> int: ...


Item = Output | Relayed


class Stream(Protocol):
    """Outputs of one request, or the relayed pieces of its answer; the last one has ``end`` set, then
    iteration stops."""

    @property
    def end(self) -> End | None:
        """How the request ended, and what was computed for it; None: it runs. Every request comes to its end."""
        ...

    def when_over(self, tell: Callable[[], None]) -> None:
        """``tell`` is called once, with the end; there is one listener at most. Only for a request that runs."""

    def __aiter__(self) -> Stream: ...
    async def __anext__(self) -> Item: ...
    def attach(self, sink: Callable[[Item], None]) -> None:
        """Instead of iterating: every item is handed over as it comes, those that wait at once."""

    def pause(self) -> None:
        """The reader is slow. Idempotent."""

    def resume(self) -> None: ...
    def close(self) -> None:
        """Cancel the request if it has not ended. Idempotent."""


class Upstream(Protocol):
    """The router, seen from the gateway."""

    @property
    def draining(self) -> bool: ...
    def submit(self, request: Request, relay: Relay | None = None) -> Stream:
        """Raises ModelNotFound, Overloaded or Unavailable."""
        ...

    def find_relay_slot(self, model: str, now: float, tenant: str, body: bytes) -> RelaySlot | None:
        """The direct path to a remote server, where nobody is ahead; None: ``submit`` is the way. One that was found
        must be taken."""
        ...

    def find_prediction_slot(self, model: str, class_number: int, now: float) -> PredictionSlot | None:
        """Likewise to a worker that predicts; ``class_number``: the index of the request's priority class. It need not be taken."""
        ...

    async def check(self, requests: list[GenerateRequest]) -> None:
        """Raises InvalidRequest where one of the requests of a list cannot be prepared; nothing is computed."""

    async def tokenize(
        self, model: str, prompt: Chat | TextPrompt, *, want_strings: bool = False, tenant: str = ""
    ) -> tuple[list[int], list[str] | None]: ...
    async def detokenize(self, model: str, token_ids: list[int]) -> str: ...
    def models(self) -> Sequence[ModelStatus]: ...
    def model(self, name: str) -> ModelStatus | None:
        """One of ``models``, without a look at the others; None: there is none of this name."""
        ...
