"""Signatures by OMS v1.0: vectors of the reference implementation, our own, and everything that must be refused."""

from __future__ import annotations

import base64
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st
from tests.artefacts.signers import CURVES, NOW, certificate, key, pem, private_pem, public_pem
from tests.artefacts.test_manifest import FOLDERS, Contents, files_of, write

from inferd.artefacts.bundle import decode_bundle, encode_bundle, pae, read_bundle
from inferd.artefacts.policy import Policy, Verified
from inferd.artefacts.policy import verify as verify_policy
from inferd.artefacts.signature import default_bundle, sign
from inferd.artefacts.statement import decode_statement
from inferd.artefacts.trust import Trust
from inferd.errors import ModelLoadError

VECTORS = Path(__file__).parent / "vectors"
MODEL = VECTORS / "model"
JSON = dict[str, Any]


def verify(path: Path, bundle: Path, trust: Trust, *, ignore_unsigned: bool = False) -> Verified:
    return verify_policy(path, Policy(bundle=bundle, trust=trust, ignore_unsigned=ignore_unsigned), now=NOW)


def refusal(path: Path, bundle: Path, trust: Trust) -> str:
    with pytest.raises(ModelLoadError) as caught:
        verify(path, bundle, trust)
    assert caught.value.code == "model_not_verified"
    return caught.value.message


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(MODEL, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    return Trust(public_key=public_pem(tmp_path, key()))


# -- the reference implementation's ------------------------------------------------------------


@pytest.mark.parametrize("curve", CURVES)
def test_signatures_of_the_reference_implementation_verify(curve: str) -> None:
    trust = Trust(public_key=VECTORS / f"{curve}.pub")
    assert verify(MODEL, VECTORS / f"{curve}.sig", trust).evidence.startswith("signature by key ")


def test_a_file_alone_and_shards_of_the_reference_implementation_verify() -> None:
    trust = Trust(public_key=VECTORS / "P-256.pub")
    assert len(verify(MODEL / "weights.bin", VECTORS / "single.sig", trust).manifest.files) == 1
    assert len(verify(MODEL, VECTORS / "shards.sig", trust).manifest.files) == 4


def test_a_certificate_of_the_reference_implementation_verifies_with_its_names() -> None:
    for identity in (None, "Test signer", "release@example.com"):
        trust = Trust(roots=VECTORS / "roots.pem", identity=identity)
        assert "Test signer" in verify(MODEL, VECTORS / "certificate.sig", trust).evidence
    other = Trust(roots=VECTORS / "roots.pem", identity="eve@example.com")
    assert "was made by Test signer, release@example.com" in refusal(MODEL, VECTORS / "certificate.sig", other)


# -- our own ------------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("shard_size", [None, 4096])
def test_what_is_signed_here_verifies_here(model: Path, tmp_path: Path, curve: str, shard_size: int | None) -> None:
    target, statement = sign(model, private_pem(tmp_path, key(curve)), shard_size=shard_size)
    assert target == model / "model.sig"
    found = verify(model, target, Trust(public_key=public_pem(tmp_path, key(curve))))
    assert statement.method == ("files" if shard_size is None else "shards")
    if shard_size is None:
        assert statement.digest == found.manifest.digest
    # The signature is no part of what it signs, wherever it is kept.
    shutil.move(target, tmp_path / "elsewhere.sig")
    assert verify(model, tmp_path / "elsewhere.sig", Trust(public_key=public_pem(tmp_path, key(curve))))


def test_a_file_alone_is_signed_beside_it(model: Path, tmp_path: Path, trust: Trust) -> None:
    target, statement = sign(model / "weights.bin", private_pem(tmp_path, key()))
    assert target == model / "weights.bin.sig" == default_bundle(model / "weights.bin")
    assert [one.name for one in statement.predicate.resources] == ["weights.bin"]
    assert verify(model / "weights.bin", target, trust)


def test_the_statement_has_the_fields_of_the_specification(model: Path, tmp_path: Path) -> None:
    target, _ = sign(model, private_pem(tmp_path, key()), ignored=("cache",))
    bundle = json.loads(target.read_bytes())
    assert bundle["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    assert set(bundle["verificationMaterial"]["publicKey"]) == {"hint"}
    assert bundle["dsseEnvelope"]["payloadType"] == "application/vnd.in-toto+json"
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    names = [one["name"] for one in statement["predicate"]["resources"]]
    assert names == sorted(names) == files_of(MODEL)
    assert statement["subject"][0]["name"] == "model"
    assert statement["predicate"]["serialization"] == {
        "method": "files",
        "hash_type": "sha256",
        "allow_symlinks": False,
        "ignore_paths": [".git", ".gitattributes", ".github", ".gitignore", "cache", "model.sig"],
    }


def test_paths_that_the_signer_left_out_may_change(model: Path, tmp_path: Path, trust: Trust) -> None:
    write(model, {"cache/x": b"1"})
    target, _ = sign(model, private_pem(tmp_path, key()), ignored=("cache",))
    write(model, {"cache/y": b"2"})
    assert "cache" not in str(verify(model, target, trust).manifest)


@given(FOLDERS, st.data())
def test_every_change_of_a_signed_folder_is_refused(contents: Contents, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name) / "model", contents)
        shard_size = data.draw(st.sampled_from([None, 4096]))
        if shard_size is not None and any(not path.stat().st_size for path in folder.rglob("*") if path.is_file()):
            return
        target, _ = sign(folder, private_pem(Path(name), key()), shard_size=shard_size)
        trust = Trust(public_key=public_pem(Path(name), key()))
        assert verify(folder, target, trust).manifest.files
        path = folder / data.draw(st.sampled_from([one for one in files_of(folder) if one != "model.sig"]))
        content = path.read_bytes()
        change = data.draw(st.sampled_from(["flip", "truncate", "rename", "add", "remove", "swap", "link", "empty"]))
        if change == "flip" and content:
            at = data.draw(st.integers(0, len(content) - 1))
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        elif change == "truncate" and content:
            path.write_bytes(content[:-1])
        elif change == "rename":
            path.rename(path.with_name(path.name + "z"))
        elif change == "remove":
            path.unlink()
        elif change == "empty":
            (folder / "__init__.py").touch()
        elif change == "swap":
            other = folder / data.draw(st.sampled_from([one for one in files_of(folder) if one != "model.sig"]))
            if other.read_bytes() == content:
                return
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
        elif change == "link":
            path.rename(Path(name) / "elsewhere")
            path.symlink_to(Path(name) / "elsewhere")
        else:
            (folder / "zz-added").write_bytes(content)
        refusal(folder, target, trust)


@given(st.integers(0, 10_000_000), st.integers(0, 7))
def test_a_signature_with_any_flipped_bit_is_refused_or_says_the_same(at: int, bit: int) -> None:
    """A bit in white space or in a field that nothing reads changes nothing; every other one is refused."""
    original = (VECTORS / "P-256.sig").read_bytes()
    at %= len(original)
    changed = original[:at] + bytes([original[at] ^ (1 << bit)]) + original[at + 1 :]
    before = decode_bundle(original, "model.sig")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.sig"
        path.write_bytes(changed)
        try:
            verify(MODEL, path, Trust(public_key=VECTORS / "P-256.pub"))
        except ModelLoadError:
            return
        assert read_bundle(path).payload == before.payload


def test_the_failure_names_the_file_both_digests_and_the_remedy(model: Path, tmp_path: Path, trust: Trust) -> None:
    target, statement = sign(model, private_pem(tmp_path, key()))
    (model / "a.txt").write_bytes(b"changed\n")
    message = refusal(model, target, trust)
    assert "a.txt of " in message
    assert next(one.digest for one in statement.predicate.resources if one.name == "a.txt") in message
    assert "sha256:" in message
    assert "get the model again" in message


def test_unsigned_files_are_refused_by_name_or_ignored(model: Path, tmp_path: Path, trust: Trust) -> None:
    target, _ = sign(model, private_pem(tmp_path, key()))
    write(model, {"zz/added": b"", "added.py": b"import os"})
    assert "holds added.py, which was not signed (2 such files)" in refusal(model, target, trust)
    found = verify(model, target, trust, ignore_unsigned=True)
    assert [file.path for file in found.manifest.files] == files_of(MODEL)
    (model / "a.txt").write_bytes(b"changed\n")
    with pytest.raises(ModelLoadError, match=r"a\.txt"):
        verify(model, target, trust, ignore_unsigned=True)


# -- signers ------------------------------------------------------------------------------------


def test_another_key_and_a_key_of_another_kind_are_refused(model: Path, tmp_path: Path) -> None:
    target, _ = sign(model, private_pem(tmp_path, key()))
    assert "was made with the key" in refusal(model, target, Trust(public_key=public_pem(tmp_path, key("P-256", 1))))
    document = json.loads(target.read_bytes())
    del document["verificationMaterial"]["publicKey"]["hint"]
    target.write_text(json.dumps(document))
    assert "is not valid" in refusal(model, target, Trust(public_key=public_pem(tmp_path, key("P-256", 1))))
    assert verify(model, target, Trust(public_key=public_pem(tmp_path, key())))  # the hint is only a hint
    roots = pem(tmp_path, "roots.pem", certificate("Root", key(), is_ca=True))
    assert "bare key" in refusal(model, target, Trust(roots=roots))
    wrong = VECTORS / "certificate.sig"
    assert "with a certificate" in refusal(MODEL, wrong, Trust(public_key=public_pem(tmp_path, key())))


@pytest.mark.parametrize("kind", ["rsa", "secp256k1", "ed25519", "text"])
def test_other_keys_are_refused_by_name(model: Path, tmp_path: Path, kind: str) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    makers: dict[str, Callable[[], Any]] = {
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
        "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
    }
    private, public = tmp_path / "key", tmp_path / "pub"
    if kind == "text":
        private.write_text("no key")
        public.write_text("no key")
    else:
        made = makers[kind]()
        private.write_bytes(
            made.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        public.write_bytes(
            made.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
    expected = "no (public|private) key" if kind == "text" else "not on the curve"
    with pytest.raises(ModelLoadError, match=expected):
        sign(model, private)
    with pytest.raises(ModelLoadError, match=expected):
        verify(MODEL, VECTORS / "P-256.sig", Trust(public_key=public))
    assert not (model / "model.sig").exists()


def test_a_private_key_needs_its_password(model: Path, tmp_path: Path, trust: Trust) -> None:
    private = private_pem(tmp_path, key(), b"secret")
    with pytest.raises(ModelLoadError, match="needs its password"):
        sign(model, private)
    with pytest.raises(ModelLoadError, match="its password is another one"):
        sign(model, private, password=b"wrong")
    assert verify(model, sign(model, private, password=b"secret")[0], trust)
    with pytest.raises(ModelLoadError, match="has no password"):
        sign(model, private_pem(tmp_path, key()), password=b"secret")


class Authority:
    """A root, an issuer below it, and signatures by certificates that they made."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.keys = {name: key("P-384", number) for number, name in enumerate(("root", "issuer", "signer", "other"))}
        self.root = certificate("Root", self.keys["root"], is_ca=True)
        self.issuer = certificate("Issuer", self.keys["issuer"], self.root, self.keys["root"], is_ca=True)
        self.trust = Trust(roots=pem(folder, "roots.pem", self.root))

    def issued(self, **options: Any) -> x509.Certificate:
        return certificate("Signer", self.keys["signer"], self.issuer, self.keys["issuer"], **options)

    def signed(self, leaf: x509.Certificate, *between: x509.Certificate) -> Path:
        chain = pem(self.folder, "chain.pem", *between) if between else None
        return sign(
            self.model,
            private_pem(self.folder, self.keys["signer"]),
            certificate=pem(self.folder, "signer.pem", leaf),
            chain=chain,
        )[0]


@pytest.fixture
def authority(tmp_path: Path, model: Path) -> Authority:
    return Authority(tmp_path, model)


def test_a_certificate_leads_to_its_root(authority: Authority) -> None:
    bundle = authority.signed(authority.issued(), authority.issuer)
    assert verify(authority.model, bundle, authority.trust).evidence == "signature by certificate CN=Signer"
    # The root may stand in the chain too, and the signer's own certificate may be what is trusted.
    assert verify(
        authority.model, authority.signed(authority.issued(), authority.issuer, authority.root), authority.trust
    )
    pinned = Trust(roots=pem(authority.folder, "pinned.pem", authority.issuer))
    assert verify(authority.model, authority.signed(authority.issued()), pinned)


def test_what_is_not_valid_now_is_refused_with_its_days(authority: Authority) -> None:
    for begin, end in ((-60, -1), (1, 60)):
        leaf = authority.issued(begin=NOW + timedelta(days=begin), end=NOW + timedelta(days=end))
        bundle = authority.signed(leaf, authority.issuer)
        assert f"{NOW + timedelta(days=end):%Y-%m-%d} only" in refusal(authority.model, bundle, authority.trust)
    authority.issuer = certificate(
        "Issuer", authority.keys["issuer"], authority.root, authority.keys["root"], is_ca=True,
        begin=NOW - timedelta(days=60), end=NOW - timedelta(days=1),
    )  # fmt: skip
    bundle = authority.signed(authority.issued(), authority.issuer)
    assert "no valid chain" in refusal(authority.model, bundle, authority.trust)


def test_chains_that_lead_nowhere_are_refused(authority: Authority, tmp_path: Path) -> None:
    good = authority.signed(authority.issued(), authority.issuer)
    foreign = Trust(roots=pem(tmp_path, "foreign.pem", certificate("Root", authority.keys["other"], is_ca=True)))
    assert "no valid chain" in refusal(authority.model, good, foreign)
    assert "no valid chain" in refusal(authority.model, authority.signed(authority.issued()), authority.trust)
    self_signed = certificate("Signer", authority.keys["signer"])
    assert "no valid chain" in refusal(authority.model, authority.signed(self_signed), authority.trust)


def test_an_issuer_must_be_an_authority(authority: Authority) -> None:
    for options in ({"is_ca": False}, {"is_ca": True, "path_length": 0}):
        top = certificate("Top", authority.keys["other"], authority.root, authority.keys["root"], **options)
        authority.issuer = certificate("Issuer", authority.keys["issuer"], top, authority.keys["other"], is_ca=True)
        bundle = authority.signed(authority.issued(), authority.issuer, top)
        assert "no valid chain" in refusal(authority.model, bundle, authority.trust)


def test_a_certificate_for_something_else_does_not_sign(authority: Authority) -> None:
    server = x509.oid.ExtendedKeyUsageOID.SERVER_AUTH
    code = x509.oid.ExtendedKeyUsageOID.CODE_SIGNING
    for refused in ({"digital_signature": False}, {"usages": (server,)}, {"has_key_usage": False}):
        bundle = authority.signed(authority.issued(**refused), authority.issuer)
        assert "not for signatures" in refusal(authority.model, bundle, authority.trust)
    for accepted in ({"usages": (server, code)}, {"has_key_usage": False, "usages": (code,)}, {}):
        assert verify(
            authority.model, authority.signed(authority.issued(**accepted), authority.issuer), authority.trust
        )


def test_a_certificate_of_another_key_signs_nothing(authority: Authority) -> None:
    other = certificate("Signer", authority.keys["other"])
    with pytest.raises(ModelLoadError, match="is not the certificate of"):
        authority.signed(other)


# -- bundles and statements ---------------------------------------------------------------------


def changed(change: Callable[[JSON], object]) -> bytes:
    document = json.loads((VECTORS / "P-256.sig").read_bytes())
    change(document)
    return json.dumps(document).encode()


def other_material(document: JSON, **material: object) -> None:
    document["verificationMaterial"] = material


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("dsseEnvelope"), "no Sigstore bundle"),
        (lambda d: d.pop("verificationMaterial"), "no Sigstore bundle"),
        (lambda d: d.pop("mediaType"), "no Sigstore bundle"),
        (lambda d: d.update(mediaType="application/json"), "media type"),
        (lambda d: d["dsseEnvelope"].update(payloadType="text/plain"), "signs 'text/plain'"),
        (lambda d: d["dsseEnvelope"].update(signatures=[]), "0 signatures"),
        (lambda d: d["dsseEnvelope"]["signatures"].append(d["dsseEnvelope"]["signatures"][0]), "2 signatures"),
        (lambda d: d["dsseEnvelope"].update(payload="%%%"), "no Base64"),
        (other_material, "does not say how it was signed"),
        (lambda d: other_material(d, certificate={"rawBytes": "AAAA"}, tlogEntries=[{}]), "without a key"),
        (lambda d: other_material(d, x509CertificateChain={"certificates": []}), "0 certificates"),
        (
            lambda d: d["verificationMaterial"].update(x509CertificateChain={"certificates": [{"rawBytes": "AAAA"}]}),
            "says it twice",
        ),
    ],
)
def test_bundles_that_are_not_whole_are_refused_by_name(
    change: Callable[[JSON], object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "model.sig").write_bytes(changed(change))
    assert message in refusal(MODEL, tmp_path / "model.sig", Trust(public_key=VECTORS / "P-256.pub"))


def test_no_bundle_an_empty_one_and_a_huge_one_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust = Trust(public_key=VECTORS / "P-256.pub")
    assert "cannot be read" in refusal(MODEL, tmp_path / "absent.sig", trust)
    (tmp_path / "model.sig").touch()
    assert "no Sigstore bundle" in refusal(MODEL, tmp_path / "model.sig", trust)
    (tmp_path / "model.sig").write_bytes(b"[" * 100_000)
    assert "no Sigstore bundle" in refusal(MODEL, tmp_path / "model.sig", trust)
    monkeypatch.setattr("inferd.artefacts.bundle.MAX_BYTES", 1000)
    assert "more than 1000 bytes" in refusal(MODEL, VECTORS / "P-256.sig", trust)


@pytest.mark.parametrize("keyid", ["absent", None, "", "abc"])
def test_the_key_id_of_an_envelope_does_not_count(tmp_path: Path, keyid: str | None) -> None:
    def change(document: JSON) -> None:
        document["dsseEnvelope"]["signatures"][0].pop("keyid")
        if keyid != "absent":
            document["dsseEnvelope"]["signatures"][0]["keyid"] = keyid

    (tmp_path / "model.sig").write_bytes(changed(change))
    assert verify(MODEL, tmp_path / "model.sig", Trust(public_key=VECTORS / "P-256.pub"))


def test_the_form_before_1_1_with_the_raw_key_verifies(tmp_path: Path) -> None:
    material = {"publicKey": {"rawBytes": "AAAA", "keyDetails": "PKIX_ECDSA_P256_SHA_256"}}
    (tmp_path / "model.sig").write_bytes(changed(lambda document: other_material(document, **material)))
    assert verify(MODEL, tmp_path / "model.sig", Trust(public_key=VECTORS / "P-256.pub"))


def statement_with(change: Callable[[JSON], object]) -> bytes:
    statement = json.loads(read_bundle(VECTORS / "P-256.sig").payload)
    change(statement)
    return json.dumps(statement).encode()


def files(statement: JSON) -> list[JSON]:
    resources: list[JSON] = statement["predicate"]["resources"]
    return resources


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(predicateType="https://model_signing/Digests/v0.1"), "model_signing 0.2"),
        (lambda s: s.update(predicateType="https://example.com/other"), "statement of the type"),
        (lambda s: s.update(_type="https://in-toto.io/Statement/v0.1"), "statement of the type"),
        (lambda s: s.pop("predicate"), "no valid statement"),
        (lambda s: s["subject"].append(s["subject"][0]), "not one subject"),
        (lambda s: s["subject"][0].update(digest={"sha512": "0"}), "not one subject"),
        (lambda s: s["subject"][0]["digest"].update(sha256="0" * 64), "but its subject says"),
        (lambda s: files(s)[0].update(name="../x"), "by no path below"),
        (lambda s: files(s)[0].update(name="/x"), "by no path below"),
        (lambda s: files(s)[0].update(name=files(s)[1]["name"]), "named twice"),
        (lambda s: files(s)[0].update(digest="0"), "no SHA-256"),
        (lambda s: files(s)[0].update(digest=files(s)[0]["digest"].upper()), "no SHA-256"),
        (lambda s: files(s)[0].update(algorithm="blake3"), "blake3"),
        (lambda s: s["predicate"]["serialization"].update(hash_type="blake2b"), "blake2b"),
        (lambda s: s["predicate"]["serialization"].update(method="tensors"), "neither files nor shards"),
        (lambda s: s["predicate"]["serialization"].update(shard_size=4096), "does not fit its method"),
        (lambda s: s["predicate"]["serialization"].update(method="shards"), "does not fit its method"),
        (lambda s: s["predicate"]["serialization"].update(method="shards", shard_size=5000.5), "does not fit"),
        (lambda s: s["predicate"]["serialization"].update(method="shards", shard_size=1), "does not fit its method"),
        (lambda s: s["predicate"]["serialization"].update(method="shards", shard_size=1e300), "by no path below"),
        (lambda s: files(s).clear(), "covers no file"),
        (lambda s: files(s).reverse(), "but its subject says"),
    ],
)
def test_statements_that_contradict_themselves_are_refused(change: Callable[[JSON], object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        decode_statement(statement_with(change), "model.sig")


def test_a_signer_that_leaves_everything_out_is_not_followed() -> None:
    """Paths that lead elsewhere, or to the folder itself, leave nothing out."""

    def change(statement: JSON) -> None:
        statement["predicate"]["serialization"]["ignore_paths"] = [".", "..", "/", "../model", "a/../..", "", "cache"]

    assert decode_statement(statement_with(change), "model.sig").ignored == ("cache",)


def test_fields_that_are_unknown_are_ignored() -> None:
    def change(statement: JSON) -> None:
        statement["predicate"]["more"] = files(statement)[0]["annotations"] = {"a": [1]}

    assert decode_statement(statement_with(change), "model.sig")


def test_the_bytes_that_are_signed_are_dsses() -> None:
    """The example of the DSSE protocol has another type; the form is 'DSSEv1 LEN TYPE LEN BODY'."""
    assert pae(b"hello world") == b"DSSEv1 28 application/vnd.in-toto+json 11 hello world"


@given(st.binary(max_size=100), st.binary(max_size=80), st.lists(st.binary(min_size=1, max_size=20), max_size=3))
def test_a_bundle_is_read_as_it_was_written(payload: bytes, signature: bytes, chain: list[bytes]) -> None:
    hint = None if chain else "ab"
    made = decode_bundle(encode_bundle(_bundle(payload, signature, hint, tuple(chain))), "model.sig")
    assert made == _bundle(payload, signature, hint, tuple(chain))


def _bundle(payload: bytes, signature: bytes, hint: str | None, chain: tuple[bytes, ...]) -> Any:
    from inferd.artefacts.bundle import Bundle

    return Bundle(where="model.sig", payload=payload, signature=signature, key_hint=hint, chain=chain)


def test_without_cryptography_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography", None)
    message = refusal(MODEL, VECTORS / "P-256.sig", Trust(public_key=VECTORS / "P-256.pub"))
    assert "pip install 'inferd[signing]'" in message


def test_an_unwritable_place_is_told(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be written"):
        sign(model, private_pem(tmp_path, key()), bundle=tmp_path / "absent" / "model.sig")
    assert os.listdir(tmp_path / "model") == os.listdir(model)
