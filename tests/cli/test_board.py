"""The table of models while they load: what a person sees for the events of a start."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from inferd.cli.board import Board
from inferd.config import ModelConfig, RemoteConfig
from inferd.events import LoadProgress, QueueChanged, ReplicaChanged

MODELS = {
    "chat": ModelConfig(source="demo", replicas=2, remotes=(RemoteConfig(url="https://far/v1"),)),
    "nightly": ModelConfig(source="demo", load="on_demand"),
}


def drawn(board: Board, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(board.drawing())
    return console.export_text()


def row(board: Board, name: str) -> str:
    return next(line for line in drawn(board).splitlines() if line.split()[:1] == [name])


def changed(replica: int, state: str, *, rss_bytes: int = 0, reason: str = "") -> ReplicaChanged:
    return ReplicaChanged(model="chat", replica=replica, state=state, rss_bytes=rss_bytes, reason=reason)  # type: ignore[arg-type]


def test_a_models_row_follows_its_replicas() -> None:
    board = Board(MODELS)
    assert re.search(r"chat +loading +0/3 \(1 remote\)", row(board, "chat"))
    assert re.search(r"nightly +on demand", row(board, "nightly"))
    board.handle(changed(0, "loading"))
    board.handle(LoadProgress(model="chat", replica=0, phase="weights", done=3 * 2**20, total=12 * 2**20))
    assert "weights 25 % of 12.0 MiB" in row(board, "chat")
    board.handle(LoadProgress(model="chat", replica=0, phase="model", done=0, total=1))
    assert re.search(r" model  ", row(board, "chat"))
    board.handle(QueueChanged(model="chat", waiting=7, in_flight=0))
    assert re.search(r" 7 *$", row(board, "chat"))
    board.handle(changed(0, "ready", rss_bytes=200 * 2**20))
    board.handle(changed(1, "ready", rss_bytes=100 * 2**20))
    board.handle(changed(2, "ready"))
    assert re.search(r"chat +ready +3/3 \(1 remote\) +300 MiB", row(board, "chat"))
    board.handle(changed(2, "died", reason="The remote server takes no connection."))
    assert re.search(r"chat +degraded +2/3 ", row(board, "chat"))
    assert drawn(board).rstrip().endswith("chat: The remote server takes no connection.")


def test_a_model_whose_replicas_all_failed_says_why() -> None:
    board = Board({"chat": ModelConfig(source="demo")})
    board.handle(changed(0, "failed", reason="The folder has no config.json."))
    assert re.search(r"chat +failed +0/1", row(board, "chat"))
    assert "chat: The folder has no config.json." in drawn(board)


def test_a_remote_server_that_is_away_has_not_failed() -> None:
    board = Board({"chat": ModelConfig(source="openai:https://far/v1")})
    board.handle(changed(0, "died", reason="The remote server takes no connection."))
    assert re.search(r"chat +unavailable +0/1 \(1 remote\)", row(board, "chat"))
    assert drawn(board).rstrip().endswith("chat: The remote server takes no connection.")
    board.handle(changed(0, "ready"))
    assert re.search(r"chat +ready +1/1 \(1 remote\)", row(board, "chat"))


def test_events_of_others_are_none_of_its_business() -> None:
    board = Board(MODELS)
    board.handle(ReplicaChanged(model="unknown", replica=0, state="ready"))
    assert re.search(r"chat +loading", row(board, "chat"))


def test_without_a_terminal_the_log_alone_tells_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    board = Board({"chat": ModelConfig(source="demo")})
    with board.shown():
        board.handle(LoadProgress(model="chat", replica=0, phase="weights", done=1, total=3))
        board.handle(changed(0, "ready"))
    assert capsys.readouterr() == ("", "")


def test_a_load_that_failed_ends_in_a_table_that_says_so_and_leaves_the_reason_to_what_follows() -> None:
    board = Board({"chat": ModelConfig(source="demo")})
    with board.shown():
        board.handle(changed(0, "loading"))
        board.handle(changed(0, "failed", reason="The folder has no config.json."))
        board.handle(changed(0, "stopped"))
        assert "The folder has no config.json." in drawn(board)
    assert re.search(r"chat +failed +0/1", row(board, "chat"))
    assert "config.json" not in drawn(board)


def test_a_start_that_never_began_leaves_no_table() -> None:
    board = Board(MODELS)
    with board.shown():
        assert "loading" in drawn(board)
    assert drawn(board).strip() == ""


def test_a_table_of_eighty_columns_cuts_nothing() -> None:
    name = "organisation-with-a-long-name/and-a-model-too"
    board = Board({name: ModelConfig(source="demo", remotes=(RemoteConfig(url="https://far/v1"),))})
    board.handle(ReplicaChanged(model=name, replica=0, state="loading", rss_bytes=300 * 2**20))
    board.handle(LoadProgress(model=name, replica=0, phase="weights", done=1 << 30, total=3 << 30))
    board.handle(QueueChanged(model=name, waiting=1000, in_flight=0))
    text = drawn(board, width=80)
    assert "\u2026" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert name in "".join(line.split()[0] for line in text.splitlines()[3:] if line.split())
    for cell in ("loading", "0/2 (1 remote)", "weights 33 % of 3.00 GiB", "300 MiB", "1000"):
        assert cell in text


def test_on_a_terminal_there_is_a_table_and_the_log_stays_readable(tmp_path: Path) -> None:
    code = """
from inferd.cli.board import Board
from inferd.cli.flags import in_flags
from inferd.config import ModelConfig
from inferd.events import ReplicaChanged
board = Board({"chat": ModelConfig(source="demo")})
with board.shown():
    board.handle(ReplicaChanged(model="chat", replica=0, state="loading"))
    board.write("12:00:00 chat/0 is loading\\n12:00:00 chat/0 failed: why\\n12:00:00 warning: disk is slow\\n")
    board.handle(ReplicaChanged(model="chat", replica=0, state="ready", rss_bytes=2**20))
board.write("12:00:01 afterwards\\n")
"""
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # Linux: the other end is closed
                break
            if not piece:
                break
            shown += piece
    os.close(ours)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.decode())
    assert "chat/0" not in text
    assert re.search(r"12:00:00 warning: disk is slow\r?\n", text)
    assert re.search(r"chat +ready +1/1 +1.00 MiB", text)
    assert text.rstrip().endswith("12:00:01 afterwards")
