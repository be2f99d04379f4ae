"""Progress of work on files: nothing for little, a bar for what takes longer than about two seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from inferd.cli.terminal import ReportProgress, loading

SHOWN_BYTES: Final = 512 << 20  # about two seconds of one core


@contextmanager
def reading(title: str) -> Iterator[ReportProgress]:
    """A function of (phase, bytes done, bytes in total) that draws a bar once the total is worth one."""
    with ExitStack() as stack:
        shown: ReportProgress | None = None

        def report(phase: str, done: int, total: int) -> None:
            nonlocal shown
            if shown is None and total >= SHOWN_BYTES:
                shown = stack.enter_context(loading(title))
            if shown is not None:
                shown(phase, done, total)

        yield report
