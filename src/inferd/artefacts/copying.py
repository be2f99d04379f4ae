"""Copies of artefacts, hashed while they are made: every byte is read once, and what was hashed is what was written.

A copy in a folder of the server's own cannot be changed by the writers of the source. So a check of the copy holds for
what is loaded from it. Hard links would not do: a file that is overwritten in place changes behind all its names.

The bytes are not forced to the disk. A copy that a crash of the machine leaves damaged is found by its digest.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from inferd.artefacts.manifest import (
    CHUNK_BYTES,
    HashedFile,
    Manifest,
    Progress,
    Totals,
    check_unchanged,
    each_file,
    silent,
)
from inferd.artefacts.tree import FoundFile, checked_name, find_files, folded, not_verified, open_file
from inferd.errors import ModelLoadError

_NUM_BUFFERS: Final = 4  # one is read and hashed while the others are written


def copy_verified(
    sources: Mapping[str, Path], target: Path, expected: Mapping[str, str] | None = None, progress: Progress = silent
) -> Manifest:
    """Copy files into the folder ``target``, which must not exist, and hash them meanwhile. Returns their manifest.

    ``sources``: relative POSIX path in ``target`` -> file. ``expected``: path -> SHA-256 as 64 hexadecimal digits, for
    the files whose digest is known. ``target`` appears complete or not at all; its files are read-only. Raises
    ModelLoadError that names the file, the expected and the found digest, or what the disk says.
    """
    found = []
    for path, source in sorted(sources.items()):
        if source.is_dir():
            raise not_verified(f"{source} is a folder; name its files.", param="source")
        (file,) = find_files(source)
        found.append(FoundFile(checked_name(path), file.at, file.size))
    if len({folded(file.path) for file in found}) < len(found):
        raise not_verified(f"Two of the names for {target} differ by case or normalisation only.", param="source")
    part = target.with_name(f".{target.name}.{secrets.token_hex(6)}.part")
    try:
        hashed = copy_files(found, part, progress)
        check_expected(hashed, expected or {}, str(target))
        os.rename(part, target)
    except OSError as error:
        raise unwritable(target, error) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Manifest(target.name, hashed)


def check_expected(hashed: Sequence[HashedFile], expected: Mapping[str, str], where: str) -> None:
    """Raises ModelLoadError for the first file that is missing or has another digest."""
    by_path = {file.path: file.sha256 for file in hashed}
    for path, digest in sorted(expected.items()):
        found = by_path.get(path)
        if found is None:
            raise not_verified(f"{where} lacks the file {path}; get it again from its source.", param="source")
        if found != digest:
            raise not_verified(
                f"{path} of {where} has the digest sha256:{found}, but sha256:{digest} is expected; get it again from "
                "its source.",
                param="source",
            )


def copy_files(
    files: Sequence[FoundFile], folder: Path, progress: Progress = silent, links_into: Path | None = None
) -> tuple[HashedFile, ...]:
    """Copy files into a new folder, several at the same time. What a failure leaves is the caller's to remove.

    The phase for ``progress`` is 'copy'. Raises ModelLoadError, or OSError of the new folder.
    """
    folder.mkdir(mode=0o700, parents=True)
    for parent in sorted({(folder / file.path).parent for file in files}):
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    totals = Totals(sum(file.size for file in files), progress, "copy")
    return each_file(lambda file: copy_file(file, folder / file.path, totals.add, links_into), files)


def copy_file(file: FoundFile, target: Path, add: Callable[[int], None], links_into: Path | None = None) -> HashedFile:
    """Copy one file to a new file, and hash what was read. ``add`` is called with every number of bytes."""
    source = open_file(file, links_into)
    try:
        copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o400)
        try:
            before = os.fstat(source)
            digest, size = _copied(source, copy, add, before.st_size)
            check_unchanged(file, before, os.fstat(source), size)
        finally:
            os.close(copy)
    except OSError as error:
        raise unwritable(target, error) from None
    finally:
        os.close(source)
    return HashedFile(file.path, size, digest)


def _copied(source: int, copy: int, add: Callable[[int], None], expected_size: int) -> tuple[str, int]:
    """The SHA-256 and the number of bytes that were copied.

    A thread writes what was hashed while this one reads and hashes the next part; both release the interpreter's lock.
    """
    digest, size = hashlib.sha256(), 0
    if expected_size <= CHUNK_BYTES:
        while part := os.read(source, CHUNK_BYTES):
            digest.update(part)
            _write(copy, memoryview(part))
            size += len(part)
            add(len(part))
        return digest.hexdigest(), size
    buffers = [bytearray(CHUNK_BYTES) for _ in range(_NUM_BUFFERS)]
    writing: list[Future[None] | None] = [None] * _NUM_BUFFERS
    with ThreadPoolExecutor(1) as pool:
        turn = 0
        while True:
            earlier = writing[turn]
            if earlier is not None:
                earlier.result()
            num_read = os.readv(source, [buffers[turn]])
            if not num_read:
                break
            filled = memoryview(buffers[turn])[:num_read]
            writing[turn] = pool.submit(_write, copy, filled)
            digest.update(filled)
            size += num_read
            add(num_read)
            turn = (turn + 1) % _NUM_BUFFERS
        for last in writing:
            if last is not None:
                last.result()
    return digest.hexdigest(), size


def _write(descriptor: int, part: memoryview) -> None:
    while part:
        part = part[os.write(descriptor, part) :]


def unwritable(path: Path, error: OSError) -> ModelLoadError:
    """What the disk said about a copy, with the remedy."""
    return not_verified(
        f"The copy {path} cannot be written ({error.strerror or error}); make room, or set its folder to another disk.",
        param="source",
    )
