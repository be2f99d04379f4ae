"""The files that a node got from its server, by their content.

``blobs/SHA256`` has the bytes of one file, ``blobs/SHA256.part`` those of one that is on its way, and ``trees/`` has the
folders of models, of links to blobs. A part is continued where it ended, and used only when its digest is right.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from pathlib import Path
from typing import Final

import msgspec

from inferd.config import ModelConfig
from inferd.config.units import bytes_text
from inferd.errors import ConfigError, ModelLoadError
from inferd.nodes.files import changed_texts, model_files
from inferd.nodes.messages import ModelFile

KEPT_FREE_BYTES: Final = 64 << 20
"""Bytes of the disk that files of models leave free."""


MAX_NUMBERED: Final = 1024
"""Nodes of one machine and one user that find a folder by themselves."""


def cache_folder(name: str) -> Path:
    """The folder of the files of one node below the user's cache folder."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    below = Path(chosen) if chosen.startswith("/") else Path.home() / ".cache"
    return below / "inferd" / "nodes" / name.replace("/", "_")


def first_unused(below: Path) -> Cache:
    """The cache in the first of the folders ``0``, ``1`` and so on that no other node uses, locked. So nodes that have
    another name at every start find the files of earlier ones. Raises ConfigError."""
    for number in range(MAX_NUMBERED):
        cache = Cache(below / str(number))
        if cache.lock():
            return cache
    raise ConfigError(f"{MAX_NUMBERED} nodes use the folders below {below} already; end some of them.", param="cache")


class Cache:
    """The files below one folder, which one node uses at a time."""

    def __init__(self, folder: Path) -> None:
        self._blobs = folder / "blobs"
        self._trees = folder / "trees"
        self._lock: int | None = None

    def lock(self) -> bool:
        """Use the folder alone until this process ends; False: another node uses it. Raises ConfigError where it cannot
        be used."""
        folder = self._blobs.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            assert self._lock is not None
            os.close(self._lock)
            self._lock = None
            return False
        except OSError as error:
            raise self.unusable(error.strerror or str(error)) from None
        return True

    def unusable(self, reason: str) -> ConfigError:
        """The error for a folder that this node cannot use."""
        folder = self._blobs.parent
        return ConfigError(
            f"The folder {folder} for files of models cannot be used: {reason}; name another one with --cache.",
            param="cache",
        )

    def has(self, file: ModelFile) -> bool:
        """Whether the whole file is here."""
        return self._blob(file).exists()

    def missing(self, files: list[ModelFile]) -> list[ModelFile]:
        """The files that are not here, each content once.

        Raises ModelLoadError where the disk has no room for them, before anything is fetched.
        """
        self._make(self._blobs)
        wanted = {file.sha256: file for file in files if not self._blob(file).exists()}
        need = sum(file.size - self.part_size(file) for file in wanted.values())
        free = shutil.disk_usage(self._blobs).free
        if need + KEPT_FREE_BYTES > free and wanted:
            raise self._full(f"{bytes_text(need)} are to come and {bytes_text(free)} are free")
        return list(wanted.values())

    def part_size(self, file: ModelFile) -> int:
        """Bytes of a file that came before its transfer broke."""
        try:
            return min(self._part(file).stat().st_size, file.size)
        except FileNotFoundError:
            return 0

    def append(self, file: ModelFile, offset: int, data: bytes) -> None:
        """Keep bytes of a file. Raises ModelLoadError for a full disk."""
        try:
            with open(self._part(file), "r+b" if offset else "wb") as part:
                part.seek(offset)
                part.write(data)
                part.truncate()
        except OSError as error:
            raise self._full(error.strerror or str(error)) from None

    def complete(self, file: ModelFile) -> None:
        """All bytes of a file came: use them if they are right. Raises ModelLoadError; the next try begins anew then."""
        part, digest = self._part(file), hashlib.sha256()
        with part.open("rb") as opened:
            while data := opened.read(1 << 20):
                digest.update(data)
            os.fsync(opened.fileno())  # a blob's name vouches for its bytes, after a power loss too
        if digest.hexdigest() != file.sha256:
            part.unlink()
            raise ModelLoadError(
                f"The file {file.label} has other bytes on the server than it had when the worker was sent; try again."
            )
        os.replace(part, self._blob(file))

    def tree(self, config: ModelConfig, files: list[ModelFile]) -> ModelConfig:
        """Settings that load the files from a folder here. Every file is in ``blobs``.

        Raises ModelLoadError for a model whose files must be where they are: code, files that are verified there, and
        bundled models of another version.
        """
        root = self._trees / hashlib.sha256(msgspec.json.encode(files)).hexdigest()[:32]
        for file in files:
            to = root / Path(file.path).relative_to("/")
            if not to.exists():
                self._make(to.parent)
                try:
                    with contextlib.suppress(FileExistsError):  # another worker made it just now
                        os.link(self._blob(file), to)
                except OSError as error:
                    raise self._full(error.strerror or str(error)) from None
        paths = {file.path for file in files}
        folders = {str(folder) for path in paths for folder in Path(path).parents}

        def moved(key: str, text: str) -> str:
            is_ours = text in paths or (text in folders and len(text) > 1)
            return str(root / text.lstrip("/")) if is_ours else text

        placed = changed_texts(config, moved)
        if sorted(file.sha256 for file in model_files(placed)) != sorted(file.sha256 for file in files):
            raise ModelLoadError(
                "The model's files are not those of the server, and cannot be brought here: it has code, or files that "
                "are verified where they are, or it is a bundled model of another version. Put the same files at the "
                "same place on the node, or set placement.nodes to local."
            )
        return placed

    def _blob(self, file: ModelFile) -> Path:
        return self._blobs / _checked(file.sha256)

    def _part(self, file: ModelFile) -> Path:
        return self._blobs / f"{_checked(file.sha256)}.part"

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._full(error.strerror or str(error)) from None

    def _full(self, reason: str) -> ModelLoadError:
        return ModelLoadError(
            f"The model's files cannot be kept in {self._blobs.parent}: {reason}; make room there, or start the node "
            "with another --cache."
        )


def _checked(sha256: str) -> str:
    """The digest, which becomes a file's name. Raises ModelLoadError for another text."""
    if len(sha256) != 64 or not all(one in "0123456789abcdef" for one in sha256):
        raise ModelLoadError(f"{sha256[:80]!r} is no digest of a file.")
    return sha256
