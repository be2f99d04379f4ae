"""Records of Python's logging as JSON lines: the same from a worker as from the gateway, into one log.

Knows no file and no event; ``observe/logs.py`` has the lines of requests and replicas.
"""

from __future__ import annotations

import functools
import json
import logging
import traceback
from datetime import UTC, datetime

from inferd.types import JSON

MAX_MESSAGE_CHARACTERS = 4096
"""Of a record's message."""


def record_line(record: logging.LogRecord, worker: str | None = None) -> str:
    """A record of Python's logging, of ``worker`` where it is one. Of an exception the type and the places, not its
    message, which may quote a request."""
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
        kind, _, trace = record.exc_info
        line["error"] = kind.__name__
        line["places"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(trace)]
    return json.dumps(line, separators=(",", ":"))


def timestamp(wall_s: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC, to the millisecond."""
    second = int(wall_s)
    return f"{_second(second)}.{int((wall_s - second) * 1000):03d}Z"


@functools.lru_cache(maxsize=2)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat(timespec="seconds").removesuffix("+00:00")


class JsonLines(logging.Formatter):
    """Formats a worker's records."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        return record_line(record, self._worker)
