"""The files that a replica's worker loaded, pinned so that a restarted worker loads the same files.

New files are brought into use by a reload, which starts a new worker beside the old one. A worker that dies must not
bring them into use by its restart, as they may be broken. The registry implements how files are pinned.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from pathlib import Path

from inferd.config import ModelConfig

_log = logging.getLogger("inferd.router")


class PinnedFiles:
    """The pinned files of one replica. ``below``: the folder for them; None: no files are pinned."""

    def __init__(self, model: str, config: ModelConfig, below: Path | None) -> None:
        self._model = model
        self._config = config
        self._below = below
        self._artifact = ""  # the identity of the files that are pinned or being pinned
        self._pinned_config: ModelConfig | None = None
        self._folder: Path | None = None
        self._pinning: asyncio.Task[None] | None = None

    def note_loaded(self, artifact: str) -> None:
        """Pin the files with which a worker became ready, in the background. ``artifact``: their identity."""
        if self._below is None or not artifact or artifact == self._artifact or self._pinning is not None:
            return
        self._artifact = artifact
        self._pinning = asyncio.get_running_loop().create_task(self._pin(artifact, self._below / secrets.token_hex(8)))

    async def _pin(self, artifact: str, folder: Path) -> None:
        from inferd.registry.pinned import pin_files  # when the model serves, so that no request waits for the import

        try:
            before = self._folder
            self._pinned_config = await asyncio.to_thread(pin_files, self._config, artifact, folder)
            self._folder = folder
            if before is not None:
                await asyncio.to_thread(shutil.rmtree, before, True)
        finally:
            self._pinning = None

    async def config_to_load(self) -> ModelConfig:
        """The configuration for the next worker: the model's own, or one with the pinned files if its files changed."""
        if self._pinning is not None:
            await asyncio.wait((self._pinning,))
        if self._pinned_config is None:
            return self._config
        from inferd.registry.identity import identity_of

        if await asyncio.to_thread(identity_of, self._config) == self._artifact:
            return self._config
        if await asyncio.to_thread(identity_of, self._pinned_config) != self._artifact:
            return self._config
        _log.warning(
            "%s: its files were replaced, and the new files were not loaded; the worker is started with the earlier "
            "files (inferd models load %s loads the new ones)",
            self._model,
            self._model,
        )
        return self._pinned_config

    async def close(self) -> None:
        """Delete the pinned files and pin no more."""
        if self._pinning is not None:
            await asyncio.wait((self._pinning,))
        if self._folder is not None:
            folder, self._folder, self._pinned_config, self._below = self._folder, None, None, None
            await asyncio.to_thread(shutil.rmtree, folder, True)
