"""``model_signing`` 1.1.1, the reference implementation of OMS, in both directions.

It is installed into ``build/model-signing`` the first time, which needs a package index; the test is skipped without
one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.artefacts.signers import CURVES, NOW, certificate, key, pem, private_pem, public_pem
from tests.artefacts.test_manifest import write

from inferd.artefacts.policy import Policy, verify
from inferd.artefacts.signature import sign
from inferd.artefacts.trust import Trust
from inferd.errors import ModelLoadError

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "model-signing"


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder with its commands."""
    commands = PLACE / "bin"
    if not (commands / "model_signing").exists():
        subprocess.run([sys.executable, "-m", "venv", str(PLACE)], check=True)
        wanted = ["model-signing==1.1.1", "pyopenssl", "certifi"]  # it imports the last two and names neither
        done = subprocess.run([str(commands / "pip"), "install", "-q", *wanted], check=False, capture_output=True)
        if done.returncode:
            shutil.rmtree(PLACE)
            pytest.skip("model_signing cannot be installed here")
    return commands


@pytest.fixture
def model(tmp_path: Path) -> Path:
    contents = {"a/x": b"1", "a-b/y": b"22", "a.txt": b"333", "weights.bin": os.urandom(20_000), "é/ü": b"4"}
    return write(tmp_path / "model", contents)


def run(reference: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(reference / "model_signing"), *map(str, words)], check=False, capture_output=True, text=True
    )


@pytest.mark.parametrize("curve", CURVES)
def test_it_verifies_what_is_signed_here_and_refuses_what_is_changed(
    reference: Path, model: Path, tmp_path: Path, curve: str
) -> None:
    bundle, _ = sign(model, private_pem(tmp_path, key(curve)))
    words = ("verify", "key", model, "--signature", bundle, "--public_key", public_pem(tmp_path, key(curve)))
    done = run(reference, *words, "--ignore-paths", bundle)
    assert done.returncode == 0, done.stderr
    (model / "a.txt").write_bytes(b"changed")
    assert run(reference, *words, "--ignore-paths", bundle).returncode == 1


@pytest.mark.parametrize("curve", CURVES)
def test_what_it_signs_verifies_here_and_not_when_it_is_changed(
    reference: Path, model: Path, tmp_path: Path, curve: str
) -> None:
    bundle = tmp_path / "model.sig"
    done = run(
        reference, "sign", "key", model, "--signature", bundle, "--private_key", private_pem(tmp_path, key(curve))
    )
    assert done.returncode == 0, done.stderr
    policy = Policy(bundle=bundle, trust=Trust(public_key=public_pem(tmp_path, key(curve))))
    assert verify(model, policy).manifest.files
    (model / "a.txt").write_bytes(b"changed")
    with pytest.raises(ModelLoadError, match=r"a\.txt"):
        verify(model, policy)


def test_certificates_verify_in_both_directions(reference: Path, model: Path, tmp_path: Path) -> None:
    root_key, issuer_key, own = (key("P-384", number) for number in range(3))
    root = certificate("Root", root_key, is_ca=True)
    issuer = certificate("Issuer", issuer_key, root, root_key, is_ca=True)
    leaf = certificate("Signer", own, issuer, issuer_key)
    roots, chain, mine = pem(tmp_path, "r.pem", root), pem(tmp_path, "c.pem", issuer), pem(tmp_path, "l.pem", leaf)
    bundle, private = tmp_path / "model.sig", private_pem(tmp_path, own)
    sign(model, private, bundle=bundle, certificate=mine, chain=chain)
    done = run(reference, "verify", "certificate", model, "--signature", bundle, "--certificate_chain", roots)
    assert done.returncode == 0, done.stderr
    words = ("--private_key", private, "--signing_certificate", mine, "--certificate_chain", chain)
    done = run(reference, "sign", "certificate", model, "--signature", bundle, *words)
    assert done.returncode == 0, done.stderr
    assert verify(model, Policy(bundle=bundle, trust=Trust(roots=roots)), now=NOW).manifest.files


def test_its_single_files_and_shards_verify_here(reference: Path, model: Path, tmp_path: Path) -> None:
    private, public = private_pem(tmp_path, key()), public_pem(tmp_path, key())
    trust = Trust(public_key=public)
    single, shards = tmp_path / "single.sig", tmp_path / "shards.sig"
    done = run(reference, "sign", "key", model / "weights.bin", "--signature", single, "--private_key", private)
    assert done.returncode == 0, done.stderr
    assert verify(model / "weights.bin", Policy(bundle=single, trust=trust)).manifest.files
    program = (
        "import sys, model_signing\n"
        "model, bundle, key = sys.argv[1:]\n"
        "hashing = model_signing.hashing.Config().use_shard_serialization(shard_size=4096)\n"
        "signing = model_signing.signing.Config().use_elliptic_key_signer(private_key=__import__('pathlib').Path(key))\n"
        "signing.set_hashing_config(hashing).sign(__import__('pathlib').Path(model), __import__('pathlib').Path(bundle))\n"
    )
    words = [str(reference / "python"), "-c", program, str(model), str(shards), str(private)]
    subprocess.run(words, check=True, capture_output=True)
    assert verify(model, Policy(bundle=shards, trust=trust)).manifest.files
    with (model / "weights.bin").open("r+b") as file:
        file.seek(5000)
        file.write(b"evil")
    with pytest.raises(ModelLoadError, match=r"weights\.bin:4096:8192"):
        verify(model, Policy(bundle=shards, trust=trust))
