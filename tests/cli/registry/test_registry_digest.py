"""``inferd registry digest`` at the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from inferd.artefacts.manifest import manifest_of
from inferd.cli.main import cli, main
from inferd.cli.registry import progress
from inferd.cli.registry.group import COMMANDS


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "weights.bin").write_bytes(os.urandom(100))
    return tmp_path / "model"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_an_example(name: str) -> None:
    shown = CliRunner().invoke(cli, ["registry", name, "--help"])
    assert shown.exit_code == 0
    assert f"inferd registry {name}" in shown.output
    assert "Example" in shown.output


def test_both_digests_are_printed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["registry", "digest", str(model)]) == 0
    shown = capsys.readouterr()
    manifest = manifest_of(model)
    assert shown.out.split() == [manifest.tree_digest, manifest.digest]
    assert shown.err == ""


def test_json_has_every_file(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["registry", "digest", str(model), "--json", "--ignore", "config.json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (file,) = manifest_of(model, ignored=("config.json",)).files
    assert report["files"] == [{"path": "weights.bin", "size": 100, "sha256": file.sha256}]
    assert (report["num_files"], report["num_bytes"]) == (1, 100)


def test_what_is_refused_is_one_sentence_and_an_exit_code(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "link").symlink_to("/etc/hostname")
    assert main(["registry", "digest", str(model)]) == 1
    assert "is a symbolic link" in capsys.readouterr().err
    assert main(["registry", "digest", str(model / "absent")]) == 2
    assert main(["registry", "nothing"]) == 2


def test_long_work_shows_its_progress(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SHOWN_BYTES", 50)
    assert main(["registry", "digest", str(model)]) == 0
    assert "Hashing model" in capsys.readouterr().err
