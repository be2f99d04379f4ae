"""A worker's log: where the server's goes, and no reason for a worker to stop."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from inferd.worker import main


def log_of(monkeypatch: pytest.MonkeyPatch, level: str, file: Path, *messages: tuple[int, str]) -> None:
    """Log messages as a worker does, with a root logger that has no handlers of the tests."""
    root = logging.getLogger()
    with monkeypatch.context() as patch:
        patch.setattr(root, "handlers", [])
        patch.setattr(root, "level", root.level)
        main._begin_log("chat/0", as_json=True, level=level, file=str(file))
        for number, message in messages:
            logging.getLogger("a.library").log(number, message)
        for handler in root.handlers:
            handler.close()


def test_a_worker_writes_to_the_servers_file_in_its_form_and_at_its_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "inferd.log"
    log_of(monkeypatch, "warning", file, (logging.INFO, "left out"), (logging.WARNING, "told\nin two lines"))
    (line,) = file.read_text().splitlines()
    found = json.loads(line)
    assert (found["worker"], found["level"], found["message"]) == ("chat/0", "warning", "told\nin two lines")


def test_a_file_that_cannot_be_opened_stops_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_of(monkeypatch, "info", tmp_path / "missing" / "inferd.log", (logging.WARNING, "lost"))
    assert not (tmp_path / "missing").exists()
