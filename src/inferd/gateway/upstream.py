"""The protocols of the router that the gateway uses.

``inferd.router.router.Router`` implements them; tests pass a small fake. The gateway uses nothing else of the router,
and knows neither replicas nor workers.
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
    """The router's status of one model or version."""

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
    """The outputs of one request, or the relayed parts of its answer. The last item has ``end`` set; iteration stops
    after it."""

    @property
    def end(self) -> End | None:
        """The request's outcome and usage; None: it is not over. Every request ends at some time."""
        ...

    def when_over(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once, when the request ends. There may be one listener, and only for a request that is not
        over."""

    def __aiter__(self) -> Stream: ...
    async def __anext__(self) -> Item: ...
    def attach(self, sink: Callable[[Item], None]) -> None:
        """Call ``sink`` with every item as it comes, instead of iterating; with the items that wait, at once."""

    def pause(self) -> None:
        """Hold items back until ``resume``, because the reader is slow. Idempotent."""

    def resume(self) -> None: ...
    def close(self) -> None:
        """Cancel the request if it has not ended. Idempotent."""


class Upstream(Protocol):
    """The router."""

    @property
    def draining(self) -> bool: ...
    def submit(self, request: Request, relay: Relay | None = None) -> Stream:
        """Put a request into its model's queue. ``relay`` is what a remote replica gets. Raises ModelNotFound,
        Overloaded or Unavailable."""
        ...

    def find_relay_slot(self, model: str, now: float, tenant: str, body: bytes) -> RelaySlot | None:
        """A slot for a request on the direct path to a remote server; None: use ``submit``, because requests wait or no
        server is free. A slot that was found must be used or given back."""
        ...

    def find_prediction_slot(self, model: str, class_number: int, now: float) -> PredictionSlot | None:
        """As ``find_relay_slot``, for a prediction by a worker. ``class_number``: the index of the request's priority
        class. The slot need not be used."""
        ...

    async def check(self, requests: list[GenerateRequest]) -> None:
        """Prepare the requests without computing them. Raises InvalidRequest when one of them cannot be prepared."""

    async def tokenize(
        self, model: str, prompt: Chat | TextPrompt, *, want_strings: bool = False, tenant: str = ""
    ) -> tuple[list[int], list[str] | None]: ...
    async def detokenize(self, model: str, token_ids: list[int]) -> str: ...
    def models(self) -> Sequence[ModelStatus]: ...
    def model(self, name: str) -> ModelStatus | None:
        """The status of one model, without building all of ``models``; None: there is no model of this name."""
        ...
