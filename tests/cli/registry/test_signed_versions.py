"""Signatures as evidence of registered versions: recorded, asked for on every way, and gone with a changed file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.artefacts.signers import key, private_pem, public_pem
from tests.cli.registry.test_registry_versions import done, model

from inferd.cli.main import main
from inferd.config import load_config
from inferd.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERD_STATE__DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def signed(folder: Path, name: str) -> Path:
    path = model(folder, name)
    done("sign", str(path), "--private-key", str(private_pem(folder, key())))
    return path


def settings(folder: Path, mode: str = "enforce") -> list[str]:
    public = public_pem(folder, key())
    file = folder / "inferd.yaml"
    file.write_text(f"registry: {{verify: {{mode: {mode}, signature: {{public_key_file: {public}}}}}}}\nmodels: {{}}\n")
    return ["--config", str(file)]


def evidence(version: str) -> dict[str, tuple[bool, str]]:
    found = json.loads(done("show", version, "--json"))["record"]["evidence"]
    return {one["kind"]: (one["passed"], one["summary"]) for one in found}


def test_a_signature_is_recorded_and_verifies_a_version(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(folder)
    done("register", "digits", str(signed(folder, "a")), *config)
    assert evidence("digits@1")["signature"][0]
    assert evidence("digits@1")["signature"][1].startswith("signature by key ")
    done("validate", "digits@1", *config)
    done("approve", "digits@1", *config)
    assert "digits@1 is production" in done("promote", "digits@1", *config)


def test_an_unsigned_version_stays_registered_where_signatures_are_enforced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(folder)
    path = model(folder, "a")
    assert "digits@1 is registered" in done("register", "digits", str(path), *config)
    assert not evidence("digits@1")["signature"][0]
    assert main(["registry", "validate", "digits@1", *config]) == 1
    assert "so 'validate' is not possible. Possible is verify or reject" in capsys.readouterr().err
    assert main(["registry", "verify", "digits@1", *config]) == 1
    assert "digits@1 does not verify, and stays registered: its files are as registered; " in capsys.readouterr().out
    done("sign", str(path), "--private-key", str(private_pem(folder, key())))
    assert "digits@1 is verified: its files are as registered; signature by key " in done("verify", "digits@1", *config)


def test_a_version_without_a_signature_goes_no_further_once_it_is_enforced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done("register", "digits", str(signed(folder, "a")))
    assert set(evidence("digits@1")) == {"digest"}
    config = settings(folder)
    assert main(["registry", "validate", "digits@1", *config]) == 1
    assert "has no signature report" in capsys.readouterr().err
    done("verify", "digits@1", *config)
    done("validate", "digits@1", *config)


def test_a_foreign_key_and_a_changed_file_hold_a_version_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = signed(folder, "a")
    done("register", "digits", str(path))
    public = str(public_pem(folder, key()))
    done("verify", "digits@1", "--public-key", public)
    other = folder / "other"
    other.mkdir()
    foreign = str(public_pem(other, key(number=1)))
    assert main(["registry", "verify", "digits@1", "--public-key", foreign]) == 1
    assert not evidence("digits@1")["signature"][0]
    done("verify", "digits@1", "--public-key", public)
    (path / "notes.md").write_text("something else")
    assert main(["registry", "verify", "digits@1", "--public-key", public]) == 1
    assert {kind: passed for kind, (passed, _) in evidence("digits@1").items()} == {"digest": False, "signature": False}
    capsys.readouterr()
    assert main(["registry", "validate", "digits@1"]) == 1
    assert "newest digest report" in capsys.readouterr().err


def test_where_it_only_warns_a_bad_signature_is_told_and_holds_nothing_back(folder: Path) -> None:
    config = settings(folder, "warn")
    done("register", "digits", str(model(folder, "a")), *config)
    assert set(evidence("digits@1")) == {"digest"}
    assert "its signature does not hold: " in done("verify", "digits@1", *config)
    done("validate", "digits@1", *config)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("verify", "digits@1", "--digest", f"sha256:{'0' * 64}"), "has its digest in the registry"),
        (("verify", "./nothing"), "There is no file or folder './nothing'"),
        (("verify", "digits@1"), "The registry has no model 'digits'"),
    ],
)
def test_what_cannot_be_verified_is_named(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], part: str
) -> None:
    assert main(["registry", *words]) != 0
    assert part in " ".join(capsys.readouterr().err.split())


def test_the_signature_of_all_versions_names_its_signer_and_no_digest(folder: Path) -> None:
    file = folder / "inferd.yaml"
    file.write_text(f"registry: {{verify: {{digest: 'sha256:{'0' * 64}'}}}}\nmodels: {{}}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(file, {}, {})
    assert "registry.verify.digest: each version has its own" in refused.value.message
    assert "registry.verify.signature: missing" in refused.value.message
