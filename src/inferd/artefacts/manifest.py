"""The manifest of an artefact: every file with its SHA-256, and digests of the whole.

Two digests name an artefact. ``digest`` is the root digest of OMS v1.0 (section 6.5.1): SHA-256 over the files' SHA-256
in the order of their paths. It is in every signature's subject, and it does not cover the names of files: a renamed file
whose place in the order stays the same is not noticed. ``tree_digest`` covers the names too: SHA-256 over the lines that
``sha256sum`` prints for the files in the order of their paths.

Each file is read once, through one descriptor, and a file that changes meanwhile is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec

from inferd.artefacts.tree import BUNDLE_NAME, FoundFile, find_files, not_verified, open_file, unreadable

Progress = Callable[[str, int, int], None]
"""Called with (phase, bytes done, bytes in total), from one thread at a time."""

CHUNK_BYTES: Final = 1 << 20
DIGEST_PREFIX: Final = "sha256:"
TREE_PREFIX: Final = "tree-sha256:"
_MAX_THREADS: Final = 8  # more wait for the disk


def silent(phase: str, done: int, total: int) -> None:
    """A progress function that shows nothing."""


class HashedFile(msgspec.Struct, frozen=True):
    """A file of an artefact, by its content."""

    path: str  # relative, with /
    size: int  # bytes
    sha256: str  # 64 hexadecimal digits


class Manifest(msgspec.Struct, frozen=True):
    """What an artefact holds."""

    name: str  # of the file or folder
    files: tuple[HashedFile, ...]  # by the code points of their paths

    @property
    def digest(self) -> str:
        """``sha256:`` and OMS's root digest. It covers contents and their order, not names."""
        return DIGEST_PREFIX + _root(self.files)

    @property
    def tree_digest(self) -> str:
        """``tree-sha256:`` and a digest of names and contents: that of ``sha256sum`` over ``sha256sum``'s lines."""
        lines = "".join(f"{file.sha256}  {file.path}\n" for file in self.files)
        return TREE_PREFIX + hashlib.sha256(lines.encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def has_digest(self, digest: str) -> bool:
        """Whether ``digest`` names this artefact, in either form.

        The ``model_signing`` package sorts paths by their parts ('a/x' before 'a-b'), not by code points as the
        specification says. Its root digest of such a folder is accepted too.
        """
        if digest.startswith(TREE_PREFIX):
            return digest == self.tree_digest
        by_parts = sorted(self.files, key=lambda file: file.path.split("/"))
        return digest in (self.digest, DIGEST_PREFIX + _root(by_parts))


def is_digest(text: str) -> bool:
    """Whether the text is written like a digest of this module."""
    for prefix in (DIGEST_PREFIX, TREE_PREFIX):
        if text.startswith(prefix):
            number = text.removeprefix(prefix)
            return len(number) == 64 and all(letter in "0123456789abcdef" for letter in number)
    return False


def manifest_of(
    path: Path,
    *,
    ignored: Collection[str] = (BUNDLE_NAME,),
    files: Sequence[FoundFile] | None = None,
    links_into: Path | None = None,
    threads: int | None = None,
    progress: Progress = silent,
) -> Manifest:
    """The manifest of a file or folder. Raises ModelLoadError that names the file and the remedy.

    ``ignored``: relative paths that are left out; by default the signature. ``files``: those that
    ``tree.find_files`` has found, instead of all that are not ignored. ``links_into``: see ``tree.find_files``.
    ``threads``: how many files are read at the same time; by default by the processor's cores.
    """
    found = files if files is not None else find_files(path, ignored=ignored, links_into=links_into)
    count = Totals(sum(file.size for file in found), progress)
    hashed = each_file(lambda file: hash_file(file, count.add, links_into), found, threads)
    return Manifest(path.resolve().name, hashed)


def each_file(
    work: Callable[[FoundFile], HashedFile], files: Sequence[FoundFile], threads: int | None = None
) -> tuple[HashedFile, ...]:
    """The results for all files, by path, from several threads. The first failure ends the others' turn."""
    # The longest files first: the last thread to end then has little left to do.
    largest_first = sorted(files, key=lambda file: -file.size)
    pool = ThreadPoolExecutor(threads or min(_MAX_THREADS, os.cpu_count() or 1, len(files)))
    try:
        return tuple(sorted(pool.map(work, largest_first), key=lambda file: file.path))
    finally:
        pool.shutdown(cancel_futures=True)


def hash_file(file: FoundFile, add: Callable[[int], None], links_into: Path | None = None) -> HashedFile:
    """Read one file to its end. ``add`` is called with every number of bytes. Raises ModelLoadError."""
    descriptor = open_file(file, links_into)
    try:
        before = os.fstat(descriptor)
        digest, buffer, size = hashlib.sha256(), bytearray(CHUNK_BYTES), 0
        view = memoryview(buffer)
        while num_read := os.readv(descriptor, [buffer]):
            digest.update(view[:num_read])
            size += num_read
            add(num_read)
        check_unchanged(file, before, os.fstat(descriptor), size)
    except OSError as error:
        raise unreadable(file.at, error) from None
    finally:
        os.close(descriptor)
    return HashedFile(file.path, size, digest.hexdigest())


def check_unchanged(file: FoundFile, before: os.stat_result, after: os.stat_result, size: int) -> None:
    """Raises ModelLoadError where the file changed between the two looks at its descriptor, or was not read whole."""
    same = (before.st_size, before.st_mtime_ns, before.st_ctime_ns) == (
        after.st_size,
        after.st_mtime_ns,
        after.st_ctime_ns,
    )
    if not same or size != after.st_size:
        raise not_verified(f"{file.at} changed while it was read; try again when it is complete.", param="source")


class Totals:
    """Progress of several threads, as one sum. ``total``: bytes."""

    def __init__(self, total: int, progress: Progress, phase: str = "verify") -> None:
        self._total = total
        self._progress = progress
        self._phase = phase
        self._done = 0
        self._lock = Lock()
        progress(phase, 0, total)

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._progress(self._phase, min(self._done, self._total), self._total)


def _root(files: Iterable[HashedFile]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(bytes.fromhex(file.sha256))
    return digest.hexdigest()
