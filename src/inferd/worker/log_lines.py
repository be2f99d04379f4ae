"""Records of Python's logging as lines of the log, in the same form from a worker as from the gateway.

Knows no file and no event; ``observe/logs.py`` has the lines of requests and replicas.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sysconfig
import traceback
from pathlib import Path
from typing import Final

from inferd.errors import CodeFailed
from inferd.types import JSON
from inferd.worker.timestamp import timestamp

MAX_MESSAGE_CHARACTERS = 4096
"""Of a record's message."""

MAX_TRACE_CHARACTERS = 16_384
MAX_CAUSES = 5
MAX_FRAMES = 20
"""Of what the operator's own code raised."""

_OURS: Final = str(Path(__file__).parents[1]) + os.sep


def record_line(record: logging.LogRecord, worker: str | None = None) -> str:
    """A record of Python's logging; ``worker``: the worker that wrote it. An exception is shown by its type and its
    places, without its message, which may quote a request. An exception of the operator's own code is shown in full."""
    line: JSON = {
        "ts": timestamp(record.created),
        "level": record.levelname.lower(),
        "event": "log",
        "logger": record.name,
        "message": record.getMessage()[:MAX_MESSAGE_CHARACTERS],
    }
    if worker is not None:
        line["worker"] = worker
    if record.exc_info is not None and record.exc_info[0] is not None:
        kind, error, trace = record.exc_info
        if isinstance(error, CodeFailed) and error.__cause__ is not None:
            line["error"] = type(error.__cause__).__name__
            line["trace"] = trace_text(error.__cause__)
            return encoded(line)
        line["error"] = kind.__name__
        line["places"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(trace)]
    return encoded(line)


def encoded(line: JSON) -> str:
    """One line of ASCII without control characters, whatever the texts hold."""
    return json.dumps(line, separators=(",", ":")).replace("\x7f", "\\u007f")


def neutral(text: str, indent: str = "    ") -> str:
    """A text for a terminal: control characters, direction marks and all else that is not printable are shown as escape
    sequences. Further lines are indented, so that none of them looks like a line of the log."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else "\n" + indent if letter == "\n" else ascii(letter)[1:-1] for letter in text
    )


def trace_text(error: BaseException) -> str:
    """An exception and the lines that led to it, the innermost first: lines of the operator's own files, then of
    libraries, none of inferd's. Its causes follow in the same form."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < MAX_CAUSES:
        frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if not _is_ours(frame.filename)]
        own = [frame for frame in frames if not frame.filename.startswith(_libraries())]
        others = [frame for frame in frames if frame.filename.startswith(_libraries())]
        said = "".join(traceback.format_exception_only(cause)).rstrip()
        lines = [
            f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in [*own[::-1], *others[::-1]]
        ]
        parts.append("\n".join([said, *lines[:MAX_FRAMES]]))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    text = "\nbecause of ".join(parts)[:MAX_TRACE_CHARACTERS]
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def _is_ours(filename: str) -> bool:
    return filename.startswith((_OURS, "<frozen "))


@functools.cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(dict.fromkeys(paths[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")))


class Words(logging.Formatter):
    """Formats a worker's records as text, in the form of the server's own lines."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self.worker = worker

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging calls it so
        said = neutral(record.getMessage()[:MAX_MESSAGE_CHARACTERS])
        return f"{timestamp(record.created)[11:19]} {record.levelname.lower()}: {self.worker}: {said}"

    def formatException(self, ei: object) -> str:  # noqa: N802  logging calls it so
        """For an exception of the operator's own code: the exception and the code's lines."""
        assert isinstance(ei, tuple)
        error = ei[1]
        if isinstance(error, CodeFailed) and error.__cause__ is not None:
            return trace_text(error.__cause__)
        return super().formatException(ei)


class JsonLines(logging.Formatter):
    """Formats a worker's records."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self.worker = worker

    def format(self, record: logging.LogRecord) -> str:
        return record_line(record, self.worker)
