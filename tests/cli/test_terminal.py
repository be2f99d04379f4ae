"""What is shown while something takes its time."""

from __future__ import annotations

import io

import click
import pytest
from rich.console import Console

from inferd.cli import terminal


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
