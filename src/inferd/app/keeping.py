"""Saves the counters of the metrics while a server runs and when it stops, and continues from them at its start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from inferd.config import MetricsConfig
from inferd.observe import Observer
from inferd.observe.kept import KeptFile, UnreadableError

_log = logging.getLogger(__name__)

_LAST_SAVING_S = 5.0
"""A server that stops does not wait longer for its disk."""


class Keeping:
    """The counters of one observer in one file. ``config``: the settings of now."""

    def __init__(self, observer: Observer, path: Path, config: Callable[[], MetricsConfig]) -> None:
        self._observer = observer
        self._file = KeptFile(path)
        self.config = config
        self._is_failing = False

    def begin(self) -> None:
        """Continue from the file. One that cannot be read is renamed, and never stops the start."""
        if not self.config().keep:
            return
        try:
            dropped = self._observer.restore(self._file.read())
        except UnreadableError as error:
            self._put_aside(error)
        except OSError as error:
            _log.warning("The counters begin at zero, because %s cannot be read: %s.", self._file.path, error)
        else:
            if dropped:
                _log.info("%d series of counters that this configuration does not have were dropped.", dropped)

    def _put_aside(self, reason: UnreadableError) -> None:
        path = self._file.path
        try:
            aside = self._file.put_aside()
        except OSError as error:
            _log.warning("The counters begin at zero: %s is no use, %s, and stays there: %s.", path, reason, error)
        else:
            _log.warning("The counters begin at zero: %s is no use, %s. It is now %s.", path, reason, aside)

    async def run(self) -> None:
        """Save again and again."""
        while True:
            await asyncio.sleep(self.config().keep_every_s)
            await self.save()

    async def save(self) -> None:
        """Save once. A disk that does not take the file is told of once."""
        if not self.config().keep:
            return
        rows = await self._observer.kept()
        try:
            await asyncio.to_thread(self._file.write, rows)
        except OSError as error:
            if not self._is_failing:
                _log.warning("The counters cannot be saved to %s: %s.", self._file.path, error)
            self._is_failing = True
        else:
            self._is_failing = False

    async def close(self) -> None:
        """Save for the last time."""
        try:
            await asyncio.wait_for(self.save(), _LAST_SAVING_S)
        except TimeoutError:
            _log.warning("The counters were not saved: %s took too long.", self._file.path)
