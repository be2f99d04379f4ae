"""The audit log of a running server: appends in a thread of its own, so that a slow disk delays admin actions alone.

Actions wait for their lines. Refused sign-ins and refused requests for administration do not, and are summed up
(``refused_access.py``).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeVar

from inferd import clock
from inferd.app.refused_access import Origin, RefusedAccess, RefusedLine
from inferd.errors import StateUnavailable
from inferd.events import AdminActed, Emit
from inferd.state.audit import AuditEntry, AuditLog, AuditRecord
from inferd.worker.timestamp import timestamp

WAIT_S: Final = 5.0
"""How long an action waits for its line."""

T = TypeVar("T")
_log = logging.getLogger("inferd.app")


class AuditTrail:
    """Used from the event loop. The thread is a daemon: a disk that hangs does not keep the process."""

    def __init__(self, data_dir: Path, emit: Emit, *, wait_s: float = WAIT_S) -> None:
        self._audit = AuditLog(data_dir)
        self._emit = emit
        self._wait_s = wait_s
        self._refused = RefusedAccess()
        self._timer: asyncio.TimerHandle | None = None  # ends the window of refusals
        self._recording: set[asyncio.Task[None]] = set()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="inferd-audit", daemon=True)
        self._thread.start()

    async def record(
        self,
        *,
        actor: str,
        action: str,
        outcome: str,
        tenant: str = "",
        target: str = "",
        request_id: str = "",
        detail: str = "",
        of: int = 0,
    ) -> int:
        record = AuditRecord(
            at=timestamp(clock.wall()),
            actor=actor,
            action=action,
            outcome=outcome,
            tenant=tenant,
            target=target,
            request_id=request_id,
            detail=detail,
            of=of,
        )
        entry, digest = await self._call(lambda: self._audit.append(record))
        self._tell(entry, digest)
        return entry.seq

    def _tell(self, entry: AuditEntry, digest: str) -> None:
        self._emit(
            AdminActed(
                seq=entry.seq,
                hash=digest,
                actor=entry.actor,
                tenant=entry.tenant,
                action=entry.action,
                target=entry.target,
                outcome=entry.outcome,
                request_id=entry.request_id,
            )
        )

    def note_refused(
        self, *, actor: str, tenant: str, action: str, address: str, code: str, target: str, request_id: str
    ) -> None:
        """Count a refused sign-in or a refused request for administration. Never waits and never raises."""
        origin = Origin(actor, tenant, action, address, code)
        self._record_refused(self._refused.note(clock.now(), origin, target, request_id))

    def _record_refused(self, lines: list[RefusedLine]) -> None:
        """Write lines in the background, and come back when the window ends."""
        loop = asyncio.get_running_loop()
        if lines:
            task = loop.create_task(self._write_refused(lines))
            self._recording.add(task)
            task.add_done_callback(self._recording.discard)
        ends_at = self._refused.ends_at
        if ends_at is not None and self._timer is None:
            self._timer = loop.call_later(ends_at - clock.now(), self._end_window)

    def _end_window(self) -> None:
        self._timer = None
        self._record_refused(self._refused.due(clock.now()))

    async def _write_refused(self, lines: list[RefusedLine]) -> None:
        for line in lines:
            try:
                await self.record(outcome="refused", **line._asdict())
            except StateUnavailable as error:
                _log.error(
                    "a refused %s by %s has no line in the audit log: %s", line.action, line.actor, error.message
                )

    async def record_own(
        self, action: str, outcome: str, *, actor: str = "server", target: str = "", detail: str = ""
    ) -> None:
        """Record an action that no request asked for. Where that is not possible an error is logged: the server goes
        on."""
        try:
            await self.record(actor=actor, action=action, outcome=outcome, target=target, detail=detail)
        except StateUnavailable as error:
            _log.error("%s by %s has no line in the audit log: %s", action, actor, error.message)

    async def entries(self, *, before: int | None, limit: int) -> Sequence[AuditEntry]:
        def read() -> list[AuditEntry]:
            try:
                return self._audit.entries(before=before, limit=limit)
            except OSError as error:
                raise StateUnavailable(f"The audit log cannot be read ({error.strerror}).") from None

        return await self._call(read)

    async def _call(self, job: Callable[[], T]) -> T:
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:
                    future.set_exception(error)

        self._jobs.put(run)
        try:
            async with asyncio.timeout(self._wait_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise StateUnavailable(
                "The disk of the audit log does not answer, so the action is refused; try again.",
                code="audit_unavailable",
                retry_after_s=1.0,
            ) from None

    def close(self) -> None:
        """End the thread when it has written what waits, the counted refusals with it. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        written: list[tuple[AuditEntry, str]] = []
        for line in self._refused.rest():
            record = AuditRecord(at=timestamp(clock.wall()), outcome="refused", **line._asdict())
            self._jobs.put(lambda record=record: written.append(self._audit.append(record)))  # type: ignore[misc]
        self._jobs.put(None)
        self._thread.join(1.0)
        for entry, digest in tuple(written):
            self._tell(entry, digest)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except StateUnavailable as error:  # of a line that no request waits for
                _log.error("the audit log has no line of refused requests: %s", error.message)
