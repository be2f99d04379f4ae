"""``inferd registry sign`` and ``verify`` at the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.artefacts.signers import NOW, certificate, key, pem, private_pem, public_pem
from tests.artefacts.test_signature import MODEL, VECTORS

from inferd import clock
from inferd.artefacts.manifest import manifest_of
from inferd.cli.main import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(MODEL, tmp_path / "model")
    return tmp_path / "model"


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["registry", *map(str, words)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_what_is_signed_verifies_until_it_changes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public = public_pem(tmp_path, key())
    code, out, _ = run(capsys, "sign", model, "--private-key", private_pem(tmp_path, key()))
    assert (code, out.split()[0]) == (0, str(model / "model.sig"))
    code, out, _ = run(capsys, "verify", model, "--public-key", public)
    assert code == 0
    assert f"{model} verifies: signature by key" in out
    (model / "a.txt").write_text("changed")
    code, out, err = run(capsys, "verify", model, "--public-key", public)
    assert (code, out) == (1, "")
    assert "a.txt of " in err
    code, out, err = run(capsys, "verify", model, "--public-key", public, "--json")
    report = json.loads(out)
    assert (code, err, report["verified"]) == (1, "", False)
    assert "a.txt of " in report["problem"]


def test_a_digest_verifies(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = manifest_of(model)
    for digest in (manifest.digest, manifest.tree_digest):
        code, out, _ = run(capsys, "verify", model, "--digest", digest, "--json")
        report = json.loads(out)
        assert (code, report["verified"], report["evidence"]) == (0, True, f"digest {digest}")
        assert (report["tree_digest"], report["num_files"]) == (manifest.tree_digest, 4)
    code, _, err = run(capsys, "verify", model, "--digest", f"sha256:{'0' * 64}")
    assert code == 1
    assert manifest.digest in err


def test_a_certificate_signs_with_its_chain(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "wall", NOW.timestamp)
    root_key, issuer_key, own = (key("P-384", number) for number in range(3))
    root = certificate("Root", root_key, is_ca=True)
    issuer = certificate("Issuer", issuer_key, root, root_key, is_ca=True)
    leaf = certificate("Signer", own, issuer, issuer_key)
    words = ["--certificate", pem(tmp_path, "leaf.pem", leaf), "--certificate-chain", pem(tmp_path, "c.pem", issuer)]
    code, out, _ = run(capsys, "sign", model, "--private-key", private_pem(tmp_path, own), *words, "--json")
    assert code == 0
    assert json.loads(out)["num_resources"] == 4
    roots = pem(tmp_path, "roots.pem", root)
    assert run(capsys, "verify", model, "--certificate-chain", roots, "--identity", "Signer")[0] == 0
    code, _, err = run(capsys, "verify", model, "--certificate-chain", roots, "--identity", "Eve")
    assert code == 1
    assert "was made by Signer, not by Eve" in err
    monkeypatch.setattr(clock, "wall", lambda: NOW.timestamp() + 365 * 86_400)
    code, _, err = run(capsys, "verify", model, "--certificate-chain", roots)
    assert code == 1
    assert "only; have the model signed with a valid certificate" in err


def test_a_password_is_read_from_a_file_and_shards_from_a_flag(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = private_pem(tmp_path, key(), b"secret")
    (tmp_path / "password").write_text("secret\n")
    words = ("sign", model, "--private-key", private, "--shard-size", 4096, "--signature", tmp_path / "s.sig")
    code, _, err = run(capsys, *words)
    assert code == 1
    assert "needs its password" in err
    code, out, _ = run(capsys, *words, "--password-file", tmp_path / "password")
    assert code == 0
    assert "signs 6 shards" in out
    public = public_pem(tmp_path, key())
    assert run(capsys, "verify", model, "--public-key", public, "--signature", tmp_path / "s.sig")[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--public-key", VECTORS / "P-256.pub", "--certificate-chain", VECTORS / "roots.pem"],
        ["--digest", "sha256:0"],
        ["--public-key", VECTORS / "P-256.pub", "--identity", "Signer"],
    ],
)
def test_wrong_usage_is_told_before_any_file_is_read(
    words: list[object], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "verify", model, *words)[0] == 2


def test_unsigned_files_can_be_accepted(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "added").touch()
    words = ("verify", model, "--public-key", VECTORS / "P-256.pub", "--signature", VECTORS / "P-256.sig")
    assert run(capsys, *words)[0] == 1
    assert run(capsys, *words, "--ignore-unsigned-files")[0] == 0
