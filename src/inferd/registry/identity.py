"""The identity of a model's files: one short name for their content, so that a replaced file is noticed.

Small files count with every byte, so a copy or a touched file is still the same model. Large files count with a part of
their bytes, their size, their inode and their time of change. Opens no model. Knows which settings name files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec

from inferd.config import ModelConfig
from inferd.errors import ModelLoadError
from inferd.registry.onnx_file import read_onnx
from inferd.registry.source import is_code, is_remote, resolve

WHOLE_BYTES: Final = 16 << 20  # a file of no more is read to its end
_PART_BYTES: Final = 64 << 10  # of a larger one: so much at its beginning and at its end
_MAX_DEPTH: Final = 6  # folders below a model's
_MAX_FILES: Final = 4096
_MAX_ONNX_BYTES: Final = 2 << 30  # protobuf's own limit


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def identity_of(config: ModelConfig) -> str:
    """Twelve hexadecimal digits, equal for equal files. Empty when no files of the model are known: a remote server, a
    hub id (whose files do not change), or a module elsewhere on Python's path."""
    digest = hashlib.blake2b(digest_size=6)
    is_known = False
    for label, path in model_paths(config):
        is_known = _add_file(digest, label, path) or is_known
    return digest.hexdigest() if is_known else ""


def identity_of_files(files: Iterable[Path]) -> str:
    """Forty hexadecimal digits, equal for equal files of equal names."""
    digest = hashlib.blake2b(digest_size=20)
    for path in files:
        _add_file(digest, path.name, path)
    return digest.hexdigest()


def model_paths(config: ModelConfig) -> Iterator[tuple[str, Path]]:
    """Every file that decides what the model computes, under a name that does not depend on where its folder lies."""
    is_enforced = config.verify is not None and config.verify.mode == "enforce"
    yield from source_files(config.source, beside=not is_enforced)
    if config.speculation.draft is not None:
        for label, file in source_files(config.speculation.draft):
            yield f"draft:{label}", file
    named = [config.chat_template, *(tensor.labels_file for tensor in (*config.inputs, *config.outputs))]
    settings: list[object] = [config.options]
    settings += [step.options for step in (*config.preprocess, *config.postprocess, *config.pipeline.steps)]
    named += [text for one in settings for text in _texts(one)]
    for place in named:
        path = _as_file(place)
        if path is not None:
            yield str(place), path
    for name, below in config.pipeline.models.items():
        part = below if isinstance(below, ModelConfig) else msgspec.convert(below, ModelConfig)
        for label, path in model_paths(part):
            yield f"{name}:{label}", path


def source_files(source: str, *, beside: bool = True) -> Iterator[tuple[str, Path]]:
    """A source's files, each under its name below the source's folder; none for a source without known files.

    ``beside``: also the files that an ONNX file names, which must be read for that.
    """
    if is_code(source):
        path = _code_file(source.rpartition(":")[0])
        if path is not None:
            yield path.name, path
        return
    if is_remote(source):
        return
    try:
        path = resolve(source)
    except ModelLoadError:  # the loader reports the problem
        return
    if path.is_file():
        yield path.name, path
        if beside:
            yield from _beside(path)
        return
    yield from _below(path)


def _code_file(place: str) -> Path | None:
    """Where Python would find a module that lies where the server was started; nothing is imported."""
    if place.endswith(".py"):
        return _as_file(place)
    inside = Path(os.getcwd(), *place.split("."))
    return _as_file(str(inside.with_suffix(".py"))) or _as_file(str(inside / "__init__.py"))


def _beside(path: Path) -> Iterator[tuple[str, Path]]:
    """The files in which an ONNX model keeps weights."""
    if path.suffix.lower() != ".onnx" or path.stat().st_size > _MAX_ONNX_BYTES:
        return
    try:
        locations = sorted({one.location for one in read_onnx(path).external})
    except ModelLoadError:
        return
    for location in locations:
        # The loader refuses what lies outside; it is not even looked at here.
        if location and not location.startswith("/") and ".." not in Path(location).parts and "\0" not in location:
            yield location, path.parent / location


def _below(folder: Path) -> Iterator[tuple[str, Path]]:
    """A folder's files in the order of their names, without hidden files and Python's caches."""
    count = 0
    for parent, folders, files in os.walk(folder, followlinks=True):
        here = Path(parent)
        depth = len(here.relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if name[0] != "." and name != "__pycache__" and depth < _MAX_DEPTH)
        for name in sorted(files):
            if name[0] == ".":
                continue
            count += 1
            if count > _MAX_FILES:
                return
            yield str((here / name).relative_to(folder)), here / name


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for below in value.values():
                yield from _texts(below)
        case list() | tuple():
            for below in value:
                yield from _texts(below)


def _as_file(place: str | None) -> Path | None:
    if not place or "\0" in place or len(place) > 4096:
        return None
    path = Path(place).expanduser()
    try:
        return path if path.is_file() else None
    except OSError:  # a text that is too long for a name
        return None


def _add_file(digest: _Digest, label: str, path: Path) -> bool:
    """Whether there was a file to note."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            digest.update(f"{label}\0{status.st_size}\0".encode(errors="surrogateescape"))
            if status.st_size <= WHOLE_BYTES:
                digest.update(file.read())
                return True
            digest.update(f"{status.st_mtime_ns}\0{status.st_ino}\0".encode())
            digest.update(file.read(_PART_BYTES))
            file.seek(-_PART_BYTES, os.SEEK_END)
            digest.update(file.read())
            return True
    except OSError as error:
        digest.update(f"{label}\0{error.errno}\0".encode(errors="surrogateescape"))
        return False
