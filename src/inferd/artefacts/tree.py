"""Which files an artefact consists of: every regular file of a file or folder, by relative POSIX paths.

The rules are those of OMS v1.0 (OpenSSF Model Signing, sections 6.1 and 6.2), and stricter where two files could be
taken for one another: symbolic links, special files, names that differ by case or by Unicode normalisation only, and
control characters in names are refused, as are more files or deeper folders than a bound. Folders are opened relative to
their parent's descriptor and never through a link, so a folder that is replaced during the walk cannot lead outside.
Reads no file.
"""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec

from inferd.errors import ModelLoadError

GIT_PATHS: Final = (".git", ".gitattributes", ".github", ".gitignore")
"""Left out at the top of every folder, by OMS v1.0."""

BUNDLE_NAME: Final = "model.sig"
"""The usual name of a signature, which is no part of what it signs."""

MAX_FILES: Final = 65_536
MAX_DEPTH: Final = 32  # folders below the artefact's own
MAX_NAME_BYTES: Final = 4096  # of a relative path

_OPEN_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not stop the reader


class FoundFile(msgspec.Struct, frozen=True):
    """One regular file of an artefact."""

    path: str  # relative to the artefact, with /; the name of a single file
    at: Path
    size: int  # bytes, when the folder was listed


def not_verified(sentence: str, *, param: str = "verify") -> ModelLoadError:
    """The error of this room: an artefact that is not what it should be."""
    return ModelLoadError(sentence, param=param, code="model_not_verified")


def find_files(
    path: Path, *, ignored: Collection[str] = (), links_into: Path | None = None, max_files: int = MAX_FILES
) -> list[FoundFile]:
    """The files of the artefact ``path``, sorted by the code points of their paths.

    ``ignored``: relative paths that are left out with all below them, besides Git's own at the top. ``links_into``: a
    folder into which symbolic links to files may lead, as those of a hub's cache lead to its blobs. Raises
    ModelLoadError that names the path and the remedy.
    """
    left_out = {*GIT_PATHS, *(checked_name(name) for name in ignored)}
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            return [FoundFile(checked_name(path.name), path.resolve(), status.st_size)]
        if not stat.S_ISDIR(status.st_mode):
            raise _special(path)
        walk = _Walk(path, frozenset(left_out), links_into, max_files)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = sorted(walk.files(folder, "", 0), key=lambda file: file.path)
        finally:
            os.close(folder)
    except OSError as error:
        raise unreadable(path, error) from None
    if not found:
        raise not_verified(f"{path} holds no file, so there is nothing to verify; check the path.", param="source")
    return found


def open_file(file: FoundFile, links_into: Path | None = None) -> int:
    """A descriptor of the file for reading. Raises ModelLoadError where it is no regular file any more."""
    try:
        target = file.at if links_into is None else _resolved(file.at, links_into)
        descriptor = os.open(target, _OPEN_FILE)
    except OSError as error:
        raise unreadable(file.at, error) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _special(file.at)
    return descriptor


def checked_name(name: str) -> str:
    """A relative path that means one file everywhere. Raises ModelLoadError."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise not_verified(f"The name {name!r} is not valid UTF-8; rename the file.", param="source") from None
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise not_verified(f"The path {name!r} is not relative to its folder, so the file is refused.", param="source")
    if "\\" in name or any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        raise not_verified(
            f"The name {name!r} has a backslash or a control character; rename the file.", param="source"
        )
    if size > MAX_NAME_BYTES:
        raise not_verified(
            f"The path {name[:60]!r}... has {size} bytes; at most {MAX_NAME_BYTES} are allowed.", param="source"
        )
    return name


def folded(name: str) -> str:
    """A name as a file system that ignores case and normalisation compares it."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def unreadable(path: Path, error: OSError) -> ModelLoadError:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return not_verified(
            f"{path} was replaced by a symbolic link while it was read, or leads through one; copy the files "
            "themselves.",
            param="source",
        )
    at = error.filename if isinstance(error.filename, str) else path
    return not_verified(f"{at} cannot be read ({error.strerror}); check the path and its permissions.", param="source")


class _Walk:
    """The listing of one folder with all below it."""

    def __init__(self, top: Path, ignored: frozenset[str], links_into: Path | None, max_files: int) -> None:
        self._top = top
        self._ignored = ignored
        self._links_into = links_into
        self._max_files = max_files
        self._num_files = 0

    def files(self, folder: int, prefix: str, depth: int) -> Iterator[FoundFile]:
        if depth > MAX_DEPTH:
            raise not_verified(f"{self._top / prefix} is more than {MAX_DEPTH} folders deep.", param="source")
        seen: dict[str, str] = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                path = prefix + entry.name
                if path in self._ignored:
                    continue
                checked_name(path)
                twin = seen.setdefault(folded(entry.name), entry.name)
                if twin != entry.name:
                    raise not_verified(
                        f"{self._top / prefix} holds {twin!r} and {entry.name!r}, which are one name where case or "
                        "Unicode normalisation does not count; rename one.",
                        param="source",
                    )
                yield from self._entry(folder, entry, path, depth)

    def _entry(self, folder: int, entry: os.DirEntry[str], path: str, depth: int) -> Iterator[FoundFile]:
        if entry.is_dir(follow_symlinks=False):
            inner = os.open(entry.name, _OPEN_FOLDER, dir_fd=folder)
            try:
                yield from self.files(inner, f"{path}/", depth + 1)
            finally:
                os.close(inner)
            return
        if entry.is_symlink():
            size = _resolved(self._top / path, self._links_into).stat().st_size
        elif entry.is_file(follow_symlinks=False):
            size = entry.stat(follow_symlinks=False).st_size
        else:
            raise _special(self._top / path)
        self._num_files += 1
        if self._num_files > self._max_files:
            raise not_verified(
                f"{self._top} holds more than {self._max_files} files; give the folder of one model.", param="source"
            )
        yield FoundFile(path, self._top / path, size)


def _resolved(path: Path, links_into: Path | None) -> Path:
    """The file that a symbolic link leads to; the path itself where it is none."""
    if not path.is_symlink():
        return path
    target = path.resolve()
    if links_into is None:
        raise not_verified(
            f"{path} is a symbolic link, which can lead anywhere at the next moment; copy the file itself.",
            param="source",
        )
    if not target.is_relative_to(links_into.resolve()) or not target.is_file():
        raise not_verified(f"{path} leads to {target}, which is no file below {links_into}.", param="source")
    return target


def _special(path: Path) -> ModelLoadError:
    return not_verified(f"{path} is no regular file or folder; remove it.", param="source")
