"""What a model's files must be, in the configuration: what it says, and what is refused with its place and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferd.config import ModelConfig, SignatureConfig, VerifyConfig, load_config
from inferd.errors import ConfigError

DIGEST = f"tree-sha256:{'0' * 64}"


def load(verify: object, **model: Any) -> ModelConfig:
    return load_config(None, {}, {"models": {"m": {"source": "demo", "verify": verify, **model}}}).models["m"]


def problem(verify: object, **model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(verify, **model)
    return caught.value.message


@pytest.fixture
def key(tmp_path: Path) -> str:
    (tmp_path / "release.pub").touch()
    return str(tmp_path / "release.pub")


def test_a_section_without_a_mode_enforces(key: str) -> None:
    assert load(None).verify is None
    assert load({"digest": DIGEST}).verify == VerifyConfig(mode="enforce", digest=DIGEST)
    signature = {"public_key_file": key}
    assert load({"mode": "warn", "signature": signature}).verify == VerifyConfig(
        mode="warn", signature=SignatureConfig(public_key_file=key)
    )


@pytest.mark.parametrize("digest", ["0" * 64, "sha256:0", f"sha256:{'A' * 64}", f"sha512:{'0' * 64}", ""])
def test_a_digest_has_one_form(digest: str) -> None:
    assert "verify.digest" in problem({"digest": digest})


def test_what_asks_for_nothing_is_refused(key: str) -> None:
    assert "models.m.verify: neither a digest nor a signature" in problem({})
    assert load({"mode": "off"}).verify == VerifyConfig(mode="off")
    assert "set one of public_key_file and certificate_chain_file" in problem({"signature": {}})
    both = {"public_key_file": key, "certificate_chain_file": key}
    assert "set one of public_key_file and certificate_chain_file" in problem({"signature": both})
    assert "signature.identity: a bare key has no name" in problem(
        {"signature": {"public_key_file": key, "identity": "release@example.com"}}
    )
    assert "ignore_unsigned_files: it belongs to a signature" in problem(
        {"digest": DIGEST, "ignore_unsigned_files": True}
    )
    assert "there is no file '/absent.pub'" in problem({"signature": {"public_key_file": "/absent.pub"}})
    assert "mode" in problem({"mode": "maybe", "digest": DIGEST})


def test_what_has_no_files_to_verify_is_refused() -> None:
    assert "its source is a remote server" in problem({"digest": DIGEST}, source="openai:https://example.com/v1")
    steps = {"steps": [{"model": "part", "inputs": {"x": "x"}}], "models": {"part": {"source": "demo-digits"}}}
    assert "a pipeline has no files of its own" in problem({"digest": DIGEST}, source="pipeline", pipeline=steps)
    assert "draft model are not verified" in problem({"digest": DIGEST}, speculation={"draft": "demo-draft"})
