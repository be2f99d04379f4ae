"""The step loop: drives a backend in the worker's main thread.

Waits for work or for the time the backend names, never polls. Knows that every accepted request ends
exactly once and sees to it; knows nothing of what a backend computes, nor of sockets.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import msgspec

from inferd import clock
from inferd.backend import Backend, UsesIdleTime
from inferd.errors import InferdError, InternalError, InvalidRequest, Overloaded
from inferd.types import End, Output, StepStats, Timings, Usage
from inferd.worker.channel import ChannelError
from inferd.worker.messages import Outputs

MAX_FAILED_STEPS = 3  # in a row; then the model, not a request, is what is broken

_log = logging.getLogger("inferd.worker")


class Add(msgspec.Struct, frozen=True):
    """A request that was tokenized and checked and may be computed."""

    request_id: str
    prepared: object
    arrived_at: float


class Drop(msgspec.Struct, frozen=True):
    """Nobody waits for this request any more."""

    request_id: str


class Halt(msgspec.Struct, frozen=True):
    """Leave the loop."""


Work = Add | Drop | Halt
Inbox = queue.SimpleQueue[Work]


@runtime_checkable
class Recovers(Protocol):
    """A backend that can say which requests a failed step took with it."""

    def abort_step(self, error: Exception, now: float) -> list[Output]: ...


class StepsFailedError(Exception):
    """The backend raised in every one of the last steps; the process must be replaced."""


class StepLoop:
    """Owns the backend. ``run`` belongs to one thread; ``steps`` and ``is_busy`` may be read by others."""

    def __init__(self, backend: Backend, inbox: Inbox, send: Callable[[Outputs], None]) -> None:
        self._backend = backend
        self._inbox = inbox
        self._send = send
        self._active: dict[str, float] = {}  # accepted and not ended, with the time of arrival
        self._too_large: dict[str, InvalidRequest] = {}  # why these are cancelled: an output of theirs fits no frame
        self._num_failed = 0
        self._working = False
        self._send_s = 0.0  # what sending the last step's outputs took
        self.steps = 0

    @property
    def is_busy(self) -> bool:
        return self._working or not self._inbox.empty()

    def run(self) -> None:
        """Until Halt. Raises StepsFailedError."""
        while self._turn():
            self.steps += 1

    def _turn(self) -> bool:
        for work in self._wait():
            match work:
                case Add():
                    self._add(work)
                case Drop(request_id):
                    if request_id in self._active:
                        self._backend.cancel(request_id)
                case Halt():
                    self._halt()
                    return False
        now = clock.now()
        due = self._backend.due(now)
        if due is not None and due <= now:
            self._step(now)
        return True

    def _wait(self) -> list[Work]:
        """Everything that has arrived; waits while the backend has nothing to do."""
        now = clock.now()
        due = self._backend.due(now)
        work: list[Work] = []
        try:
            if due is None or due > now:
                self._working = False
                if due is None:
                    self._use_idle_time()
                work.append(self._inbox.get(timeout=None if due is None else due - now))
                self._working = True
            while True:
                work.append(self._inbox.get_nowait())
        except queue.Empty:
            self._working = True
            return work

    def _use_idle_time(self) -> None:
        """Until something arrives, or nothing is left to do ahead of time."""
        if isinstance(self._backend, UsesIdleTime):
            while self._inbox.empty() and self._backend.use_idle_time():
                pass

    def _add(self, work: Add) -> None:
        if work.request_id in self._active:
            _log.error("request %s was submitted twice; the second is ignored", work.request_id)
            return
        self._active[work.request_id] = work.arrived_at
        try:
            self._backend.add(work.prepared, clock.now())
        except Exception as error:
            self._deliver([ended(work.request_id, work.arrived_at, error)], None)

    def _step(self, now: float) -> None:
        try:
            outputs, stats = self._backend.step(now)
        except Exception as error:
            _log.exception("a step failed")
            self._num_failed += 1
            self._deliver(self._abort(error), None)
            if self._num_failed >= MAX_FAILED_STEPS:
                raise StepsFailedError(f"The last {self._num_failed} steps failed.") from error
            return
        self._num_failed = 0
        computed = clock.now()
        parts = msgspec.structs.replace(stats.parts, send=self._send_s)
        stats = msgspec.structs.replace(stats, step_s=stats.step_s or computed - now, parts=parts)
        self._deliver(outputs, stats)
        self._send_s = clock.now() - computed

    def _abort(self, error: Exception) -> list[Output]:
        """The ends of the requests that were in the failed step; all, if the backend cannot tell."""
        if isinstance(self._backend, Recovers):
            return self._backend.abort_step(error, clock.now())
        for request_id in self._active:
            self._backend.cancel(request_id)
        return [ended(request_id, arrived_at, error) for request_id, arrived_at in self._active.items()]

    def _halt(self) -> None:
        now = clock.now()
        self._deliver(self._backend.halt(now), None)
        forgotten = [
            Output(request_id, (), None, End("cancelled", timings=Timings(finished=now - arrived_at)))
            for request_id, arrived_at in self._active.items()
        ]
        self._deliver(forgotten, None)
        self._backend.close()

    def _deliver(self, outputs: list[Output], stats: StepStats | None) -> None:
        """Send what belongs to a request that has not ended; the end of each goes out once."""
        kept = []
        arrivals = {}
        for output in outputs:
            arrived_at = self._active.get(output.request_id)
            if arrived_at is None:
                continue  # a second end, or news after it
            too_large = self._too_large.get(output.request_id)
            if too_large is not None:
                if output.end is None:
                    continue
                del self._too_large[output.request_id]
                output = ended(output.request_id, arrived_at, too_large, output.end.usage)
            kept.append(output)
            if output.end is not None:
                arrivals[output.request_id] = self._active.pop(output.request_id)
        if not kept and stats is None:
            return
        try:
            self._send(Outputs(kept, stats))
        except ChannelError:
            for output in kept:
                self._deliver_large(output, arrivals.get(output.request_id))

    def _deliver_large(self, output: Output, ended_from: float | None) -> None:
        """One output of a step that is too large for a frame as a whole."""
        try:
            self._send(Outputs([output]))
        except ChannelError as error:
            _log.error("an output of request %s is too large: %s", output.request_id, error)
            too_large = InvalidRequest(
                "The answer is too large to be sent; ask for fewer log-probabilities or choices."
            )
            if output.end is None or ended_from is None:  # its end, which says what was computed, is still to come
                self._too_large[output.request_id] = too_large
                self._backend.cancel(output.request_id)
            else:
                self._send(Outputs([ended(output.request_id, ended_from, too_large, output.end.usage)]))


def ended(request_id: str, arrived_at: float, error: Exception, usage: Usage = Usage()) -> Output:
    """The one output of a request that failed before or while it was computed; ``usage``: what was computed."""
    if not isinstance(error, InferdError):
        _log.error("request %s failed: %s", request_id, type(error).__name__, exc_info=error)
        error = InternalError("The model failed while working on this request; the server's log has the details.")
    outcome = "refused" if isinstance(error, InvalidRequest | Overloaded) else "failed"
    timings = Timings(finished=clock.now() - arrived_at)
    return Output(request_id, (), None, End(outcome, usage, timings, error.to_failure()))  # type: ignore[arg-type]
