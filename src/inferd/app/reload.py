"""Follows the configuration file: reads it when it has changed, and has a valid configuration adopted.

An invalid file changes nothing, and all its problems are reported. Knows when to read the file and what came of it.
Adopting a configuration is the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from inferd import clock
from inferd.app.config_file import Version, is_being_written, version
from inferd.app.source import ConfigSource
from inferd.config import Config
from inferd.errors import InferdError
from inferd.events import ConfigReloaded, Emit
from inferd.gateway.control import ReloadReport
from inferd.router.status import Applied

POLL_S = 0.5
REFERENCES_S = 2.0  # between two looks at what registries say
SETTLE_S = 0.1  # between two checks of a changed file: if both are equal, it is complete
MAX_WRITING_S = 10.0  # a program that keeps the file open for writing for longer is no longer waited for

_log = logging.getLogger("inferd.app")


class Reloader:
    """One reading at a time. ``adopt`` makes a configuration the one in use and says what changed; it
    raises InferdError, with nothing changed, where it cannot."""

    def __init__(
        self,
        source: ConfigSource,
        adopt: Callable[[Config], Awaitable[Applied]],
        emit: Emit,
        record: Callable[..., Awaitable[None]] | None = None,
        *,
        poll_s: float = POLL_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._source = source
        self._adopt = adopt
        self._emit = emit
        self._record = record  # of changes that came from the file alone
        self._poll_s = poll_s
        self._settle_s = settle_s
        self._is_gone = False
        self._one_at_a_time = asyncio.Lock()
        self._is_told = asyncio.Event()  # something outside the file is said to have changed
        self._read_version = version(source.path)
        self.last: ReloadReport | None = None
        self.since: float | None = None  # of the reload under way, in seconds since the epoch

    async def follow(self) -> None:
        """Poll until cancelled. A version is read when two checks in a row saw it and no process writes the file."""
        seen: Version | None = self._read_version
        writing_since: float | None = None
        while True:
            await asyncio.sleep(self._poll_s)
            found = await asyncio.to_thread(version, self._source.path)
            is_still = found == seen
            seen = found
            if not is_still:
                continue  # missing for a moment, or still changing
            if found is None:
                self._miss()
                continue
            if found == self._read_version and not self._is_gone:
                continue
            if await asyncio.to_thread(is_being_written, self._source.path):
                writing_since = writing_since or clock.now()
                if clock.now() - writing_since < MAX_WRITING_S:
                    continue
            writing_since = None
            try:
                await self._reload_itself("config-file")
            except Exception:  # a loop's boundary: a defect must not end the following
                _log.exception("%s could not be read again; the old configuration keeps serving", self._source.path)

    async def follow_references(self) -> None:
        """Poll what lies outside the file until cancelled."""
        has_changed = self._source.has_changed
        while has_changed is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_told.wait(), REFERENCES_S)
            self._is_told.clear()
            try:
                if await asyncio.to_thread(has_changed):
                    _log.info("a version that %s names has changed", self._source.path)
                    await self._reload_itself("registry")
            except Exception:  # a loop's boundary: a defect must not end the following
                _log.exception("versions could not be followed; the old configuration keeps serving")

    def look_soon(self) -> None:
        """Look now at what lies outside the file: something is said to have changed."""
        if self._source.look_soon is not None:
            self._source.look_soon()
        self._is_told.set()

    async def _reload_itself(self, actor: str) -> None:
        """Reload because of a change that no operator asked for here, with a line in the audit log."""
        outcome = await self.reload()
        if self._record is not None:
            word, detail = "done" if outcome.accepted else "refused", " ".join(outcome.details)
            await self._record("reload", word, actor=actor, detail=detail)

    async def reload(self) -> ReloadReport:
        """Read now and adopt what was read, or say why not."""
        async with self._one_at_a_time:
            self.since = clock.wall()
            try:
                config = await self._read_whole()
                _log.info("%s is being adopted", self._source.path)
                applied = await self._adopt(config)
            except InferdError as error:
                outcome = ReloadReport(at=clock.wall(), accepted=False, details=_problems(error))
            else:
                done, failed = tuple(applied.done), tuple(applied.failed)
                outcome = ReloadReport(at=clock.wall(), accepted=True, details=done, failed=failed)
            finally:
                self.since = None
            self.last = outcome
        self._report_outcome(outcome)
        return outcome

    async def _read_whole(self) -> Config:
        """The configuration in the file, read while no process changes it: half a file is often valid too. Raises
        InferdError."""
        path, patient_until = self._source.path, clock.now() + MAX_WRITING_S
        while True:
            # The version before is recorded as read, so that a change during reading is read again.
            before = self._read_version = await asyncio.to_thread(version, path)
            self._is_gone = False
            await asyncio.sleep(self._settle_s)
            is_over = clock.now() >= patient_until
            if not is_over and await asyncio.to_thread(is_being_written, path):
                continue
            try:
                config = await asyncio.to_thread(self._source.read)
            except InferdError:
                if is_over or await asyncio.to_thread(version, path) == before:
                    raise
            else:
                if is_over or await asyncio.to_thread(version, path) == before:
                    return config

    def _miss(self) -> None:
        """Warn once that the file is missing for longer than a replacement takes."""
        if self._is_gone:
            return
        self._is_gone = True
        said = f"{self._source.path} is gone; put it back, as a restart would not find it."
        self.last = ReloadReport(at=clock.wall(), accepted=False, details=(said,))
        _log.error("%s The configuration in use keeps serving.", said)
        self._emit(ConfigReloaded(accepted=False, is_whole=False, detail=said))

    def _report_outcome(self, outcome: ReloadReport) -> None:
        path, problems = self._source.path, _listed(outcome.failed)
        if not outcome.accepted:
            problems = _listed(outcome.details)
            _log.error("%s was read again and refused; the old configuration keeps serving:%s", path, problems)
        else:
            _log.info("%s was read again:%s", path, _listed(outcome.details) or " nothing changed")
            if problems:
                _log.error("%s is in use, but these models could not be changed to what it says:%s", path, problems)
        detail = "; ".join((*outcome.failed, *outcome.details))
        self._emit(ConfigReloaded(accepted=outcome.accepted, is_whole=outcome.is_whole, detail=detail))


def _listed(sentences: tuple[str, ...]) -> str:
    return "".join(f"\n  - {sentence}" for sentence in sentences)


def _problems(error: InferdError) -> tuple[str, ...]:
    """The lines of a refusal that lists several."""
    head, *rest = error.message.split("\n  - ")
    return tuple(rest) if rest else (head,)
