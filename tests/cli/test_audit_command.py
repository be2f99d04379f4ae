"""``inferd audit``: what was done, and whether the log is whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from inferd.cli.main import cli, main
from inferd.state.audit import AuditLog, AuditRecord


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path))
    return tmp_path


def inferd(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words), standalone_mode=False)


def test_commands_that_change_keys_are_recorded_with_the_user(folder: Path) -> None:
    inferd("keys", "create", "--tenant", "team-a")
    (key,) = json.loads(inferd("keys", "list", "--json").stdout)
    inferd("keys", "rotate", key["id"])
    inferd("keys", "revoke", key["id"])
    with pytest.raises(Exception, match="There is no key"):
        CliRunner().invoke(cli, ["keys", "revoke", "AbCdEfGhIjKl"], standalone_mode=False, catch_exceptions=False)
    entries = [json.loads(line) for line in inferd("audit", "show", "--json").stdout.splitlines()]
    assert [(entry["action"], entry["outcome"]) for entry in entries] == [
        ("create_key", "begun"),
        ("create_key", "done"),
        ("rotate_key", "begun"),
        ("rotate_key", "done"),
        ("revoke_key", "begun"),
        ("revoke_key", "done"),
        ("revoke_key", "begun"),
        ("revoke_key", "refused"),
    ]
    assert {entry["actor"] for entry in entries} == {f"user:{os.getuid()}"}
    assert entries[1]["detail"] == f"new key {key['id']}"
    shown = inferd("audit", "show").stdout
    assert "create_key" in shown
    assert "begun" not in shown  # one row per action, with its outcome


def test_verify_prints_a_head_and_names_the_first_wrong_entry(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        inferd("keys", "create", "--tenant", "t")
    assert main(["audit", "verify"]) == 0
    head = capsys.readouterr().out.strip()
    assert head.startswith("6:")
    assert main(["audit", "verify", "--head", head]) == 0
    (path,) = (folder / "audit").glob("*.jsonl")
    text = path.read_text()
    path.write_text(text.replace("create_key", "revoke_key", 1))
    assert main(["audit", "verify"]) == 1
    assert "line 2: entry 2 does not continue the chain" in capsys.readouterr().err
    path.write_text("".join(text.splitlines(keepends=True)[:4]))
    assert main(["audit", "verify"]) == 1
    assert "its end was cut off" in capsys.readouterr().err
    assert main(["audit", "verify", "--head", "6"]) == 2


def test_hostile_text_is_harmless_for_the_terminal(folder: Path) -> None:
    AuditLog(folder).append(
        AuditRecord(at="2026", actor="key:\x1b[2J", action="load", target="a\nb\u202e", outcome="done", detail="[red]x")
    )
    shown = inferd("audit", "show").stdout
    assert all(line.isprintable() for line in shown.split("\n"))
    assert "[red]x" in shown


def test_a_log_without_entries_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "verify"]) == 0
    assert main(["audit", "show"]) == 0
    assert capsys.readouterr().err.count("There are no entries") == 2
