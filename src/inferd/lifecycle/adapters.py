"""The adapters that operators load while servers run: rows that all servers of a database share.

A row is desired state. Each server has its models' replicas load what the rows say, at its start and whenever they
change, so an adapter survives restarts and reaches every replica of every server. Does not know replicas: ``Adopt``
carries the rows to them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from inferd.errors import StateUnavailable
from inferd.state.database import Database, next_number, number
from inferd.state.thread import StateThread

POLL_S: Final = 1.0
"""Seconds between two looks at the number of the last change."""

_log = logging.getLogger("inferd.lifecycle")


class AdapterRow(NamedTuple):
    """An adapter of a model, by its own name."""

    name: str
    model: str
    source: str


Rows = Mapping[str, AdapterRow]
Adopt = Callable[[Rows], Awaitable[None]]
"""Has the replicas of this server load and unload adapters until they are those of the rows."""


class RuntimeAdapters:
    """The rows as this server knows them."""

    def __init__(self, state: StateThread, adopt: Adopt) -> None:
        self._state, self._adopt = state, adopt
        self._rows: dict[str, AdapterRow] = {}
        self._version = -1
        self._one_at_a_time = asyncio.Lock()

    @property
    def rows(self) -> Rows:
        return self._rows

    async def read(self) -> Rows:
        """Read the rows, before there are replicas. Raises StateUnavailable."""
        self._version, self._rows = await self._state.call(_read)
        return self._rows

    async def put(self, row: AdapterRow, refuse_failure: Callable[[], None]) -> None:
        """Have an adapter loaded here, then by all servers. ``refuse_failure`` raises where a replica of this server
        could not load it; then, or when the database does not answer, all is as it was before. Raises also
        StateUnavailable."""
        async with self._one_at_a_time:
            before = self._rows
            self._rows = {**before, row.name: row}
            try:
                await self._adopt(self._rows)
                refuse_failure()
                self._version = await self._state.call(lambda database: _put(database, row))
            except BaseException:
                self._rows = before
                await self._adopt(before)
                raise

    async def remove(self, name: str) -> None:
        """Have an adapter unloaded by all servers. Raises StateUnavailable, with nothing changed."""
        async with self._one_at_a_time:
            self._version = await self._state.call(lambda database: _remove(database, name))
            self._rows = {other: row for other, row in self._rows.items() if other != name}
            await self._adopt(self._rows)

    async def keep(self) -> None:
        """Follow the changes of other servers, until this is cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.look()
            except StateUnavailable as error:
                _log.debug("adapters stay as they are: %s", error.message)
            except Exception:  # a loop's boundary: a defect must not end it
                _log.exception("the adapters could not be looked at")

    async def look(self) -> None:
        """Adopt what other servers changed. Raises StateUnavailable."""
        async with self._one_at_a_time:
            if await self._state.call(_version) == self._version:
                return
            self._version, self._rows = await self._state.call(_read)
            await self._adopt(self._rows)


def _version(database: Database) -> int:
    with database.reading() as transaction:
        return number(transaction, "adapters")


def _read(database: Database) -> tuple[int, dict[str, AdapterRow]]:
    with database.reading() as transaction:
        version = number(transaction, "adapters")
        found = transaction.rows("SELECT name, model, source FROM adapters ORDER BY name")
    return version, {str(name): AdapterRow(str(name), str(model), str(source)) for name, model, source in found}


def _put(database: Database, row: AdapterRow) -> int:
    with database.transaction() as transaction:
        transaction.lock()
        transaction.execute("DELETE FROM adapters WHERE name = ?", (row.name,))
        transaction.execute("INSERT INTO adapters (name, model, source) VALUES (?, ?, ?)", row)
        return next_number(transaction, "adapters")


def _remove(database: Database, name: str) -> int:
    with database.transaction() as transaction:
        transaction.lock()
        transaction.execute("DELETE FROM adapters WHERE name = ?", (name,))
        return next_number(transaction, "adapters")
