"""The signed statement of OMS v1.0 (OpenSSF Model Signing): which files a signature covers, and how they were hashed.

An in-toto statement with the predicate ``https://model_signing/signature/v1.0``. Knows the statement's JSON and how it
is compared with files; knows no keys.

The ``model_signing`` package (1.1.1) differs from the specification in three points, which are accepted here: it sorts
paths by their parts, it calls the only file of a model of one file '.', and it calls the algorithm of shards
'sha256-sharded-SIZE'.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final, Literal

import msgspec

from inferd.artefacts.manifest import CHUNK_BYTES, HashedFile, Manifest, Progress, Totals, check_unchanged, silent
from inferd.artefacts.tree import GIT_PATHS, FoundFile, checked_name, find_files, not_verified, open_file, unreadable
from inferd.errors import ModelLoadError

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://model_signing/signature/v1.0"
OLD_PREDICATE_TYPE: Final = "https://model_signing/Digests/v0.1"
SHARD_BYTES: Final = 1_000_000_000  # the specification's default
MIN_SHARD_BYTES: Final = 4096  # smaller ones would make a statement larger than its files
_MAX_SHARDS: Final = 1_000_000
_ONLY_FILE: Final = "."

Method = Literal["files", "shards"]


class Resource(msgspec.Struct, frozen=True):
    name: str
    digest: str
    algorithm: str


class Serialization(msgspec.Struct, frozen=True, omit_defaults=True):
    method: str
    hash_type: str
    allow_symlinks: bool
    shard_size: int | float | None = None  # bytes; the reference implementation writes 4096.0
    ignore_paths: tuple[str, ...] = ()


class Predicate(msgspec.Struct, frozen=True):
    resources: tuple[Resource, ...]
    serialization: Serialization


class Subject(msgspec.Struct, frozen=True):
    name: str
    digest: dict[str, str]


class _Kind(msgspec.Struct, frozen=True):
    """The fields that say what the rest is."""

    type_: str = msgspec.field(name="_type")
    predicate_type: str = msgspec.field(name="predicateType")


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """A signed statement, checked for what must hold in itself."""

    type_: str = msgspec.field(name="_type", default=STATEMENT_TYPE)
    subject: tuple[Subject, ...]
    predicate_type: str = msgspec.field(name="predicateType", default=PREDICATE_TYPE)
    predicate: Predicate

    @property
    def digest(self) -> str:
        """``sha256:`` and the root digest."""
        return f"sha256:{self.subject[0].digest['sha256']}"

    @property
    def method(self) -> str:
        return self.predicate.serialization.method

    @property
    def ignored(self) -> tuple[str, ...]:
        """The paths that the signer left out. A path that leads elsewhere leaves nothing out."""
        return tuple(path for path in self.predicate.serialization.ignore_paths if _is_name(path))


def decode_statement(payload: bytes, where: str) -> Statement:
    """The statement of a signature. ``where``: the signature's file, for messages. Raises ModelLoadError."""
    check_kind(payload, where)
    try:
        statement = msgspec.json.decode(payload, type=Statement)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise not_verified(f"{where} holds no valid statement ({error}).", param="verify.signature") from None
    _check(statement, where)
    return statement


def check_kind(payload: bytes, where: str) -> None:
    """Raises ModelLoadError for a statement of another kind. May be asked before the signature is known to be valid."""
    try:
        kind = msgspec.json.decode(payload, type=_Kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise not_verified(f"{where} holds no valid statement ({error}).", param="verify.signature") from None
    if kind.predicate_type == OLD_PREDICATE_TYPE:
        raise not_verified(
            f"{where} has the form of model_signing 0.2 ({OLD_PREDICATE_TYPE}), which does not say how the files were "
            "hashed; sign the model again with model_signing 1.0 or later, or with inferd registry sign.",
            param="verify.signature",
        )
    if (kind.type_, kind.predicate_type) != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise not_verified(
            f"{where} signs a statement of the type {kind.predicate_type!r}, not {PREDICATE_TYPE!r}; give the signature "
            "of a model.",
            param="verify.signature",
        )


def statement_of(
    path: Path,
    manifest: Manifest,
    *,
    ignored: Collection[str],
    shard_size: int | None = None,
    progress: Progress = silent,
) -> Statement:
    """The statement to sign for a file or folder with this manifest. ``shard_size``: bytes, for the method 'shards'."""
    if shard_size is None:
        resources = [Resource(file.path, file.sha256, "sha256") for file in manifest.files]
    else:
        empty = [file.path for file in manifest.files if not file.size]
        if empty:
            raise not_verified(
                f"{empty[0]} is empty, and shards do not cover empty files; sign by files.", param="source"
            )
        hashed = shard_digests(path, shard_size, ignored=ignored, progress=progress)
        resources = [Resource(name, digest, "sha256") for name, digest in sorted(hashed.items())]
    root = hashlib.sha256(b"".join(bytes.fromhex(one.digest) for one in resources)).hexdigest()
    serialization = Serialization(
        "files" if shard_size is None else "shards", "sha256", False, shard_size, tuple(sorted({*GIT_PATHS, *ignored}))
    )
    return Statement(
        subject=(Subject(manifest.name, {"sha256": root}),), predicate=Predicate(tuple(resources), serialization)
    )


def check_files(
    statement: Statement,
    path: Path,
    manifest: Manifest,
    *,
    ignore_unsigned: bool = False,
    shown: str = "",
    progress: Progress = silent,
) -> None:
    """Raises ModelLoadError for the first file that is not what was signed, is missing, or was not signed.

    ``manifest``: what ``path`` holds, without ``statement.ignored``. Shards are read from ``path`` again. ``shown``: how
    messages name the place. ``ignore_unsigned``: further files are no reason to refuse.
    """
    expected = {one.name: one.digest for one in statement.predicate.resources}
    found = {file.path: file.sha256 for file in manifest.files}
    if statement.method == "shards":
        size = int(statement.predicate.serialization.shard_size or 0)
        found = {file.path: "" for file in manifest.files if not file.size}
        found |= shard_digests(path, size, ignored=_left_out(path, statement, manifest), progress=progress)
    if signed_paths(statement) == {_ONLY_FILE} and path.is_file():
        expected = {manifest.files[0].path + name.removeprefix(_ONLY_FILE): digest for name, digest in expected.items()}
    where = shown or str(path)
    for name in sorted(expected):
        if name not in found:
            raise not_verified(f"{where} lacks {name}, which was signed; get the model again from its source.")
        if found[name] != expected[name]:
            raise not_verified(
                f"{name} of {where} has the digest sha256:{found[name]}, but sha256:{expected[name]} was signed; get "
                "the model again from its source, or have it signed again if the change was meant."
            )
    unsigned = sorted(found.keys() - expected.keys())
    if unsigned and not ignore_unsigned:
        raise not_verified(
            f"{where} holds {unsigned[0]}, which was not signed"
            f"{f' ({len(unsigned)} such files)' if len(unsigned) > 1 else ''}; remove it, have the model signed again, "
            "or set ignore_unsigned_files: true."
        )


def tree_digest_of(statement: Statement, path: Path) -> str | None:
    """The digest of exactly the signed files, where the statement tells it; None for shards."""
    if statement.method != "files":
        return None
    name = path.name
    files = [
        HashedFile(name if one.name == _ONLY_FILE else one.name, 0, one.digest) for one in statement.predicate.resources
    ]
    return Manifest(name, tuple(sorted(files, key=lambda file: file.path))).tree_digest


def signed_paths(statement: Statement) -> frozenset[str]:
    """The files that a statement covers."""
    names = (one.name for one in statement.predicate.resources)
    return frozenset(name.rsplit(":", 2)[0] if statement.method == "shards" else name for name in names)


def shard_digests(
    path: Path, shard_size: int, *, ignored: Collection[str], progress: Progress = silent
) -> dict[str, str]:
    """'PATH:BEGIN:END' -> SHA-256 of these bytes, for every shard of every file that is not empty."""
    found = find_files(path, ignored=ignored)
    if sum(1 + file.size // shard_size for file in found) > _MAX_SHARDS:
        raise not_verified(f"{path} has more than {_MAX_SHARDS} shards of {shard_size} bytes; use larger ones.")
    totals = Totals(sum(file.size for file in found), progress)
    return {name: digest for file in found for name, digest in _shards(file, shard_size, totals).items()}


def _shards(file: FoundFile, shard_size: int, totals: Totals) -> dict[str, str]:
    descriptor = open_file(file)
    made: dict[str, str] = {}
    try:
        before = os.fstat(descriptor)
        begin = end = 0
        digest = hashlib.sha256()
        while part := os.read(descriptor, min(CHUNK_BYTES, begin + shard_size - end)):
            digest.update(part)
            end += len(part)
            totals.add(len(part))
            if end - begin == shard_size:
                made[f"{file.path}:{begin}:{end}"] = digest.hexdigest()
                begin, digest = end, hashlib.sha256()
        if end > begin:
            made[f"{file.path}:{begin}:{end}"] = digest.hexdigest()
        check_unchanged(file, before, os.fstat(descriptor), end)
    except OSError as error:
        raise unreadable(file.at, error) from None
    finally:
        os.close(descriptor)
    return made


def _left_out(path: Path, statement: Statement, manifest: Manifest) -> tuple[str, ...]:
    """What the manifest does not hold of the folder: the shards are of the manifest's files alone."""
    held = {file.path for file in manifest.files}
    return (*statement.ignored, *(file.path for file in find_files(path) if file.path not in held))


def _check(statement: Statement, where: str) -> None:
    """What OMS v1.0 asks of a statement. Raises ModelLoadError."""

    def refuse(reason: str) -> ModelLoadError:
        return not_verified(f"{where}: {reason}; have the model signed again.", param="verify.signature")

    serialization, resources = statement.predicate.serialization, statement.predicate.resources
    if len(statement.subject) != 1 or "sha256" not in statement.subject[0].digest:
        raise refuse("its statement has not one subject with a SHA-256")
    if serialization.method not in ("files", "shards"):
        raise refuse(f"its serialization {serialization.method!r} is neither files nor shards")
    own_name = f"sha256-sharded-{serialization.shard_size or 0:.0f}"
    algorithms = {serialization.hash_type, *(one.algorithm.replace(own_name, "sha256") for one in resources)}
    if algorithms != {"sha256"}:
        named = sorted(algorithms - {"sha256"})[0]
        raise refuse(f"its files were hashed by {named}, and inferd verifies sha256 alone")
    size = serialization.shard_size
    is_size = size is not None and size >= MIN_SHARD_BYTES and size == int(size)
    if is_size != (serialization.method == "shards") or (size is not None) != is_size:
        raise refuse(f"its shard_size {size} does not fit its method {serialization.method!r}")
    names: set[str] = set()
    for one in resources:
        if one.name in names or not _is_resource(one.name, serialization.method):
            raise refuse(f"its file {one.name!r} is named twice, or by no path below the model")
        if len(one.digest) != 64 or not set(one.digest) <= set("0123456789abcdef"):
            raise refuse(f"the digest of {one.name!r} is no SHA-256 in hexadecimal")
        names.add(one.name)
    if not names:
        raise refuse("it covers no file")
    root = hashlib.sha256(b"".join(bytes.fromhex(one.digest) for one in resources)).hexdigest()
    if root != statement.subject[0].digest["sha256"]:
        raise refuse(f"its files hash to {root}, but its subject says {statement.subject[0].digest['sha256']}")


def _is_resource(name: str, method: str) -> bool:
    if method == "files":
        return name == _ONLY_FILE or _is_name(name)
    parts = name.rsplit(":", 2)
    if len(parts) != 3 or not all(part.isdecimal() and part.isascii() and len(part) < 20 for part in parts[1:]):
        return False
    return _is_name(parts[0]) or parts[0] == _ONLY_FILE


def _is_name(name: str) -> bool:
    try:
        checked_name(name)
    except ModelLoadError:
        return False
    return True
