"""Artefacts by their content: verified copies that only the server's user can change.

A model is not loaded from where it was found: between the check of a file and its use the file could be replaced, and a
file that is mapped into memory can be changed even afterwards. ``checked_copy`` copies the artefact while it hashes it,
compares the copy with the policy, and gives it a place named by its content. Whatever happens to the source later does
not reach the copy. The next load of the same content hashes the source and the copy and writes nothing; a damaged copy
is replaced. Hard links would not do, since a file that is overwritten in place changes behind all its names; hashing
again after the load neither, since code has run by then.

A copy is ``TREE_DIGEST/NAME`` below the store. A lock on the folder, shared by the processes that use it, keeps it from
being removed. Copies that were not used for a week are removed when another one is made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

from inferd import clock
from inferd.artefacts.copying import copy_files, unwritable
from inferd.artefacts.manifest import TREE_PREFIX, Manifest, Progress, manifest_of, silent
from inferd.artefacts.policy import Expectation, Policy, Verified, expect
from inferd.artefacts.tree import not_verified
from inferd.errors import ModelLoadError

UNUSED_S: Final = 7 * 86_400.0
_PART: Final = ".part-"
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def store_folder() -> Path:
    """``inferd/artefacts`` in the user's cache folder. Raises ModelLoadError where the user has none."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(chosen) if chosen.startswith("/") else Path("~/.cache").expanduser()
    except RuntimeError:
        raise not_verified(
            "This user has no home folder for verified copies; set XDG_CACHE_HOME to a folder of its own."
        ) from None
    return cache / "inferd" / "artefacts"


def checked_copy(
    path: Path,
    policy: Policy,
    store: Path,
    *,
    links_into: Path | None = None,
    now: datetime | None = None,
    progress: Progress = silent,
) -> Verified:
    """A copy of a file or folder that is what the policy asks for, for this process's whole life.

    ``Verified.path`` has the name of the source. ``links_into``: see ``tree.find_files``. ``now``: when certificates must
    be valid. The phases for ``progress`` are 'copy' and 'verify'. Raises ModelLoadError; nothing of a refused artefact
    stays in the store.
    """
    expected = expect(policy, path, now)
    _make_private(store)
    known = expected.tree_digest(path)
    place = None if known is None else _place(store, known, path)
    try:
        if place is not None and place.exists():
            _keep(place.parent)
            files = expected.files(path, links_into)
            manifest = manifest_of(path, files=files, links_into=links_into, progress=progress)
            expected.check(path, manifest, str(path), progress)
            if _is_intact(place, manifest, progress):
                return Verified(place, manifest, expected.evidence)
        remove_unused(store, UNUSED_S)
        return _copied(path, expected, store, links_into, progress)
    except OSError as error:
        raise unwritable(store, error) from None


def adopt(
    manifest: Manifest,
    bring: Callable[[], Mapping[str, Path]],
    store: Path,
    *,
    is_folder: bool,
    progress: Progress = silent,
) -> Path:
    """The place of files with this manifest, for this process's whole life: a folder, or its one file.

    ``bring`` is called where the store does not have them. It returns the files by their paths in the manifest, hashed
    by the caller, and they are moved. The phase for ``progress`` is 'verify'. Raises ModelLoadError.
    """
    _make_private(store)
    place = store / manifest.tree_digest.removeprefix(TREE_PREFIX) / manifest.name
    try:
        _keep(place.parent)
        if place.exists() and _is_intact(place, manifest, progress):
            return place
        files = bring()
        remove_unused(store, UNUSED_S)
        part = store / f"{_PART}{secrets.token_hex(8)}"
        _keep(part)
        try:
            folder = part / "files"
            for path, file in files.items():
                to = folder / path
                to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                shutil.move(file, to)
            if place.exists():
                os.rename(place, part / "damaged")
            os.rename(folder if is_folder else folder / manifest.files[0].path, place)
        finally:
            _remove(part)
        return place
    except OSError as error:
        raise unwritable(store, error) from None


def remove_unused(store: Path, unused_s: float) -> list[Path]:
    """Remove the copies that no process uses and none has used for so many seconds, and what killed processes left of
    copies. Returns them."""
    removed = []
    for entry in store.iterdir():
        with _unused(entry) as used_at:
            if used_at is not None and (entry.name.startswith(_PART) or clock.wall() - used_at >= unused_s):
                shutil.rmtree(entry, ignore_errors=True)
                removed.append(entry)
    return removed


def _copied(path: Path, expected: Expectation, store: Path, links_into: Path | None, progress: Progress) -> Verified:
    part = store / f"{_PART}{secrets.token_hex(8)}"
    _keep(part)
    try:
        folder = part / "files"
        hashed = copy_files(expected.files(path, links_into), folder, progress, links_into)
        copy = folder / hashed[0].path if path.is_file() else folder
        manifest = Manifest(path.resolve().name, hashed)
        expected.check(copy, manifest, str(path), progress)
        place = _place(store, manifest.tree_digest, path)
        _keep(place.parent)
        if place.exists() and not _is_intact(place, manifest, progress):
            os.rename(place, part / "damaged")
        try:
            os.rename(copy, place)
        except OSError as error:
            is_there = error.errno in (errno.EEXIST, errno.ENOTEMPTY)  # another process was faster, or it was intact
            if not is_there or not _is_intact(place, manifest, progress):
                raise
        return Verified(place, manifest, expected.evidence)
    finally:
        _remove(part)


def _place(store: Path, tree_digest: str, path: Path) -> Path:
    return store / tree_digest.removeprefix(TREE_PREFIX) / path.resolve().name


def _is_intact(place: Path, manifest: Manifest, progress: Progress) -> bool:
    """Whether a copy still is what was copied."""
    try:
        return manifest_of(place, ignored=(), progress=progress).tree_digest == manifest.tree_digest
    except ModelLoadError:
        return False


def _make_private(store: Path) -> None:
    """Create the store, and make sure that no other user can change what is in it."""
    try:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = store.stat()
    except OSError as error:
        raise unwritable(store, error) from None
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise not_verified(
            f"The folder {store} for verified copies belongs to another user, or others can write to it; set "
            "XDG_CACHE_HOME to a folder of the server's own user."
        )


_kept: dict[str, int] = {}
"""The entries that this process uses, each with the descriptor that holds its lock."""


def _keep(entry: Path) -> None:
    """Hold a shared lock of an entry until the process ends, and note its use. Raises OSError."""
    while not _is_held(entry):
        entry.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(entry, _OPEN)
        except FileNotFoundError:  # another process took it for one that nothing uses, and removed it
            continue
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), entry.stat()):
                _kept[str(entry)] = descriptor
                break
        os.close(descriptor)  # it was removed before the lock was given
    os.utime(entry)


def _is_held(entry: Path) -> bool:
    """Whether this process holds an entry's lock. An entry that was removed all the same is held no more."""
    descriptor = _kept.get(str(entry))
    if descriptor is None:
        return False
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), entry.stat()):
            return True
    os.close(_kept.pop(str(entry)))
    return False


@contextlib.contextmanager
def _unused(entry: Path) -> Iterator[float | None]:
    """The time of an entry's last use, locked against a new one; None where a process uses it."""
    try:
        descriptor = os.open(entry, _OPEN)
    except OSError:  # another process has removed it
        yield None
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.fstat(descriptor).st_mtime
    except BlockingIOError:
        yield None
    finally:
        os.close(descriptor)


def _remove(entry: Path) -> None:
    os.close(_kept.pop(str(entry)))
    shutil.rmtree(entry, ignore_errors=True)
