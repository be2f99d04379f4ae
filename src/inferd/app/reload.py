"""Follows the configuration file: reads it when it has changed, and has a good one adopted.

A bad file changes nothing and is told with all its problems. Knows when to read and what came of it;
what adopting a configuration takes is the caller's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from inferd import clock
from inferd.app.config_file import Version, is_being_written, version
from inferd.app.source import ConfigSource
from inferd.config import Config
from inferd.errors import InferdError
from inferd.events import ConfigReloaded, Emit
from inferd.gateway.control import ReloadReport

POLL_S = 0.5
MAX_WRITING_S = 10.0  # a program that keeps the file open for writing for longer is no longer waited for

_log = logging.getLogger("inferd.app")


class Reloader:
    """One reading at a time. ``adopt`` makes a configuration the one in use and says what changed; it
    raises InferdError, with nothing changed, where it cannot."""

    def __init__(
        self,
        source: ConfigSource,
        adopt: Callable[[Config], Awaitable[list[str]]],
        emit: Emit,
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self._source = source
        self._adopt = adopt
        self._emit = emit
        self._poll_s = poll_s
        self._one_at_a_time = asyncio.Lock()
        self._read_version = version(source.path)
        self.last: ReloadReport | None = None

    async def follow(self) -> None:
        """Poll until cancelled. A version is read when two looks in a row saw it and nobody writes."""
        seen: Version | None = self._read_version
        writing_since: float | None = None
        while True:
            await asyncio.sleep(self._poll_s)
            found = await asyncio.to_thread(version, self._source.path)
            is_still = found == seen
            seen = found
            if found is None or found == self._read_version or not is_still:
                continue  # missing for a moment, nothing new, or still changing
            if await asyncio.to_thread(is_being_written, self._source.path):
                writing_since = writing_since or clock.now()
                if clock.now() - writing_since < MAX_WRITING_S:
                    continue
            writing_since = None
            try:
                await self.reload()
            except Exception:  # a loop's boundary: a defect must not end the following
                _log.exception("%s could not be read again; the old configuration keeps serving", self._source.path)

    async def reload(self) -> ReloadReport:
        """Read now and adopt what was read, or say why not."""
        async with self._one_at_a_time:
            # Before reading: a change that comes meanwhile is then read once more.
            self._read_version = await asyncio.to_thread(version, self._source.path)
            try:
                config = await asyncio.to_thread(self._source.read)
                details = tuple(await self._adopt(config))
            except InferdError as error:
                outcome = ReloadReport(at=clock.wall(), accepted=False, details=_problems(error))
            else:
                outcome = ReloadReport(at=clock.wall(), accepted=True, details=details)
            self.last = outcome
        self._tell(outcome)
        return outcome

    def _tell(self, outcome: ReloadReport) -> None:
        said = "\n  - ".join(("", *outcome.details)) if outcome.details else " nothing changed"
        if outcome.accepted:
            _log.info("%s was read again:%s", self._source.path, said)
        else:
            _log.error("%s was read again and refused; the old configuration keeps serving:%s", self._source.path, said)
        self._emit(ConfigReloaded(accepted=outcome.accepted, detail="; ".join(outcome.details)))


def _problems(error: InferdError) -> tuple[str, ...]:
    """The lines of a refusal that lists several."""
    head, *rest = error.message.split("\n  - ")
    return tuple(rest) if rest else (head,)
