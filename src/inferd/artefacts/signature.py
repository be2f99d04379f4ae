"""Signing and verifying models by OMS v1.0 (OpenSSF Model Signing).

``read_signature`` checks who signed and returns the statement, with which ``policy.py`` compares files. ``sign`` writes a
signature that other implementations verify. Signatures without keys (Sigstore with Fulcio and Rekor) are
refused by name: their verification needs the log's and the authority's changing roots from the network.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from inferd import clock
from inferd.artefacts.bundle import Bundle, encode_bundle, pae, read_bundle
from inferd.artefacts.manifest import Progress, manifest_of, silent
from inferd.artefacts.statement import Statement, check_kind, decode_statement, statement_of
from inferd.artefacts.tree import BUNDLE_NAME, not_verified
from inferd.artefacts.trust import (
    Trust,
    certificates,
    check_signature,
    hash_of,
    key_hint,
    signing_key,
)


class Signed(msgspec.Struct, frozen=True):
    """A signature that was accepted."""

    statement: Statement
    signer: str  # for people: 'key 3f2a...', 'certificate CN=...'


def read_signature(bundle: Path, trust: Trust, now: datetime | None = None) -> Signed:
    """The statement of a signature by a trusted signer. Raises ModelLoadError with the reason and the remedy.

    ``now``: when certificates must be valid; by default the present.
    """
    read = read_bundle(bundle)
    check_kind(read.payload, read.where)
    signer = check_signature(read, trust, now or datetime.fromtimestamp(clock.wall(), UTC))
    return Signed(decode_statement(read.payload, read.where), signer)


def ignored_of(path: Path, bundle: Path, statement: Statement | None = None) -> tuple[str, ...]:
    """The paths below ``path`` that a signature leaves out: its own file, and what its statement names."""
    below = (statement.ignored if statement is not None else ()) or ()
    try:
        own = bundle.resolve().relative_to(path.resolve()).as_posix()
    except ValueError:
        return tuple(below)
    return (*below, own) if own != "." else tuple(below)


def sign(
    path: Path,
    private_key: Path,
    *,
    bundle: Path | None = None,
    certificate: Path | None = None,
    chain: Path | None = None,
    password: bytes | None = None,
    ignored: Collection[str] = (),
    shard_size: int | None = None,
    progress: Progress = silent,
) -> tuple[Path, Statement]:
    """Sign a file or folder. Returns the signature's file and the statement. Raises ModelLoadError.

    ``bundle``: by default ``model.sig`` in the folder, or the file's name with ``.sig``. ``certificate``: of the key, for
    the method 'certificate', with the issuers between it and the root in ``chain``. ``password``: of the private key.
    ``shard_size``: bytes, for the method 'shards'.
    """
    target = bundle or default_bundle(path)
    key = signing_key(private_key, password)
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    signers = certificates(certificate) if certificate is not None else []
    if signers and signers[0].public_key() != key.public_key():
        raise not_verified(f"{certificate} is not the certificate of {private_key}.", param="verify.signature")
    signers += certificates(chain) if chain is not None else []
    left_out = {*ignored, *ignored_of(path, target)}
    manifest = manifest_of(path, ignored=left_out, progress=progress)
    statement = statement_of(path, manifest, ignored=left_out, shard_size=shard_size, progress=progress)
    payload = msgspec.json.encode(statement)
    made = Bundle(
        where=str(target),
        payload=payload,
        signature=key.sign(pae(payload), ec.ECDSA(hash_of(key.public_key()))),
        key_hint=key_hint(key.public_key()),
        chain=tuple(one.public_bytes(Encoding.DER) for one in signers),
    )
    try:
        target.write_bytes(encode_bundle(made))
    except OSError as error:
        raise not_verified(f"{target} cannot be written ({error.strerror}).", param="verify.signature") from None
    return target, statement


def default_bundle(path: Path) -> Path:
    """Where the signature of a file or folder is, where nothing else is said."""
    return path / BUNDLE_NAME if path.is_dir() else path.with_name(f"{path.name}.sig")
