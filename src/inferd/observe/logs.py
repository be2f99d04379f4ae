"""One JSON line per HTTP request, change of a replica and log record; never a prompt's or an answer's text.

Lines go through a bounded queue to a thread of their own, so that a log reader that stops reading stops nothing else.
When the queue is full, lines are dropped and counted. The thread is woken for many lines at once: waking it for each
would cost the event loop more than the request itself.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from inferd.events import HttpServed, ReplicaChanged
from inferd.types import JSON, Timings
from inferd.worker.log_lines import record_line, timestamp

MAX_LINES = 4096
"""Lines that may wait for the reader."""

MAX_BATCH = 1024
"""Lines that are written at once."""

GATHER_S = 0.05
"""How long a line waits for more lines to be written with it."""

MAX_CHARACTERS = 256
"""Of a text field that a client chose; the rest is cut off."""

_encode = msgspec.json.Encoder().encode
_LEVELS: dict[str, str] = {"hung": "error", "died": "error", "failed": "error"}


def http_line(event: HttpServed, wall_s: float) -> str:
    """A line of the access log. ASCII only: any id of a client results in one line of plain JSON."""
    usage, timings = event.usage, event.timings
    line = _HttpLine(
        timestamp(wall_s),
        _level(event.status),
        "http",
        event.request_id[:MAX_CHARACTERS],
        event.tenant[:MAX_CHARACTERS],
        event.key_id[:MAX_CHARACTERS],
        None if event.model is None else event.model[:MAX_CHARACTERS],
        event.route,
        event.method[:MAX_CHARACTERS],
        event.status,
        event.outcome,
        event.finish_reasons,
        event.error_code,
        event.error_text[:MAX_CHARACTERS] or UNSET,
        event.path[:MAX_CHARACTERS] or UNSET,
        event.stream,
        round(event.duration_s, 6),
        event.request_bytes,
        event.response_bytes,
        UNSET if usage is None else _UsageLine(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        UNSET if timings is None else _timings(timings),
    )
    try:
        text = _encode(line).decode()
    except UnicodeEncodeError:
        text = ""
    if text and text.isascii() and "\x7f" not in text:
        return text
    # Characters other than printable ASCII are escaped, which is slower and rare.
    return json.dumps(msgspec.to_builtins(line), separators=(",", ":"))


class _UsageLine(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class _TimingsLine(msgspec.Struct):
    """In the order of ``Timings``; a stage that was not reached is left out."""

    dispatched: float | UnsetType
    tokenized: float | UnsetType
    scheduled: float | UnsetType
    first_token: float | UnsetType
    finished: float | UnsetType


class _HttpLine(msgspec.Struct):
    ts: str
    level: str
    event: str
    request_id: str
    tenant: str
    key_id: str
    model: str | None
    route: str
    method: str
    status: int
    outcome: str | None
    finish_reasons: tuple[str, ...]
    error_code: str | None
    error: str | UnsetType
    path: str | UnsetType
    stream: bool
    duration_s: float
    request_bytes: int
    response_bytes: int
    usage: _UsageLine | UnsetType
    timings: _TimingsLine | UnsetType


def _timings(timings: Timings) -> _TimingsLine:
    dispatched, tokenized, scheduled = timings.dispatched, timings.tokenized, timings.scheduled
    first_token, finished = timings.first_token, timings.finished
    return _TimingsLine(
        UNSET if dispatched is None else round(dispatched, 6),
        UNSET if tokenized is None else round(tokenized, 6),
        UNSET if scheduled is None else round(scheduled, 6),
        UNSET if first_token is None else round(first_token, 6),
        UNSET if finished is None else round(finished, 6),
    )


def _level(status: int) -> str:
    """503 is no defect: a full queue refuses requests, and probes arrive before a model is ready."""
    return "info" if status < 400 else "warning" if status < 500 or status == 503 else "error"


def replica_line(event: ReplicaChanged, wall_s: float) -> str:
    line: JSON = {
        "ts": timestamp(wall_s),
        "level": _LEVELS.get(event.state, "info"),
        "event": "replica",
        "model": event.model,
        "replica": event.replica,
        "state": event.state,
        "reason": event.reason,
        "restarts": event.restarts,
    }
    if event.load_s:
        line["load_s"] = {phase: round(seconds, 3) for phase, seconds in event.load_s.items()}
    return json.dumps(line, separators=(",", ":"))


class LogHandler(logging.Handler):
    """Sends Python's logging into the same log: one JSON line per record, without blocking the caller."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(record_line(record))


class LogStream(Protocol):
    """Where lines go. With a ``fileno`` of the operating system's it is written to directly."""

    def write(self, text: str, /) -> int: ...
    def flush(self) -> None: ...


class LineWriter:
    """Writes lines to a stream from a thread of its own. ``write`` never waits; any thread may call it.

    Where the stream is a file of the operating system it is written to directly: a thread that is
    stuck holding Python's own buffer of stderr would stop the interpreter from leaving.
    """

    def __init__(
        self,
        stream: LogStream,
        on_drop: Callable[[], None],
        *,
        form: Callable[[str], str | None] | None = None,
    ) -> None:
        """``form`` turns a line into the text that is written; it returns None for a line that is left out."""
        self._stream = stream
        self._form = form
        self._fd = _descriptor(stream)
        self._on_drop = on_drop
        self._lines: deque[str] = deque()
        self._num_in_hand = 0  # out of the queue, and not yet written
        self._is_closed = False
        self._is_asleep = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inferd-log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        if self._is_closed or len(self._lines) + self._num_in_hand >= MAX_LINES:
            self._on_drop()
            return
        self._lines.append(line)
        if self._is_asleep:
            self._is_asleep = False
            self._wake.set()

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what waits, for at most ``timeout_s``; then leave it. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)  # if the reader is stuck, the daemon thread ends with the process

    def _run(self) -> None:
        while True:
            lines = [self._lines.popleft() for _ in range(min(len(self._lines), MAX_BATCH))]
            if lines:
                self._num_in_hand = len(lines)
                self._write_batch(lines)
                self._num_in_hand = 0
            elif not self._sleep():
                return

    def _sleep(self) -> bool:
        """Wait until there is a line to write, and a moment longer; False: the writer was closed."""
        self._wake.clear()
        self._is_asleep = True
        if self._lines:  # a line arrived just before the thread would sleep
            self._is_asleep = False
            return True
        if self._is_closed:
            return False
        self._wake.wait()
        self._closing.wait(GATHER_S)
        return True

    def _write_batch(self, lines: list[str]) -> None:
        form = self._form
        shown = lines if form is None else [said for line in lines if (said := form(line)) is not None]
        if not shown:
            return
        try:
            self._write_out("\n".join(shown) + "\n")
        except (OSError, ValueError):  # the reader has ended, or the stream was closed
            for _ in shown:
                self._on_drop()

    def _write_out(self, text: str) -> None:
        if self._fd is None:
            self._stream.write(text)
            self._stream.flush()
            return
        write_all(self._fd, text)


def write_all(fd: int, text: str) -> None:
    """Write to the descriptor itself, past every buffer of Python's. Raises OSError."""
    rest = memoryview(text.encode("ascii", "backslashreplace"))
    while rest:
        rest = rest[_write_some(fd, rest) :]


def _write_some(fd: int, data: memoryview) -> int:
    try:
        return os.write(fd, data)
    except BlockingIOError:  # another program made the descriptor non-blocking: wait here, in the log's own thread
        import select

        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        poll.poll()
        return 0


def _descriptor(stream: LogStream) -> int | None:
    try:
        descriptor: int = stream.fileno()  # type: ignore[attr-defined]
        return descriptor
    except (OSError, ValueError, AttributeError):  # a stream in memory, as in tests
        return None
