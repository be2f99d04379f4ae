"""The interface of a model in a worker.

Two loops drive backends: ``worker/loop.py`` with threads, for models that generate, and ``worker/direct.py`` with one
thread, for models that predict. Both use the methods below and neither knows what a backend computes. A prediction
is a stream of one output, and a unary answer is a collected stream.

``PreparingBackend`` and ``PredictiveBackend`` add what their own loop needs. The protocols after them are abilities
that a backend may have; a loop asks for each by ``isinstance``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from inferd.types import (
    AdapterState,
    Chat,
    GenerateRequest,
    Handed,
    Link,
    ModelInfo,
    Output,
    PredictRequest,
    StepStats,
    TextPrompt,
)

Work_contra = TypeVar("Work_contra", contravariant=True)
"""What ``add`` is given: a request, or what was prepared from one in another thread."""


class TakesLong(Exception):
    """A request can be prepared only by waiting for another process."""


class WaitEndedError(Exception):
    """The result of what was waited for is no longer wanted."""


class Wait:
    """A thread's wait for work done elsewhere, which another thread may end. Safe to use from several threads."""

    __slots__ = ("_is_ended", "_lock", "_stops")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_ended = False
        self._stops: list[Callable[[], object]] = []

    def end(self) -> None:
        """Stop the work. Idempotent."""
        with self._lock:
            self._is_ended = True
            for stop in self._stops:
                stop()

    @contextmanager
    def stopped_by(self, stop: Callable[[], object]) -> Iterator[None]:
        """Within the block, ``stop`` makes the work stop; it must return at once and must not raise. Raises
        WaitEndedError, before the block or behind it, where the wait was ended."""
        with self._lock:
            if self._is_ended:
                raise WaitEndedError
            self._stops.append(stop)
        try:
            yield
        finally:
            with self._lock:
                self._stops.remove(stop)
        if self._is_ended:
            raise WaitEndedError


FOR_EVER: Final = Wait()
"""The wait of a caller that never ends it."""


class Backend(Protocol[Work_contra]):
    """All methods are called from one thread, the loop's. Times are of ``clock.now()``.

    A request that ``add`` accepted ends exactly once, by an output of ``step`` or of ``halt`` that has an end.
    """

    @property
    def info(self) -> ModelInfo: ...

    def add(self, work: Work_contra, now: float) -> None:
        """Take ownership of a request. Raises, and keeps nothing of it, when it cannot be computed."""
        ...

    def cancel(self, request_id: str) -> None:
        """Idempotent. One terminal output follows from the next step, with what was computed."""
        ...

    def due(self, now: float) -> float | None:
        """When to step again: a time (``now`` or earlier: at once), or None when something must arrive first."""
        ...

    def step(self, now: float) -> tuple[list[Output], StepStats | None]:
        """One unit of work: its outputs, and its counts where something was computed."""
        ...

    def halt(self, now: float) -> list[Output]:
        """The ends of all open requests, with what was computed for each."""
        ...

    def close(self) -> None:
        """Free the model. Nothing is called afterwards."""
        ...


@runtime_checkable
class PreparingBackend(Backend[Any], Protocol):
    """A generating model: its requests are prepared in another thread before they are added."""

    def prepare(self, request: GenerateRequest, *, wait: Wait | None = FOR_EVER) -> object:
        """Validate, render and tokenize: everything that costs no step. The result is what ``add`` is given. Called
        from any thread; must not touch the state of the loop's thread. Raises InvalidRequest; TakesLong, if it has to
        wait for another process and there is no ``wait``; and WaitEndedError, if that was ended."""
        ...


class PredictiveBackend(Backend[PredictRequest], Protocol):
    """A predictive model: the loop that drives it reads the requests as well, and must know when to stop reading."""

    @property
    def is_full(self) -> bool:
        """Whether it holds so much that nothing more should be read while it has something to compute."""
        ...

    @property
    def has_enough(self) -> bool:
        """Whether a batch should be computed before more requests are decoded."""
        ...

    def pause(self, request_id: str, *, is_paused: bool) -> None:
        """Stop or resume making answers to a request that has several."""
        ...


@runtime_checkable
class Tokenizes(Protocol):
    """A backend that tokenizes for other purposes than its own requests. Called from any thread."""

    def tokenize(
        self, prompt: Chat | TextPrompt, want_strings: bool = False, tenant: str = ""
    ) -> tuple[list[int], list[str] | None]: ...

    def detokenize(self, token_ids: list[int]) -> str: ...


@runtime_checkable
class TakesAdapters(Protocol):
    """A backend whose model can be changed by adapters, each of which clients know by its own name."""

    def set_adapters(self, wanted: Mapping[str, str]) -> dict[str, AdapterState]:
        """Load and unload adapters until they are those of ``wanted`` (name -> source); the state of each. Called from
        a thread of its own, beside ``step``."""
        ...


@runtime_checkable
class HandsOver(Protocol):
    """A backend that can give what it computed of a prompt to another worker of its model, and use what it is given."""

    def open_link(
        self, link: Link, run_on_loop: Callable[[Callable[[], None]], None], report: Callable[[Handed], None]
    ) -> None:
        """Take part in hand-overs from now on. ``run_on_loop`` runs an action in the thread that calls ``step``.
        ``report`` may be called from any thread. Raises OSError."""
        ...


@runtime_checkable
class RecoversFromSteps(Protocol):
    """A backend that knows which requests were in a step that failed."""

    def abort_step(self, error: Exception, now: float) -> list[Output]:
        """The ends of the requests in the step that raised, and what earlier work left to send."""
        ...


@runtime_checkable
class UsesIdleTime(Protocol):
    """A backend that can do ahead of time what later steps would have to."""

    def use_idle_time(self) -> bool:
        """Work for a few milliseconds; False when nothing is left. Called from the thread that calls ``step``."""
        ...


@runtime_checkable
class PausesSteps(Protocol):
    """A backend whose steps can pause while they compute work that may wait."""

    def pause_steps_when(self, has_arrived: Callable[[], bool]) -> None:
        """``step`` may return without counts, before it is whole, where ``has_arrived`` is true: work waits to be added
        that may precede it. Later calls of ``step`` compute such work first, and then go on. Called before the first
        step."""
        ...
