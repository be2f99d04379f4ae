"""A model's files as a worker loaded them, kept on disk, so that they can be loaded once more after others took their
place.

Small files are copied, as those are often written over where they lie; of large ones a hard link is kept, which costs
nothing and outlives a replacement by renaming. Knows nothing of workers.
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

MAX_COPIED_BYTES: Final = 256 << 20  # of one model; what is beyond is linked


def keep(config: ModelConfig, artifact: str, folder: Path) -> ModelConfig | None:
    """Put the files that were loaded as ``artifact`` below the folder; settings that load them from there.

    None, with nothing left behind, where that cannot be: code (it finds its neighbours by where it lies), large files
    on another file system than the folder, a disk that is full, files that have been replaced since. Files that
    settings beside the source name (labels, a chat template) stay where they are; when they change the rest alone
    brings nothing back.
    """
    if config.allow_code:
        return None
    kept = None
    with contextlib.suppress(OSError):
        kept = _Keeping().kept(config, folder)
    if kept is None or identity_of(kept) != artifact:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return kept


class _Keeping:
    """One model's, with all its parts."""

    def __init__(self) -> None:
        self._num_copied = 0

    def kept(self, config: ModelConfig, folder: Path) -> ModelConfig:
        changes: dict[str, object] = {"source": self._source(config.source, folder / "source")}
        draft = config.speculation.draft
        if draft is not None:
            changes["speculation"] = msgspec.structs.replace(
                config.speculation, draft=self._source(draft, folder / "draft")
            )
        parts = {}
        for number, (name, below) in enumerate(config.pipeline.models.items()):
            part = below if isinstance(below, ModelConfig) else msgspec.convert(below, ModelConfig)
            parts[name] = self.kept(part, folder / f"part-{number}")
        if parts:
            changes["pipeline"] = msgspec.structs.replace(config.pipeline, models=parts)
        return msgspec.structs.replace(config, **changes)

    def _source(self, source: str, folder: Path) -> str:
        """Where its files are now: below the folder, or where they were when they are nobody's to replace."""
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
