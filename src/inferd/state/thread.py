"""The one thread that uses the database: runs jobs of the event loop and periodic tasks.

The event loop puts jobs into a queue. A connection that fails is closed, and opened again after a pause that doubles up
to ``MAX_PAUSE_S``. Until then jobs fail at once and periodic tasks wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from inferd import clock
from inferd.errors import InferdError, StateUnavailable
from inferd.state.database import Database

T = TypeVar("T")
Job = Callable[[Database], T]

MIN_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 2.0
MAX_JOBS: Final = 4096
WAIT_S: Final = 5.0

_log = logging.getLogger("inferd.state")


class _PeriodicTask:
    """A task that runs periodically."""

    __slots__ = ("at", "every_s", "task")

    def __init__(self, every_s: float, task: Job[None]) -> None:
        self.every_s = every_s
        self.task = task
        self.at = 0.0


class StateThread:
    """Register tasks, then ``start``, then ``submit`` or ``call``, then ``close``."""

    def __init__(
        self, connect: Callable[[], Database], changed: Callable[[bool], None] = lambda available: None
    ) -> None:
        """``changed`` is called in the thread: False when the database fails, True when it answers again."""
        self._connect = connect
        self._changed = changed
        self._database: Database | None = None
        self._tasks: list[_PeriodicTask] = []
        self._closing_tasks: list[Job[None]] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pause_s = MIN_PAUSE_S
        self._retry_at = 0.0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="inferd-state", daemon=True)

    @property
    def is_connected(self) -> bool:
        """Whether the database answered the last time it was used."""
        return self._database is not None

    # -- from any thread ---------------------------------------------------------------------------

    def run_every(self, seconds: float, task: Job[None]) -> None:
        """Run ``task`` about every ``seconds`` seconds. Call this before ``start``."""
        self._tasks.append(_PeriodicTask(seconds, task))

    def run_at_close(self, task: Job[None]) -> None:
        """Run ``task`` at ``close``, if the database can be reached. Call this before ``start``."""
        self._closing_tasks.append(task)

    def start(self, database: Database) -> None:
        """Start the thread with a database that is open."""
        self._database = database
        self._thread.start()

    def submit(self, job: Job[T]) -> Future[T]:
        """Run ``job`` in the thread. The future raises the job's exception, or StateUnavailable."""
        future: Future[T] = Future()
        if self._is_closing or self._jobs.qsize() >= MAX_JOBS:
            future.set_exception(StateUnavailable("The database takes no more jobs now; try again.", retry_after_s=1.0))
            return future

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job(self._connected()))
                except StateUnavailable as error:
                    self._disconnect(error)
                    future.set_exception(error)
                except BaseException as error:
                    future.set_exception(error)

        self._jobs.put(run)
        return future

    async def call(self, job: Job[T], *, wait_s: float = WAIT_S) -> T:
        """Await ``job`` for at most ``wait_s``. Raises StateUnavailable and the job's exceptions.

        After a timeout a job that has not started never runs; a job that has started may still take effect.
        """
        future = self.submit(job)
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise StateUnavailable("The database did not answer in time; try again.", retry_after_s=1.0) from None

    def close(self, wait_s: float = 2 * WAIT_S) -> None:
        """Run the queued jobs and the closing tasks, then end the thread. Blocks for at most ``wait_s``."""
        self._is_closing = True
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(wait_s)

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            job = self._next()
            if job is None:
                break
            job()
            self._run_due()
        for task in self._closing_tasks:
            self._run_task(task)
        if self._database is not None:
            self._database.close()

    def _next(self) -> Callable[[], None] | None:
        while True:
            wait_s = min((due.at for due in self._tasks), default=clock.now() + 1.0) - clock.now()
            with contextlib.suppress(queue.Empty):
                return self._jobs.get(timeout=max(wait_s, 0.0)) if wait_s > 0 else self._jobs.get_nowait()
            self._run_due()

    def _run_due(self) -> None:
        for due in self._tasks:
            if clock.now() >= due.at:
                self._run_task(due.task)
                due.at = clock.now() + due.every_s

    def _run_task(self, task: Job[None]) -> None:
        try:
            task(self._connected())
        except StateUnavailable as error:
            self._disconnect(error)
        except Exception:  # a defect of one task must not stop the others
            _log.exception("a task of the state thread failed")

    def _connected(self) -> Database:
        if self._database is None:
            if clock.now() < self._retry_at:
                raise StateUnavailable("The database cannot be reached; try again.", retry_after_s=1.0)
            try:
                self._database = self._connect()
            except StateUnavailable:
                raise
            except InferdError as error:  # newer, damaged or not writable: treated as unreachable
                raise StateUnavailable(error.message) from error
            self._pause_s = MIN_PAUSE_S
            _log.warning("the database answers again")
            self._changed(True)
        else:
            self._database.check()
        return self._database

    def _disconnect(self, error: StateUnavailable) -> None:
        """Close the connection and open a new one after a pause. Logs once per outage."""
        if self._database is not None:
            _log.error("the database does not answer, known keys stay valid: %s", error.message)
            self._database.close()
            self._database = None
            self._retry_at = clock.now() + self._pause_s
            self._changed(False)
        elif clock.now() >= self._retry_at:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self._retry_at = clock.now() + self._pause_s
