"""How inferd looks in a terminal: errors in one red sentence, progress, and plain text for pipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

Told = Callable[[str, int, int], None]

_PHASES = {"download": "Downloading", "weights": "Reading the weights", "tokenizer": "Reading the tokenizer"}


def is_debug() -> bool:
    return os.environ.get("INFERD_DEBUG", "").lower() not in ("", "0", "false", "no")


def fail(sentence: str) -> None:
    """An error as a person sees it, on stderr."""
    click.secho("Error: ", fg="red", bold=True, nl=False, err=True)
    click.secho(sentence, fg="red", err=True)


def warn(sentence: str) -> None:
    """Something a person may not have meant, on stderr."""
    click.secho("Warning: ", fg="yellow", bold=True, nl=False, err=True)
    click.echo(sentence, err=True)


def bytes_text(num_bytes: float) -> str:
    """A number of bytes for people, in three digits: 512 B, 1.50 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1000:
            digits = 0 if unit == "B" or abs(num_bytes) >= 100 else 1 if abs(num_bytes) >= 10 else 2
            return f"{num_bytes:.{digits}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def console(*, stderr: bool = False) -> Console:
    """A rich console that writes plain text where nobody looks at it live."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = 160  # tables for files and pipes are as wide as they need to be
    return made


def is_live() -> bool:
    """Whether progress is drawn: stderr is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def loading(title: str, *, counts: bool = False) -> Iterator[Told]:
    """A progress display on stderr; yields what to tell: (phase, done, total), in bytes or as ``counts``.

    Live in a terminal; elsewhere one plain line per phase.
    """
    if not is_live():
        seen: set[str] = set()

        def line(phase: str, done: int, total: int) -> None:
            if phase not in seen:
                seen.add(phase)
                click.echo(f"{title}: {_PHASES.get(phase, phase).lower()}", err=True)

        yield line
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts: tuple[ProgressColumn, ...] = (DownloadColumn(binary_units=False), TransferSpeedColumn())
    if counts:
        amounts = (MofNCompleteColumn(), TimeRemainingColumn())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30), *amounts)
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        current = ""

        def show(phase: str, done: int, total: int) -> None:
            nonlocal current
            if phase != current:
                current = phase
                progress.reset(task, description=f"{title}: {_PHASES.get(phase, phase).lower()}")
            progress.update(task, completed=done, total=total or None)

        yield show
