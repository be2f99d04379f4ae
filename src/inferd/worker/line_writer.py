"""Writes the lines of a log to stderr or to a file, from a thread of its own.

Lines go through a bounded queue, so that a reader that stops reading, or a full disk, stops nothing else. When the
queue is full, or writing fails, lines are dropped and counted, and the next line that is written says how many. The
thread is woken for many lines at once: waking it for each would cost an event loop more than the request itself.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from inferd import clock
from inferd.open_class import mypyc_attr
from inferd.worker.log_lines import encoded
from inferd.worker.timestamp import timestamp

MAX_LINES = 4096
"""Lines that may wait for the reader."""

MAX_BATCH = 1024
"""Lines that are written at once."""

GATHER_S = 0.05
"""How long a line waits for more lines to be written with it."""

CHECK_S = 1.0
"""How long a file may be renamed or removed before the log notices it."""

FILE_MODE = 0o640


class LogStream(Protocol):
    """Where lines go. With a ``fileno`` of the operating system's it is written to directly."""

    def write(self, text: str, /) -> int: ...
    def flush(self) -> None: ...


class Target(Protocol):
    """Where a writer's thread writes whole lines."""

    def write_lines(self, text: str) -> None:
        """Raises OSError or ValueError where the lines could not be written."""

    def close(self) -> None:
        """No line follows."""


@mypyc_attr(allow_interpreted_subclasses=True)
class StreamTarget:
    """A stream such as stderr.

    Where the stream is a file of the operating system it is written to directly: a thread that is
    stuck holding Python's own buffer of stderr would stop the interpreter from leaving.
    """

    def __init__(self, stream: LogStream) -> None:
        self._stream = stream
        self._fd = _descriptor(stream)

    def write_lines(self, text: str) -> None:
        if self._fd is None:
            self._stream.write(text)
            self._stream.flush()
            return
        write_all(self._fd, text)

    def close(self) -> None:
        """Leave the stream open: it belongs to the process."""


class FileTarget:
    """A file that lines are appended to. A file that was renamed or removed is left, and the path is opened again.

    So logrotate needs neither a signal nor ``copytruncate``. The path is checked at most once in ``CHECK_S``.
    """

    def __init__(self, path: str, now: Callable[[], float] = clock.now) -> None:
        """The file is opened with the first line."""
        self._path = path
        self._now = now
        self._fd = -1
        self._identity = (0, 0)
        self._checked_at = 0.0
        self._is_torn = False  # the last line was written in part

    def write_lines(self, text: str) -> None:
        if self._now() - self._checked_at >= CHECK_S or self._fd < 0:
            self._follow()
        rest = memoryview((("\n" if self._is_torn else "") + text).encode("ascii", "backslashreplace"))
        while rest:
            num_written = os.write(self._fd, rest)
            self._is_torn = num_written > 0 and rest[num_written - 1] != 10
            rest = rest[num_written:]

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _follow(self) -> None:
        """Open the path again where another file, or none, is there."""
        self._checked_at = self._now()
        try:
            found = os.stat(self._path)
            is_same = self._fd >= 0 and (found.st_dev, found.st_ino) == self._identity
        except FileNotFoundError:
            is_same = False
        if not is_same:
            self.open()

    def open(self) -> None:
        """Raises OSError where the file cannot be opened."""
        # Without O_NONBLOCK a named pipe that no process reads would stop the start, and a full one the thread.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
        opened = os.open(self._path, flags, FILE_MODE)  # before the old one is closed: it is kept where this fails
        self.close()
        found = os.fstat(opened)
        self._fd, self._identity, self._is_torn = opened, (found.st_dev, found.st_ino), False
        self._checked_at = self._now()


class LineWriter:
    """Writes lines from a thread of its own. ``write`` never waits; any thread may call it."""

    def __init__(
        self,
        target: Target,
        on_drop: Callable[[], None],
        *,
        form: Callable[[str], str | None] | None = None,
        gather_s: float = GATHER_S,
    ) -> None:
        """``form`` turns a line into the text that is written; it returns None for a line that is left out."""
        self._target = target
        self._form = form
        self._gather_s = gather_s
        self._on_drop = on_drop
        self._num_refused = 0  # dropped by ``write``
        self._num_failed = 0  # dropped by the thread
        self._num_reported = 0  # of all of them: those that a line has told of
        self._is_failing = False  # the last write failed
        self._lines: deque[str] = deque()
        self._num_in_hand = 0  # out of the queue, and not yet written
        self._is_closed = False
        self._is_asleep = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._writing = threading.Thread(target=self._run, name="inferd-log", daemon=True)
        self._writing.start()

    def write(self, line: str) -> None:
        if self._is_closed or len(self._lines) + self._num_in_hand >= MAX_LINES:
            self._num_refused += 1
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
        self._writing.join(timeout_s)  # if the reader is stuck, the daemon thread ends with the process

    def _run(self) -> None:
        while True:
            lines = [self._lines.popleft() for _ in range(min(len(self._lines), MAX_BATCH))]
            if lines or (self._num_unreported and not self._is_failing):
                self._num_in_hand = len(lines)
                self._write_batch(lines)
                self._num_in_hand = 0
            elif not self._sleep():
                self._target.close()
                return

    @property
    def _num_unreported(self) -> int:
        return self._num_refused + self._num_failed - self._num_reported

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
        self._closing.wait(self._gather_s)
        return True

    def _write_batch(self, lines: list[str]) -> None:
        form, num_unreported = self._form, self._num_unreported
        report = [dropped_line(num_unreported, clock.wall())] if num_unreported else []
        shown = lines if form is None else [said for line in lines if (said := form(line)) is not None]
        told = report if form is None else [said for line in report if (said := form(line)) is not None]
        if not shown and not told:
            return
        try:
            self._target.write_lines("\n".join([*told, *shown]) + "\n")
        except (OSError, ValueError):  # the reader has ended, the disk is full, or the stream was closed
            self._is_failing = True
            self._num_failed += len(shown)
            for _ in shown:
                self._on_drop()
        else:
            self._is_failing = False
            self._num_reported += num_unreported


def dropped_line(num_dropped: int, wall_s: float) -> str:
    """The line that stands in the place of those that were dropped."""
    line = {"ts": timestamp(wall_s), "level": "warning", "event": "lines_dropped", "lines": num_dropped}
    return encoded(line)


def write_all(fd: int, text: str) -> None:
    """Write to the descriptor itself, past every buffer of Python's. Raises OSError."""
    rest = memoryview(text.encode("ascii", "backslashreplace"))
    while rest:
        num_written = _write_some(fd, rest)
        rest = rest[num_written:]


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
