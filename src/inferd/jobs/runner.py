"""Works on batches: takes those that no server works on, and deletes what is too old."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from inferd import clock
from inferd.errors import StateUnavailable
from inferd.events import Emit, ignore
from inferd.jobs.batch import Batch, Lease
from inferd.jobs.machine import WrongPlace
from inferd.jobs.run import Run, Sender
from inferd.jobs.store import JobStore, LeaseLost

TAKE_S: Final = 1.0
"""Time between two looks for batches that wait, or whose server has ended."""

SWEEP_S: Final = 60.0

_log = logging.getLogger("inferd.jobs")


class Runner:
    """The batches that this process works on. Call ``keep`` in a task of its own, and ``wake`` after a new batch."""

    def __init__(
        self,
        store: JobStore,
        sender: Sender,
        is_leaving: Callable[[], bool],
        *,
        max_line_bytes: int,
        tell: Emit = ignore,
    ) -> None:
        self.store = store
        self._sender = sender
        self._is_leaving = is_leaving
        self._max_line_bytes = max_line_bytes
        self._tell = tell
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leases: dict[str, Lease] = {}
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Look for batches now."""
        self._woken.set()

    async def keep(self) -> None:
        """Take batches and work on them until this is cancelled; then leave them to other servers."""
        swept_at = -SWEEP_S
        try:
            while True:
                self._woken.clear()
                with contextlib.suppress(StateUnavailable):  # it is logged where the database is used
                    if self._is_leaving():
                        await self._leave()
                    else:
                        await self._take()
                if clock.now() - swept_at >= SWEEP_S:
                    swept_at = clock.now()
                    await self._sweep()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TAKE_S):
                        await self._woken.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _take(self) -> None:
        most = self.store.config.max_running - len(self._tasks)
        for batch, lease in await self.store.take(frozenset(self._tasks), most):
            if lease.fence > 1:
                _log.warning("the batch %s goes on after line %d", batch.id, batch.place.line)
            task = asyncio.get_running_loop().create_task(self._work(batch, lease))
            self._tasks[batch.id], self._leases[batch.id] = task, lease
            task.add_done_callback(_log_defect)

    async def _work(self, batch: Batch, lease: Lease) -> None:
        run = Run(batch, lease, self.store, self._sender, self._tell, self._max_line_bytes)
        try:
            await run.go()
        except (LeaseLost, WrongPlace):
            _log.warning("the batch %s is another server's now", batch.id)
        finally:
            del self._tasks[batch.id]
        self.wake()

    async def _leave(self) -> None:
        """End the work, and give the batches back."""
        for name, task in list(self._tasks.items()):
            task.cancel()
            _log.info("the batch %s is left to the next server", name)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        while self._leases:
            await self.store.give_back(self._leases.popitem()[1])

    async def _sweep(self) -> None:
        try:
            await self.store.sweep()
        except StateUnavailable:
            pass
        except OSError as error:
            _log.error("the folder of files cannot be swept: %s", error)


def _log_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the work on a batch failed, and begins again", exc_info=error)
