"""The one interface of a model in a worker.

The worker's loop drives a backend; it never knows what kind of model is inside. A prediction is a
stream of one output; a unary answer is a stream collected.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from inferd.types import GenerateRequest, ModelInfo, Output, StepStats


class Backend(Protocol):
    """What runs in a worker. All methods are called from the worker's loop thread, except
    ``prepare``, which is called from its I/O thread and must not touch the engine's state."""

    @property
    def info(self) -> ModelInfo: ...

    def prepare(self, request: GenerateRequest) -> object:
        """Validate, render and tokenize: everything that costs no step. Raises InvalidRequest."""
        ...

    def add(self, prepared: object, now: float) -> None:
        """Take ownership of a prepared request. Raises Overloaded when the queue is full."""
        ...

    def cancel(self, request_id: str) -> None:
        """Idempotent. One terminal output follows from the next step."""
        ...

    def step(self, now: float) -> tuple[list[Output], StepStats]:
        """One unit of work. Returns at most one output per request."""
        ...

    def due(self, now: float) -> float | None:
        """When to step again: a time (``now`` = at once), or None when something must arrive first."""
        ...

    def halt(self, now: float) -> list[Output]:
        """The ends of all that is left, with what was computed for it."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class UsesIdleTime(Protocol):
    """A backend that can do ahead of time what later steps would have to."""

    def use_idle_time(self) -> bool:
        """A few milliseconds of it; False when nothing is left. Called as ``step`` is: never beside it."""
        ...
