"""A registered version as one JSON document: its files by their digests, its contract, evidence, signature and history.

The document can be checked without the registry: the digest follows from the list of files, and each report has its
SHA-256. It holds no file of the model.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from inferd.artefacts.manifest import HashedFile, Manifest, Progress, manifest_of, silent
from inferd.errors import InvalidRequest, ModelLoadError
from inferd.lifecycle import registry
from inferd.lifecycle.contract_diff import Contract
from inferd.lifecycle.registry import MAX_ENTRIES, Entry, Version
from inferd.lifecycle.stages import Evidence, Stage
from inferd.state.database import Database

KIND: Final = "inferd-version"
MAX_BYTES: Final = 64 << 20
"""Of a document that is checked."""


class Proof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of evidence with its report."""

    evidence: Evidence  # report: the SHA-256 of the JSON of ``report``
    report: dict[str, Any]


class Signature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the registry knows of the signature of the files. Only a check of the files themselves proves it."""

    state: Literal["none", "verified", "failed"]
    words: str = ""  # who signed, or what is wrong


class VersionDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``inferd registry export`` writes."""

    kind: str = KIND
    schema: int = 1
    exported_at: str  # RFC 3339, UTC
    exported_by: str  # inferd and its version
    name: str
    version: int
    source: str
    digest: str  # tree-sha256: of ``files``
    num_bytes: int
    files: tuple[HashedFile, ...]
    contract: Contract
    description: str
    tags: dict[str, str]
    run_id: str
    aliases: tuple[str, ...]
    stage: Stage
    registrant: str
    approver: str
    accepted: tuple[str, ...]  # changes of the contract that an override has accepted
    signature: Signature
    proofs: tuple[Proof, ...]
    history: tuple[Entry, ...]  # of this version, the oldest first
    line: int  # the newest line of the registry's history then, and its hash
    hash: str


class _Kind(msgspec.Struct):
    kind: str = ""
    schema: int = 0


_decoder: Final = msgspec.json.Decoder(VersionDocument)


def document_of(
    database: Database, found: Version, *, exported_at: str, exported_by: str, progress: Progress = silent
) -> VersionDocument:
    """The document of a version. Reads its files. Raises ModelLoadError for files that are not those registered."""
    manifest = manifest_of(Path(found.source).expanduser(), progress=progress)
    if manifest.tree_digest != found.digest:
        raise ModelLoadError(
            f"The files of {found.name}@{found.version} at {found.source} have the digest {manifest.tree_digest}, and "
            f"{found.digest} was registered; put the registered files back, as only these can be exported.",
            param="source",
        )
    record = found.record
    signed = record.newest("signature")
    line, digest = registry.head(database)
    entries = [one for one in registry.history(database, found.name, limit=MAX_ENTRIES) if one.version == found.version]
    return VersionDocument(
        exported_at=exported_at,
        exported_by=exported_by,
        name=found.name,
        version=found.version,
        source=found.source,
        digest=found.digest,
        num_bytes=manifest.num_bytes,
        files=manifest.files,
        contract=found.contract,
        description=found.description,
        tags=found.tags,
        run_id=found.run_id,
        aliases=found.aliases,
        stage=record.stage,
        registrant=record.registrant,
        approver=record.approver,
        accepted=record.accepted,
        signature=Signature(state="none")
        if signed is None
        else Signature(state="verified" if signed.passed else "failed", words=signed.summary),
        proofs=tuple(
            [
                Proof(evidence=one, report=registry.report_of(database, found.name, found.version, one.kind))
                for one in record.evidence
            ]
        ),
        history=tuple(reversed(entries)),
        line=line,
        hash=digest,
    )


def is_document(path: Path) -> bool:
    """Whether a file says that it is such a document."""
    try:
        return path.suffix == ".json" and msgspec.json.decode(_read(path), type=_Kind).kind == KIND
    except (OSError, InvalidRequest, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def read_document(path: Path) -> VersionDocument:
    """Raises InvalidRequest."""
    try:
        return _decoder.decode(_read(path))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"{path} is no document of a version ({error}); write it with 'inferd registry export NAME@VERSION'.",
            param="file",
        ) from None


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        encoded = file.read(MAX_BYTES + 1)
    if len(encoded) > MAX_BYTES:
        raise InvalidRequest(f"{path} is larger than {MAX_BYTES >> 20} MiB.", param="file")
    return encoded


def problems_of(document: VersionDocument) -> list[str]:
    """Where the document contradicts itself, or evidence in it speaks against the version. Reads no file."""
    said: list[str] = []
    if document.schema != 1:
        return [f"schema: {document.schema} was written by a later inferd, and this one knows 1"]
    manifest = Manifest(document.name, document.files)
    if manifest.tree_digest != document.digest:
        said.append(f"digest: the files that are listed have {manifest.tree_digest}, and {document.digest} is written")
    if manifest.num_bytes != document.num_bytes:
        said.append(f"num_bytes: the files have {manifest.num_bytes}, and {document.num_bytes} is written")
    for proof in document.proofs:
        one = proof.evidence
        if hashlib.sha256(msgspec.json.encode(proof.report)).hexdigest() != one.report:
            said.append(f"proofs: the {one.kind} report is not the one that was attached")
        if not one.passed:
            said.append(f"proofs: the {one.kind} report did not pass ({one.summary or 'it has no summary'})")
    if document.stage == "rejected":
        said.append("stage: the version was rejected")
    return said


def files_problem(document: VersionDocument, place: Path, progress: Progress = silent) -> str:
    """Why the files at a place are not those of the document; empty: they are. Raises ModelLoadError where they cannot
    be read."""
    found = manifest_of(place, progress=progress)
    if found.tree_digest == document.digest:
        return ""
    there, wanted = ({one.path: one.sha256 for one in files} for files in (found.files, document.files))
    names = sorted(name for name in there.keys() | wanted.keys() if there.get(name) != wanted.get(name))
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{place} has other files than the document: {', '.join(names[:5])}{more}"
