"""One JSON line per HTTP request, change of a replica and log record; never a prompt's or an answer's text.

Lines go through a bounded queue to a thread of their own, so that a log reader that stops reading
stops nothing else: when the queue is full, lines are dropped and counted.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from inferd import clock
from inferd.events import HttpServed, ReplicaChanged
from inferd.types import JSON

MAX_LINES = 4096
"""Lines that may wait for the reader."""

MAX_CHARACTERS = 256
"""Of a text field that a client chose; the rest is cut off."""

MAX_MESSAGE_CHARACTERS = 4096
"""Of a log record's message."""

_LEVELS: dict[str, str] = {"hung": "error", "died": "error", "failed": "error"}


def http_line(event: HttpServed, wall_s: float) -> str:
    """The access log's line. ASCII only: whatever a client put in an id, it is one line of plain JSON."""
    line: JSON = {
        "ts": timestamp(wall_s),
        "level": _level(event.status),
        "event": "http",
        "request_id": _cut(event.request_id),
        "tenant": _cut(event.tenant),
        "model": None if event.model is None else _cut(event.model),
        "route": event.route,
        "method": _cut(event.method),
        "status": event.status,
        "outcome": event.outcome,
        "finish_reasons": event.finish_reasons,
        "error_code": event.error_code,
        "stream": event.stream,
        "duration_s": round(event.duration_s, 6),
        "request_bytes": event.request_bytes,
        "response_bytes": event.response_bytes,
    }
    if event.usage is not None:
        line["usage"] = {name: getattr(event.usage, name) for name in event.usage.__struct_fields__}
    if event.timings is not None:
        timings = {name: getattr(event.timings, name) for name in event.timings.__struct_fields__}
        line["timings"] = {name: round(at, 6) for name, at in timings.items() if at is not None}
    return json.dumps(line, separators=(",", ":"))


def _level(status: int) -> str:
    """503 is no defect: a full queue refuses, and a probe asks before the model is ready."""
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


def record_line(record: logging.LogRecord) -> str:
    """A record of Python's logging. Of an exception the type and the places, not its message, which
    may quote a request."""
    line: JSON = {
        "ts": timestamp(record.created),
        "level": record.levelname.lower(),
        "event": "log",
        "logger": record.name,
        "message": record.getMessage()[:MAX_MESSAGE_CHARACTERS],
    }
    if record.exc_info is not None and record.exc_info[0] is not None:
        kind, _, trace = record.exc_info
        line["error"] = kind.__name__
        line["places"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(trace)]
    return json.dumps(line, separators=(",", ":"))


class LogHandler(logging.Handler):
    """Python's logging, into the same log: one JSON line per record, and it waits for nobody either."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(record_line(record))


def timestamp(wall_s: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC, to the millisecond."""
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS]


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
        max_lines: int = MAX_LINES,
        form: Callable[[str], str | None] | None = None,
    ) -> None:
        """``form``: what becomes of a line before it is written; None leaves it out."""
        self._stream = stream
        self._form = form
        self._fd = _descriptor(stream)
        self._on_drop = on_drop
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="inferd-log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        if self._is_closed:
            self._on_drop()
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._on_drop()

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what waits, for at most ``timeout_s``; then leave it. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = clock.now() + timeout_s
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return  # the reader is stuck; the daemon thread ends with the process
        self._thread.join(max(0.0, deadline - clock.now()))

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            shown = line if self._form is None else self._form(line)
            if shown is None:
                continue
            try:
                self._write_out(shown + "\n")
            except (OSError, ValueError):  # the reader is gone, or the stream was closed
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
    except BlockingIOError:  # somebody made the descriptor non-blocking: wait here, in the log's own thread
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
