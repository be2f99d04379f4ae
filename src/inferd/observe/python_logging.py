"""Python's logging in the same log as everything else.

Interpreted in every form of inferd: the handler inherits from one of the standard library.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from inferd.worker.log_lines import record_line


class LogHandler(logging.Handler):
    """Sends Python's logging into the log: one JSON line per record, without blocking the caller."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(record_line(record))
