"""What is shown while something takes its time."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import tty
from pathlib import Path

import click
import pytest
from rich.console import Console

from inferd.cli import terminal
from inferd.cli.main import main


def test_a_phase_of_one_step_is_told_without_an_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    shown = Console(file=written, width=120, force_terminal=True)
    monkeypatch.setattr(terminal, "is_live", lambda: True)
    monkeypatch.setattr(terminal, "console", lambda *, stderr=False: shown)
    with terminal.loading("Starting m") as tell:
        tell("model", 0, 1)
    assert "Starting m: opening the model" in click.unstyle(written.getvalue())
    assert "bytes" not in written.getvalue()
    with terminal.loading("Starting m") as tell:
        tell("weights", 3 * 2**20, 12 * 2**20)
    assert "3.0/12.0 MiB" in click.unstyle(written.getvalue())


HEADS = ("id", "name", "used", "note")
ROWS = (("k-1", "nightly reports", "2 req", ""), ("k-2", "b", "12 req", "[red] is no colour"))


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (
            50,
            "id   name               used  note              \n"
            "k-1  nightly reports   2 req                    \n"
            "k-2  b                12 req  [red] is no colour\n",
        ),
        (
            47,
            "k-1\n  name nightly reports  used 2 req\nk-2\n  name b  used 12 req  note [red] is no colour\n",
        ),
        (
            20,
            "k-1\n  name nightly reports\n  used 2 req\nk-2\n  name b\n  used 12 req\n  note [red] is no colour\n",
        ),
    ],
)
def test_rows_that_do_not_fit_are_paragraphs_with_nothing_cut(
    width: int, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Console(width=width, soft_wrap=True, force_terminal=True, color_system=None)
    monkeypatch.setattr(terminal, "console", lambda: out)
    terminal.print_rows(HEADS, ROWS, ("used",))
    assert capsys.readouterr().out == shown


def test_rows_for_a_pipe_have_one_line_each_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_rows(("id", "text"), [("a", "x" * 500), ("b", "y")])
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    ("variable", "value", "is_red"), [("NO_COLOR", "1", False), ("TERM", "dumb", False), ("NO_COLOR", "", True)]
)
def test_errors_have_colours_unless_the_environment_forbids_them(
    variable: str, value: str, is_red: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(variable, value)
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    with os.fdopen(theirs, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        assert main(["check", str(tmp_path / "absent.yaml")]) == 1
    said = b""
    with contextlib.suppress(OSError):  # all was read, and the other side is closed
        while piece := os.read(ours, 4096):
            said += piece
    os.close(ours)
    assert b"does not exist" in said
    assert (b"\x1b[31m" in said) is is_red
