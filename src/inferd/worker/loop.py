"""The loop of a generating model: drives a backend in the worker's main thread.

It waits for work or for the time that the backend names, and never polls. Requests arrive prepared, from
``inferd.worker.intake``. ``OpenRequests`` sees to it that each ends exactly once. The loop knows nothing of what a
backend computes, nor of sockets.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable
from typing import Any

import msgspec

from inferd import clock
from inferd.backend import Backend, PausesSteps, RecoversFromSteps, UsesIdleTime
from inferd.worker.messages import Outputs
from inferd.worker.open_requests import OpenRequests

IDLE_AFTER_S = 0.1
"""Seconds without work after which the time counts as idle. Work that comes soon after the model is ready, or after an
answer, would wait for a piece of what is done ahead: up to 50 ms, where the host has to find memory for it."""

MAX_FAILED_STEPS = 3  # failed steps in a row from which the model, and not a request, counts as broken

_log = logging.getLogger("inferd.worker")


class Add(msgspec.Struct, frozen=True):
    """A request that was tokenized and checked and may be computed."""

    request_id: str
    prepared: object
    arrived_at: float


class Drop(msgspec.Struct, frozen=True):
    """The client of this request has left."""

    request_id: str


class Run(msgspec.Struct, frozen=True):
    """Run an action between two steps."""

    action: Callable[[], None]


class Halt(msgspec.Struct, frozen=True):
    """Leave the loop."""


Work = Add | Drop | Run | Halt
Inbox = queue.SimpleQueue[Work]


class StepsFailedError(Exception):
    """The backend raised in every one of the last steps; the process must be replaced."""


class StepLoop:
    """Owns the backend. ``run`` belongs to one thread; ``steps`` and ``is_busy`` may be read by others."""

    def __init__(self, backend: Backend[Any], inbox: Inbox, send: Callable[[Outputs], None]) -> None:
        self._backend = backend
        self._inbox = inbox
        self._open = OpenRequests("generate", send, backend.cancel)
        self._num_failed = 0
        self._working = False
        self._send_s = 0.0  # what sending the last step's outputs took
        self.steps = 0
        if isinstance(backend, PausesSteps):
            backend.pause_steps_when(lambda: not inbox.empty())

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
                    if request_id in self._open:
                        self._backend.cancel(request_id)
                case Run(action):
                    action()
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
                work.append(self._wait_idly() if due is None else self._inbox.get(timeout=due - now))
                self._working = True
            while True:
                work.append(self._inbox.get_nowait())
        except queue.Empty:
            self._working = True
            return work

    def _wait_idly(self) -> Work:
        """The next work, for which the idle time is used once nothing has come for ``IDLE_AFTER_S``."""
        if isinstance(self._backend, UsesIdleTime):
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=IDLE_AFTER_S)
            while self._inbox.empty() and self._backend.use_idle_time():
                pass
        return self._inbox.get()

    def _add(self, work: Add) -> None:
        if self._open.accept(work.request_id, work.arrived_at):
            try:
                self._backend.add(work.prepared, clock.now())
            except Exception as error:
                self._open.fail(work.request_id, error)

    def _step(self, now: float) -> None:
        try:
            outputs, stats = self._backend.step(now)
        except Exception as error:
            _log.exception("a step failed")
            self._num_failed += 1
            self._abort_step(error)
            if self._num_failed >= MAX_FAILED_STEPS:
                raise StepsFailedError(f"The last {self._num_failed} steps failed.") from error
            return
        self._num_failed = 0
        computed = clock.now()
        if stats is not None:
            parts = msgspec.structs.replace(stats.parts, send=self._send_s)
            stats = msgspec.structs.replace(stats, step_s=stats.step_s or computed - now, parts=parts)
        self._open.send(outputs, stats)
        self._send_s = clock.now() - computed

    def _abort_step(self, error: Exception) -> None:
        """End the requests that were in the failed step; all of them, if the backend does not know."""
        if isinstance(self._backend, RecoversFromSteps):
            self._open.send(self._backend.abort_step(error, clock.now()))
        else:
            self._open.cancel_in_backend()
            self._open.fail_all(error)

    def _halt(self) -> None:
        now = clock.now()
        self._open.send(self._backend.halt(now))
        self._open.cancel_all(now)
        self._backend.close()
