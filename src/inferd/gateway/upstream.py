"""The protocols of the router that the gateway uses.

``inferd.router.router.Router`` implements them; tests pass a small fake. The gateway uses nothing else of the router,
and knows neither replicas nor workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from inferd.router.stream import Handle
from inferd.types import Chat, GenerateRequest, ModelInfo, Relay, Request, Sink, TextPrompt

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
    @property
    def parent(self) -> str:
        """Of an adapter: the model that it changes; empty: it is no adapter."""
        ...


class Upstream(Protocol):
    """The router."""

    @property
    def draining(self) -> bool: ...
    def submit(self, request: Request, sink: Sink, relay: Relay | None = None) -> Handle:
        """Put a request into its model's queue. ``relay`` is what a remote replica gets. ``sink`` gets no item before
        this method returns. Raises ModelNotFound, Overloaded or Unavailable."""
        ...

    async def check(self, requests: list[GenerateRequest]) -> None:
        """Prepare the requests without computing them. Raises InvalidRequest when one of them cannot be prepared."""

    async def tokenize(
        self, model: str, prompt: Chat | TextPrompt, *, want_strings: bool = False, tenant: str = ""
    ) -> tuple[list[int], list[str] | None]: ...
    async def detokenize(self, model: str, token_ids: list[int]) -> str: ...
    def models(self) -> Sequence[ModelStatus]: ...
    def adapters(self) -> Sequence[ModelStatus]:
        """The adapters of all models, each of which is a model of its own for clients."""
        ...

    def model(self, name: str) -> ModelStatus | None:
        """The status of one model, without building all of ``models``; None: there is no model of this name."""
        ...
