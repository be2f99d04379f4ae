"""The files of a model by their content: what a node must have, and how it gets what it lacks.

A node that sees the same files at the same places, or has the same bundled model, uses them where they are: every digest
is compared. Else it builds a folder of its own from the files' content, which it has already or fetches. Digests of
files are remembered while their size, time and inode stay as they are.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from inferd.config import ModelConfig
from inferd.nodes.messages import Chunk, ModelFile, Refused, Whole, framed
from inferd.registry.identity import model_paths
from inferd.registry.source import is_bundled

CHUNK_BYTES: Final = 1 << 20
_READ_BYTES: Final = 4 << 20
_FOLDERS: Final = ("source", "draft")  # settings that may name a folder of files
_MAX_PATH: Final = 4096

_digests: dict[tuple[str, int, int, int, int], str] = {}
_MAX_DIGESTS: Final = 100_000

_log = logging.getLogger("inferd.nodes")


def model_files(config: ModelConfig) -> list[ModelFile]:
    """Every file that decides what the model computes, with its digest. None for a model of a hub. Raises OSError."""
    return [
        ModelFile(label, str(path.absolute()), path.stat().st_size, sha256_of(path))
        for label, path in model_paths(config)
    ]


def with_whole_paths(config: ModelConfig) -> ModelConfig:
    """The same settings, of which no path depends on the folder or the user that the server was started with."""
    files = {path.absolute() for _, path in model_paths(config)}
    folders = {folder for path in files for folder in path.parents}

    def whole(key: str, text: str) -> str:
        if not text or "\0" in text or is_bundled(text) or len(text) > _MAX_PATH:
            return text
        path = Path(text).expanduser().absolute()
        return str(path) if path in files or (key in _FOLDERS and path in folders) else text

    return changed_texts(config, whole)


def changed_texts(config: ModelConfig, change: Callable[[str, str], str]) -> ModelConfig:
    """Settings with other texts. ``change`` gets the name of a text's field and the text."""

    def changed(key: str, value: Any) -> Any:
        match value:
            case str():
                return change(key, value)
            case dict():
                return {name: changed(str(name), one) for name, one in value.items()}
            case list() | tuple():
                return [changed(key, one) for one in value]
        return value

    return msgspec.convert(changed("", msgspec.to_builtins(config)), ModelConfig)


def sha256_of(path: Path) -> str:
    """The digest of a file's bytes, read again only where the file is another one. Raises OSError."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        key = (str(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        known = _digests.get(key)
        if known is not None:
            return known
        digest = hashlib.sha256()
        while part := file.read(_READ_BYTES):
            digest.update(part)
    if len(_digests) >= _MAX_DIGESTS:
        _digests.clear()
    _digests[key] = digest.hexdigest()
    return _digests[key]


def are_equal(some: list[ModelFile], others: list[ModelFile]) -> bool:
    """Whether two machines have the same model."""
    return [(one.label, one.size, one.sha256) for one in some] == [(one.label, one.size, one.sha256) for one in others]


class Reader(Protocol):
    """The connection that a file is written to."""

    def write(self, data: bytes) -> None: ...
    def finish(self) -> None: ...
    async def drained(self) -> None: ...
    @property
    def is_open(self) -> bool: ...


async def send_file(reader: Reader, file: ModelFile, offset: int) -> None:
    """Send a file's bytes from ``offset`` on, as fast as they are read."""
    try:
        with open(file.path, "rb") as opened:
            opened.seek(offset)
            while reader.is_open:
                data = await asyncio.to_thread(opened.read, CHUNK_BYTES)
                if not data:
                    reader.write(framed(Whole()))
                    break
                reader.write(framed(Chunk(offset, data, chunk_digest(data))))
                offset += len(data)
                await reader.drained()
    except OSError as error:
        _log.warning("%s cannot be sent to a node: %s", file.path, error)
        reader.write(framed(Refused("message", f"{file.path} cannot be read on the server ({error.strerror})")))
    reader.finish()


def chunk_digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
