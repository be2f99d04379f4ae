"""How inferd looks in a terminal: errors in one red sentence, progress, and plain text for pipes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

ReportProgress = Callable[[str, int, int], None]

_PHASES = {
    "download": "Downloading",
    "model": "Opening the model",
    "weights": "Reading the weights",
    "tokenizer": "Reading the tokenizer",
    "warm-up": "Warming up",
}


def is_debug() -> bool:
    return os.environ.get("INFERD_DEBUG", "").lower() not in ("", "0", "false", "no")


def has_colors() -> bool:
    """Whether a terminal may get colours: neither NO_COLOR (no-color.org) nor a terminal without any forbids them."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class _Voice:
    """Whether stderr is a log of JSON lines, which no other output may interrupt."""

    is_json = False


def speak_json(is_wanted: bool) -> None:
    """Write messages on stderr as JSON lines of the log from now on; or again as text."""
    _Voice.is_json = is_wanted


def _log_line(level: str, sentence: str) -> None:
    import logging

    from inferd.worker.log_lines import record_line

    number = logging.getLevelNamesMapping()[level]
    record = logging.LogRecord("inferd.cli", number, "", 0, "%s", (click.unstyle(sentence),), None)
    click.echo(record_line(record), err=True)


def fail(sentence: str) -> None:
    """Write an error to stderr."""
    if _Voice.is_json:
        _log_line("ERROR", sentence)
        return
    click.secho("Error: ", fg="red", bold=True, nl=False, err=True)
    click.secho(sentence, fg="red", err=True)


def warn(sentence: str) -> None:
    """Write a warning to stderr."""
    if _Voice.is_json:
        _log_line("WARNING", sentence)
        return
    click.secho("Warning: ", fg="yellow", bold=True, nl=False, err=True)
    click.echo(sentence, err=True)


def note(sentence: str) -> None:
    """Write a notice to stderr."""
    if _Voice.is_json:
        _log_line("INFO", sentence)
        return
    click.echo(sentence, err=True)


def console(*, stderr: bool = False) -> Console:
    """A rich console that writes plain text when the output is no terminal."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = 160  # tables for files and pipes are as wide as they need to be
    return made


def print_rows(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] = ()) -> None:
    """Rows as a table where each fits on one line, or where the output is no terminal. On a narrower terminal each row
    is a paragraph, so that nothing is cut and the first cell, such as an id, can be copied. ``numbers``: the heads of
    columns that are aligned to the right."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    out = console()
    gap = 2
    columns = zip(heads, *rows, strict=True)
    needed = sum(max(map(cell_len, column)) for column in columns) + gap * (len(heads) - 1)
    if out.is_terminal and needed > out.width:
        out.print(Text("\n").join(_paragraph(heads, row, out.width) for row in rows))
        return
    out.width = max(out.width, needed)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, justify="right" if head in numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    out.print(table)


def _paragraph(heads: Sequence[str], row: Sequence[str], width: int) -> Text:
    """A row as its first cell and, below it, each other cell that is not empty behind its head."""
    from rich.text import Text

    made = Text(row[0], style="bold")
    filled = width
    for head, cell in zip(heads[1:], row[1:], strict=True):
        if not cell:
            continue
        pair = Text.assemble((head, "dim"), f" {cell}", style="not bold")
        is_next = filled + len(gap := "  ") + pair.cell_len <= width
        filled = (filled if is_next else 0) + len(gap) + pair.cell_len
        made.append(gap if is_next else f"\n{gap}").append_text(pair)
    return made


@contextmanager
def interruptible() -> Iterator[None]:
    """Ends with KeyboardInterrupt where Ctrl-C came within, also where the code within dropped the exception.

    A library's native initialisation that imports Python modules (torch's imports numpy) takes any exception for an
    absent module and goes on.
    """
    before = signal.getsignal(signal.SIGINT)
    came = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.default_int_handler(number, frame)

    if before is signal.default_int_handler:  # otherwise Ctrl-C is ignored, or has another handler
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def is_live() -> bool:
    """Whether progress is drawn: stderr is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def loading(title: str, *, counts: bool = False) -> Iterator[ReportProgress]:
    """A progress display on stderr. Yields a function of (phase, done, total), in bytes or as ``counts``.

    Live in a terminal; elsewhere one plain line per phase.
    """
    if not is_live():
        seen: set[str] = set()

        def line(phase: str, done: int, total: int) -> None:
            if phase not in seen:
                seen.add(phase)
                note(f"{title}: {_PHASES.get(phase, phase).lower()}")

        yield line
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    class Amount(ProgressColumn):
        """The amount done of the total. Empty for a phase of one step, and for one that has not begun."""

        def __init__(self, inner: ProgressColumn) -> None:
            super().__init__(inner.get_table_column())
            self._inner = inner

        def render(self, task: Task) -> RenderableType:
            return self._inner.render(task) if task.total is not None else ""

    amounts: tuple[ProgressColumn, ...] = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    if counts:
        amounts = (MofNCompleteColumn(), TimeRemainingColumn())
    shown = (Amount(BarColumn(bar_width=20)), *map(Amount, amounts), TimeElapsedColumn())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *shown)
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        current = ""

        def show(phase: str, done: int, total: int) -> None:
            nonlocal current
            if phase != current:
                current = phase
                progress.reset(task, description=f"{title}: {_PHASES.get(phase, phase).lower()}")
            progress.update(task, completed=done, total=total if total > 1 else None)

        yield show
