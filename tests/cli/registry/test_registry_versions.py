"""``inferd registry`` as a person uses it, with no server running: from a file to production and back."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from inferd import models
from inferd.cli.main import cli, main
from inferd.state.audit import AuditLog

DIGITS = models.path("demo-digits")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def registry(*words: str) -> Result:
    return CliRunner().invoke(cli, ["registry", *words])


def done(*words: str) -> str:
    result = registry(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def model(folder: Path, name: str, text: str = "") -> Path:
    """A bundled classifier's folder, with another byte in its notes."""
    path = folder / name
    path.mkdir()
    for file in DIGITS.iterdir() if DIGITS.is_dir() else [DIGITS]:
        (path / file.name).write_bytes(file.read_bytes())
    (path / "notes.md").write_text(text or name)
    return path


def test_a_version_goes_from_a_file_to_production_and_back(folder: Path) -> None:
    assert "digits@1 is verified" in done("register", "digits", str(model(folder, "a")), "--tag", "auc=0.9")
    assert "digits@1 is validated" in done("validate", "digits@1")
    assert "digits@1 is approved" in done("approve", "digits@1", "--reason", "ticket 812")
    assert "digits@1 is production" in done("promote", "digits@1")
    done("register", "digits", str(model(folder, "b")))
    for word in ("validate", "approve", "canary", "promote"):
        done(word, "digits@2")
    found = json.loads(done("list", "digits", "--json"))
    assert [one["record"]["stage"] for one in found] == ["archived", "production"]
    assert "digits@1 is production" in done("promote", "digits@1", "--reason", "2 is slow")
    shown = done("show", "digits@production")
    assert "digits@1: production" in shown
    assert "tags: auc=0.9" in shown
    assert "evidence: contract passed" in shown
    lines = json.loads(done("history", "digits", "--json"))
    assert (lines[0]["action"], lines[0]["version"], lines[0]["reason"]) == ("archive", 2, "version 1 replaces it")
    assert "2 is slow" in done("history", "digits")
    assert "whole" in registry("verify-log").stderr


def test_a_model_without_versions_is_told(folder: Path) -> None:
    for words in (("list",), ("history",), ("list", "none"), ("history", "none")):
        told = registry(*words)
        assert (told.exit_code, told.stdout) == (0, "")
        assert told.stderr.startswith("There are no versions" + (" of none. " if len(words) > 1 else ". "))


def test_the_audit_log_has_each_action_with_the_head_of_the_history(folder: Path) -> None:
    done("register", "digits", str(model(folder, "a")))
    assert registry("promote", "digits@1").exit_code != 0
    entries = AuditLog(folder / "data").entries()
    assert [(one.action, one.target, one.outcome, one.detail[:16]) for one in reversed(entries)] == [
        ("registry_register", "digits", "begun", ""),
        ("registry_register", "digits", "done", "registry line 3:"),
        ("registry_promote", "digits@1", "begun", ""),
        ("registry_promote", "digits@1", "refused", "registry_stage"),
    ]


def test_a_history_that_was_cut_off_does_not_fit_the_audit_log(folder: Path) -> None:
    done("register", "digits", str(model(folder, "a")))
    assert "1 lines are in the audit log" in registry("verify-log").stderr
    connection = sqlite3.connect(folder / "data" / "state.db")
    for table in ("registry_versions", "registry_history"):
        connection.execute(f"DELETE FROM {table}")
    connection.commit()
    connection.close()
    found = registry("verify-log")
    assert found.exit_code != 0 or main(["registry", "verify-log"]) == 1
    verdict = json.loads(registry("verify-log", "--json").stdout)
    assert verdict["problem"] == "the history ends with line 0, and line 3 is recorded: its end was cut off"


def test_files_that_changed_are_found_and_hold_the_version_back(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model(folder, "a")
    done("register", "digits", str(path))
    assert "its files are as registered" in done("verify", "digits@1")
    (path / "notes.md").write_text("something else")
    assert main(["registry", "verify", "digits@1"]) == 1
    assert "digits@1 does not verify, and stays verified: its files have the digest" in capsys.readouterr().out
    assert main(["registry", "validate", "digits@1"]) == 1
    assert "newest digest report" in capsys.readouterr().err


def test_evidence_that_the_config_asks_for_is_attached(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "inferd.yaml").write_text("registry: {evidence: [golden], four_eyes: true}\nmodels: {}\n")
    config = ["--config", str(folder / "inferd.yaml")]
    done("register", "digits", str(model(folder, "a")), *config)
    assert main(["registry", "validate", "digits@1", *config]) == 1
    assert "has no golden report" in capsys.readouterr().err
    (folder / "report.json").write_text('{"passed": 98, "of": 100}')
    words = ["attach", "digits@1", "--kind", "golden", "--report", str(folder / "report.json"), "--passed", *config]
    done(*words, "--summary", "98 of 100")
    done("validate", "digits@1", *config)
    assert main(["registry", "approve", "digits@1", *config]) == 1
    assert "another user or key has to approve" in capsys.readouterr().err


def test_an_alias_names_a_version(folder: Path) -> None:
    done("register", "digits", str(model(folder, "a")))
    assert "champion is digits@1" in done("alias", "digits@1", "champion")
    assert json.loads(done("show", "digits@champion", "--json"))["aliases"] == ["champion"]
    assert "no alias champion any more" in done("alias", "digits@1", "champion", "--remove")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("show", "digits"), "names no version"),
        (("show", "digits@9"), "The registry has no model 'digits'"),
        (("reject", "digits@1", "--reason", "x"), "The registry has no model 'digits'"),
        (("register", "a b", "."), "cannot name a model"),
        (("register", "empty", "."), "has no config.json"),
        (("attach", "digits@1", "--kind", "golden", "--report", "broken.json", "--passed"), "is no JSON object"),
        (("register", "digits", ".", "--tag", "x"), "not NAME=VALUE"),
    ],
)
def test_what_is_wrong_is_named(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    part: str,
) -> None:
    (folder / "here").mkdir()
    monkeypatch.chdir(folder / "here")
    if "attach" in words:
        Path("broken.json").write_text("[1")
    if "--tag" in words:
        words = tuple(str(DIGITS) if word == "." else word for word in words)
    assert main(["registry", *words]) != 0
    assert part in capsys.readouterr().err
