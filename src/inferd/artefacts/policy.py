"""What an artefact must be: its digest, its signature, or both; and whether a file or folder is that.

``verify`` answers for a file or folder that may change at the next moment. A loader uses ``store.checked_copy``, which
compares a copy that only the server can change.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec

from inferd.artefacts.manifest import TREE_PREFIX, Manifest, Progress, manifest_of, silent
from inferd.artefacts.signature import Signed, ignored_of, read_signature
from inferd.artefacts.statement import check_files, signed_paths, tree_digest_of
from inferd.artefacts.tree import BUNDLE_NAME, FoundFile, find_files, not_verified
from inferd.artefacts.trust import Trust


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of an artefact. Where both a digest and a signature are given, both must hold."""

    digest: str | None = None  # in either form of ``manifest.py``
    bundle: Path | None = None  # the signature's file
    trust: Trust | None = None  # whose signature; given with ``bundle``
    ignore_unsigned: bool = False  # files that are not signed are no reason to refuse, and are not used


class Expectation(msgspec.Struct, frozen=True):
    """A policy whose signature has been read and accepted."""

    policy: Policy
    ignored: tuple[str, ...]  # paths that are no part of the artefact
    signed: Signed | None = None

    @property
    def evidence(self) -> str:
        """Why the artefact is accepted, for people."""
        parts = [f"digest {self.policy.digest}"] if self.policy.digest is not None else []
        parts += [f"signature by {self.signed.signer}"] if self.signed is not None else []
        return " and ".join(parts)

    def tree_digest(self, path: Path) -> str | None:
        """The digest of exactly what will be accepted, as far as it is known before the files are read."""
        if self.signed is not None:
            return tree_digest_of(self.signed.statement, path)
        digest = self.policy.digest
        return digest if digest is not None and digest.startswith(TREE_PREFIX) else None

    def files(self, path: Path, links_into: Path | None = None) -> list[FoundFile]:
        """The files of the artefact: all that are not left out, or the signed ones alone."""
        found = find_files(path, ignored=self.ignored, links_into=links_into)
        if self.signed is not None and self.policy.ignore_unsigned and path.is_dir():
            covered = signed_paths(self.signed.statement)
            found = [file for file in found if file.path in covered]
        return found

    def check(self, path: Path, manifest: Manifest, shown: str, progress: Progress = silent) -> None:
        """Raises ModelLoadError, with the file and both digests, where ``path`` with this manifest is something else.
        Messages call the place ``shown``."""
        if self.signed is not None:
            check_files(
                self.signed.statement,
                path,
                manifest,
                ignore_unsigned=self.policy.ignore_unsigned,
                shown=shown,
                progress=progress,
            )
        digest = self.policy.digest
        if digest is not None and not manifest.has_digest(digest):
            found = manifest.tree_digest if digest.startswith(TREE_PREFIX) else manifest.digest
            raise not_verified(
                f"{shown} has the digest {found}, but verify.digest is {digest}; get the model again from its source, or "
                "pin the new digest (inferd registry digest) if the change was meant.",
                param="verify.digest",
            )


class Verified(msgspec.Struct, frozen=True):
    """An artefact that is what it should be."""

    path: Path  # where it was read
    manifest: Manifest
    evidence: str


def expect(policy: Policy, path: Path, now: datetime | None = None) -> Expectation:
    """Read the policy's signature. Raises ModelLoadError where the policy asks for nothing, or its signature is not one
    of a trusted signer. ``now``: when certificates must be valid; by default the present."""
    if policy.bundle is not None and policy.trust is not None:
        signed = read_signature(policy.bundle, policy.trust, now)
        return Expectation(policy, ignored_of(path, policy.bundle, signed.statement), signed)
    if policy.digest is None:
        raise not_verified("Neither a digest nor a signature is given, so nothing can be verified; give one.")
    return Expectation(policy, (BUNDLE_NAME,))


def verify(
    path: Path,
    policy: Policy,
    *,
    links_into: Path | None = None,
    now: datetime | None = None,
    progress: Progress = silent,
) -> Verified:
    """Compare a file or folder with a policy. Raises ModelLoadError with the file, both digests and the remedy."""
    expected = expect(policy, path, now)
    manifest = manifest_of(path, files=expected.files(path, links_into), links_into=links_into, progress=progress)
    expected.check(path, manifest, str(path), progress)
    return Verified(path, manifest, expected.evidence)
