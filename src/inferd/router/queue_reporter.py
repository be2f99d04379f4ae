"""Reports how many requests wait and run, at most once in ``_REPORT_EVERY_S`` seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from inferd import clock
from inferd.events import Emit, QueueChanged
from inferd.router.replicas.fleet import Fleet
from inferd.router.waiting.queue import RequestQueue

_REPORT_EVERY_S = 0.02


class QueueReporter:
    """Emits ``QueueChanged`` for one model. ``num_backing_off``: the number of requests in backoff before a retry."""

    __slots__ = ("_emit", "_fleet", "_model", "_num_backing_off", "_queue", "_reported_at", "is_scheduled")

    def __init__(
        self, model: str, queue: RequestQueue, fleet: Fleet, num_backing_off: Callable[[], int], emit: Emit
    ) -> None:
        self._model = model
        self._queue = queue
        self._fleet = fleet
        self._num_backing_off = num_backing_off
        self._emit = emit
        self._reported_at = 0.0
        self.is_scheduled = False

    def report(self) -> None:
        """Schedule one event for all changes until then: in the next turn of the event loop, or later if an event was
        emitted less than ``_REPORT_EVERY_S`` seconds ago."""
        if not self.is_scheduled:
            self.is_scheduled = True
            loop = asyncio.get_running_loop()
            due_s = self._reported_at + _REPORT_EVERY_S - clock.now()
            if due_s <= 0:
                loop.call_soon(self._emit_event)
            else:
                loop.call_later(due_s, self._emit_event)

    def _emit_event(self) -> None:
        self.is_scheduled = False
        self._reported_at = clock.now()
        critical, interactive, normal, batch = self._queue.by_class
        self._emit(
            QueueChanged(
                model=self._model,
                waiting=len(self._queue) + self._num_backing_off(),
                in_flight=sum(member.replica.num_in_flight for member in self._fleet.members),
                waiting_by_class=(critical, interactive, normal, batch),
                waiting_tokens=self._queue.num_tokens,
                waiting_bytes=self._queue.num_bytes,
            )
        )
