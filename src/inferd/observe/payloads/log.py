"""Which calls are recorded, and the thread that writes their records.

The event loop decides by tenant when a call begins, and by its session where it has one, and puts it into a bounded
queue when it is over. The thread draws the other calls (``sample.py``), makes the records, redacts and writes them, and
deletes files whose time is over. What does not fit into the queue, or cannot be written, is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from inferd import clock
from inferd.config import PayloadsConfig
from inferd.events import HttpServed
from inferd.observe.payloads.capture import Capture, Head
from inferd.observe.payloads.content import UNKNOWN, AnsweredBy, record_of
from inferd.observe.payloads.redaction import Redactor
from inferd.observe.payloads.sample import is_drawn, session_of, unit_of
from inferd.observe.payloads.store import PayloadStore
from inferd.observe.payloads.texts import Texts

MAX_WAITING: Final = 1024
MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
"""Calls that wait for the thread, and the bytes that they hold."""

PURGE_S: Final = 60.0

AnsweredByOf = Callable[[str], AnsweredBy]
"""The version that a model's name in the configuration stands for."""

_log = logging.getLogger("inferd.payloads")


class _Settings:
    """A configuration, with what is derived from it. Replaced as a whole."""

    def __init__(self, config: PayloadsConfig) -> None:
        self.config = config
        self.tenants = frozenset(config.tenants)
        self.models = frozenset(config.models)
        self.keep = frozenset(config.keep)
        self.redact = Redactor(config.redact, config.patterns)


class PayloadLog:
    """Used from the event loop, besides its thread, which runs while payloads are recorded or files are left."""

    def __init__(
        self,
        data_dir: Path,
        config: PayloadsConfig,
        on_drop: Callable[[], None],
        answered_by: AnsweredByOf = lambda name: UNKNOWN,
        *,
        wall: Callable[[], float] = clock.wall,
    ) -> None:
        self._store = PayloadStore(data_dir)
        self._on_drop = on_drop
        self._answered_by = answered_by
        self._wall = wall
        self._settings = _Settings(config)
        self.is_on = bool(config.tenants)
        self._waiting: deque[tuple[Capture, HttpServed, float, AnsweredBy]] = deque()
        self._num_bytes = 0  # that wait
        self._num_bytes_done = 0
        self._wake = threading.Event()
        self._is_closed = False
        self._has_failed = False
        self._thread: threading.Thread | None = None
        self._start()

    def configure(self, config: PayloadsConfig) -> None:
        """Use another configuration for calls that begin from now on."""
        self._settings = _Settings(config)
        self.is_on = bool(config.tenants)
        self._start()

    def _start(self) -> None:
        if self._thread is None and (self.is_on or self._store.folder.is_dir()):
            self._thread = threading.Thread(target=self._run, name="inferd-payloads", daemon=True)
            self._thread.start()

    # -- in the event loop ------------------------------------------------------------------

    def begin(self, tenant: str, unique: str, texts: Texts | None, head: Head | None = None) -> Capture | None:
        """A capture for a call that may be recorded. ``unique``: the random id of the call. ``texts``: of its route.
        ``head``: of a request over HTTP."""
        settings = self._settings
        if tenant not in settings.tenants and "*" not in settings.tenants:
            return None
        ratio = settings.config.ratio
        if ratio < 1:
            session = session_of(head)
            if session and not is_drawn(tenant, f"session {session}", ratio):
                return None
        return Capture(self, texts, head, unique)

    def offer(self, capture: Capture, event: HttpServed) -> None:
        if self._settings.models and event.model not in self._settings.models:
            return
        held = self._num_bytes - self._num_bytes_done + capture.num_bytes
        if self._is_closed or len(self._waiting) >= MAX_WAITING or held > MAX_WAITING_BYTES:
            self._on_drop()
            return
        self._num_bytes += capture.num_bytes
        answered_by = UNKNOWN if event.model is None else self._answered_by(event.model)
        self._waiting.append((capture, event, self._wall(), answered_by))
        self._wake.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, for at most ``timeout_s``. Idempotent."""
        self._is_closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    # -- in the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        purged_at = float("-inf")
        while True:
            if clock.now() - purged_at >= PURGE_S:
                purged_at = clock.now()
                self._purge()
            self._wake.clear()
            while self._waiting:
                self._write(*self._waiting.popleft())
            if self._is_closed:
                return
            self._wake.wait(PURGE_S)

    def _write(self, capture: Capture, event: HttpServed, at: float, answered_by: AnsweredBy) -> None:
        settings = self._settings
        try:
            ratio = settings.config.ratio
            if ratio < 1:
                unit = unit_of(capture.head, capture.request or b"", capture.unique)
                if not is_drawn(event.tenant, unit, ratio):
                    return
            line = record_of(
                *(capture, event, at, settings.redact, settings.keep, settings.config.max_text, answered_by),
                redacts=not settings.redact.is_empty,
            )
            self._store.append(event.tenant, line + b"\n", at, settings.config.max_bytes)
            self._has_failed = False
        except Exception as error:  # the loop of a thread: a defect, or a full disk, loses one record
            self._on_drop()
            if not self._has_failed:
                self._has_failed = True
                _log.error("a payload was not recorded, and the next ones may not be either: %s", type(error).__name__)
        finally:
            self._num_bytes_done += capture.num_bytes

    def _purge(self) -> None:
        try:
            num_deleted = self._store.purge(self._wall(), self._settings.config.keep_days)
        except OSError as error:
            _log.error("old payloads could not be deleted: %s", error.strerror)
        else:
            if num_deleted:
                _log.info("%d files of payloads were deleted: they were older than payloads.keep_days", num_deleted)
