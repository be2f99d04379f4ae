"""Versions as documents: what is in them, and that a change of the document or of the files is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.artefacts.signers import key, private_pem, public_pem
from tests.cli.registry.test_registry_versions import done, model

from inferd.artefacts.manifest import manifest_of
from inferd.cli.main import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def exported(folder: Path) -> Path:
    """A signed version in production, with a report."""
    path = model(folder, "a")
    done("sign", str(path), "--private-key", str(private_pem(folder, key())))
    done("register", "digits", str(path), "--tag", "auc=0.9")
    done("verify", "digits@1", "--public-key", str(public_pem(folder, key())))
    (folder / "report.json").write_text('{"passed": 98, "of": 100, "score": 0.1}')
    done("attach", "digits@1", "--kind", "golden", "--report", str(folder / "report.json"), "--passed")
    for action in ("validate", "approve", "promote"):
        done(action, "digits@1")
    out = folder / "digits-1.json"
    done("export", "digits@production", "--output", str(out))
    return out


def test_a_document_says_what_a_version_is_and_how_it_came_to_serve(exported: Path, folder: Path) -> None:
    document = json.loads(exported.read_text())
    manifest = manifest_of(folder / "a")
    assert (document["kind"], document["schema"], document["name"], document["version"]) == (
        *("inferd-version", 1),
        *("digits", 1),
    )
    assert document["digest"] == manifest.tree_digest
    assert [file["path"] for file in document["files"]] == [file.path for file in manifest.files]
    assert [one["name"] for one in document["contract"]["inputs"]] == ["pixels"]
    assert (document["stage"], document["tags"]) == ("production", {"auc": "0.9"})
    assert document["signature"]["state"] == "verified"
    assert document["signature"]["words"].startswith("signature by key ")
    reports = {proof["evidence"]["kind"]: proof["report"] for proof in document["proofs"]}
    assert set(reports) == {"digest", "signature", "golden", "contract"}
    assert reports["golden"] == {"passed": 98, "of": 100, "score": 0.1}
    actions = [entry["action"] for entry in document["history"]]
    assert (actions[0], actions[-1]) == ("register", "promote")
    assert f"{document['line']}:{document['hash']}" in done("verify-log")


def test_a_document_is_good_until_it_or_its_files_change(
    exported: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(exported)]) == 0
    assert "is good" in capsys.readouterr().out
    (folder / "a" / "notes.md").write_text("something else")
    assert main(["check", str(exported)]) == 1
    assert "has other files than the document: notes.md" in " ".join(capsys.readouterr().err.split())
    assert main(["registry", "export", "digits@1"]) == 1
    assert "put the registered files back" in capsys.readouterr().err
    (folder / "a").rename(folder / "gone")
    assert main(["check", str(exported)]) == 3
    assert "is not on this machine" in capsys.readouterr().out


def swapped(document: dict[str, Any]) -> None:
    document["files"][0]["sha256"] = "0" * 64


def bettered(document: dict[str, Any]) -> None:
    proof = next(one for one in document["proofs"] if one["evidence"]["kind"] == "golden")
    proof["report"]["passed"] = 100


def failed(document: dict[str, Any]) -> None:
    document["proofs"][0]["evidence"]["passed"] = False


def enlarged(document: dict[str, Any]) -> None:
    document["num_bytes"] += 1


def later(document: dict[str, Any]) -> None:
    document["schema"] = 2


def unknown(document: dict[str, Any]) -> None:
    document["licence"] = "MIT"


def short(document: dict[str, Any]) -> None:
    del document["contract"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (swapped, "digest: the files that are listed have"),
        (bettered, "proofs: the golden report is not the one that was attached"),
        (failed, "report did not pass"),
        (enlarged, "num_bytes:"),
        (later, "schema: 2 was written by a later inferd"),
        (unknown, "is no document of a version (Object contains unknown field `licence`)"),
        (short, "missing required field `contract`"),
    ],
)
def test_a_document_that_was_changed_is_named(
    exported: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], None], part: str
) -> None:
    document = json.loads(exported.read_text())
    change(document)
    exported.write_text(json.dumps(document))
    assert main(["check", str(exported)]) == 1
    assert part in " ".join(capsys.readouterr().err.split())
