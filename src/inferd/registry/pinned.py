"""Pinning a model's files as a worker loaded them, so that they can be loaded again after they were replaced.

Small files are copied, because these are often overwritten in place. Large files get a hard link, which needs no space
and survives a replacement by renaming. Knows nothing of workers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final

import msgspec

from inferd.config import ModelConfig
from inferd.registry.identity import WHOLE_BYTES, identity_of, source_files
from inferd.registry.source import is_bundled, is_code, is_remote, resolve

MAX_COPIED_BYTES: Final = 256 << 20  # of one model; further files are linked


def pin_files(config: ModelConfig, artifact: str, folder: Path) -> ModelConfig | None:
    """Pin the files that were loaded as ``artifact`` below the folder. Returns settings that load them from there.

    None, with nothing left behind, when that is impossible: code (it imports its neighbours by their place), files that
    are verified where they are (a folder is pinned without its hidden files), large files on another file system than
    the folder, a full disk, files that were replaced since. Files that other settings name (labels, a chat template)
    are not pinned; the model cannot be restored once one of them has changed.
    """
    if config.allow_code or config.verify is not None:
        return None
    pinned = None
    with contextlib.suppress(OSError):
        pinned = _Pinning().pin(config, folder)
    if pinned is None or identity_of(pinned) != artifact:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return pinned


class _Pinning:
    """The pinning of one model with all its parts."""

    def __init__(self) -> None:
        self._num_copied = 0

    def pin(self, config: ModelConfig, folder: Path) -> ModelConfig:
        changes: dict[str, object] = {"source": self._source(config.source, folder / "source")}
        draft = config.speculation.draft
        if draft is not None:
            changes["speculation"] = msgspec.structs.replace(
                config.speculation, draft=self._source(draft, folder / "draft")
            )
        parts = {}
        for number, (name, below) in enumerate(config.pipeline.models.items()):
            part = below if isinstance(below, ModelConfig) else msgspec.convert(below, ModelConfig)
            parts[name] = self.pin(part, folder / f"part-{number}")
        if parts:
            changes["pipeline"] = msgspec.structs.replace(config.pipeline, models=parts)
        return msgspec.structs.replace(config, **changes)

    def _source(self, source: str, folder: Path) -> str:
        """The source of the pinned files; the old source for files that are never replaced."""
        if is_bundled(source) or is_code(source) or is_remote(source):
            return source
        files = list(source_files(source))
        if not files:
            return source
        path = resolve(source)
        top = folder / (path.resolve().name or "model")
        for label, file in files:
            to = top / label if path.is_dir() else folder / label
            to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file(file.resolve(), to)
        return str(top if path.is_dir() else folder / files[0][0])

    def _file(self, file: Path, to: Path) -> None:
        size = file.stat().st_size
        if size <= WHOLE_BYTES and self._num_copied + size <= MAX_COPIED_BYTES:
            self._num_copied += size
            shutil.copyfile(file, to)
        else:
            os.link(file, to)
