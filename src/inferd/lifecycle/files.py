"""What reading the files of a version shows: whether they are those that were registered, and whose signature they have.

Knows files, digests and signatures. Whether a version needs a signature is the settings' to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from inferd.artefacts.manifest import Manifest, Progress, manifest_of, silent
from inferd.artefacts.policy import verify
from inferd.config import ModelConfig
from inferd.config.versioning import VerifyConfig
from inferd.errors import ModelLoadError
from inferd.lifecycle.contract_diff import contract_of, read_contract
from inferd.lifecycle.registry import Finding, NewVersion, check_name
from inferd.registry.verified import policy_of

MAX_SUMMARY: Final = 300


class Read(NamedTuple):
    """What was found, and what is wrong that is no reason to refuse the version."""

    findings: tuple[Finding, ...]
    warning: str = ""

    @property
    def is_whole(self) -> bool:
        return all(one.passed for one in self.findings)

    @property
    def words(self) -> str:
        return "; ".join([*[one.summary for one in self.findings], *([self.warning] if self.warning else [])])


def read_files(
    source: str,
    digest: str,
    settings: VerifyConfig | None,
    progress: Progress = silent,
    manifest: Manifest | None = None,
) -> Read:
    """Compare the files of a version with the registered digest, and with a signature where ``settings`` have one.

    The signature must be of the files with that digest. ``manifest``: of the files, where they were read already.
    Raises ModelLoadError for files that cannot be read.
    """
    path = Path(source).expanduser()
    manifest = manifest if manifest is not None else manifest_of(path, progress=progress)
    is_same = manifest.tree_digest == digest
    said = (
        "its files are as registered" if is_same else f"its files have the digest {manifest.tree_digest}, not {digest}"
    )
    report = {"source": source, "digest": manifest.tree_digest, "num_files": len(manifest.files)}
    found = Finding(kind="digest", passed=is_same, summary=said, report=report)
    if settings is None or settings.mode == "off" or settings.signature is None:
        return Read((found,))
    wanted = msgspec.structs.replace(settings, digest=digest)
    try:
        verified = verify(path, policy_of(wanted, path, ModelConfig(source=source)), progress=progress)
    except ModelLoadError as error:
        problem = _printable(error.message)
        if settings.mode == "warn":
            return Read((found,), f"its signature does not hold: {problem}")
        report = {"source": source, "digest": digest, "problem": problem}
        return Read((found, Finding(kind="signature", passed=False, summary=problem[:MAX_SUMMARY], report=report)))
    report = {"source": source, "digest": digest, "evidence": verified.evidence}
    summary = verified.evidence.removeprefix(f"digest {digest} and ")
    return Read((found, Finding(kind="signature", passed=True, summary=summary[:MAX_SUMMARY], report=report)))


class Described(NamedTuple):
    """What is registered, and what reading its files has shown."""

    new: NewVersion
    read: Read


def described(
    name: str,
    path: Path,
    settings: VerifyConfig | None,
    *,
    contract: bytes | None = None,
    allow_pickle: bool = False,
    description: str = "",
    tags: Mapping[str, str] = {},
    run_id: str = "",
    progress: Progress = silent,
) -> Described:
    """A file or folder as the next version of a model. ``contract``: KServe v2's metadata of the model, instead of what
    the file says. Raises InvalidRequest, and ModelLoadError for files that are no model or cannot be read."""
    check_name(name)
    found = contract_of(path, allow_pickle=allow_pickle)
    manifest = manifest_of(path, progress=progress)
    new = NewVersion(
        name=name,
        source=str(path),
        digest=manifest.tree_digest,
        num_bytes=manifest.num_bytes,
        num_files=len(manifest.files),
        contract=found if contract is None else read_contract(contract),
        description=description,
        tags=dict(tags),
        run_id=run_id,
    )
    return Described(new, read_files(new.source, new.digest, settings, progress, manifest))


def _printable(text: str) -> str:
    return "".join([char if char.isprintable() else " " for char in text])
