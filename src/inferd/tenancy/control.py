"""Keys, quotas, books and kept answers of one server, wired to their database.

The composition of this room: opens the database, gives its thread what is due and when, and offers the
event loop what it may ask. The request path never waits for any of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from inferd import clock
from inferd.config import Config
from inferd.errors import StateUnavailable
from inferd.events import Emit, StateChanged, ignore
from inferd.state.database import Database
from inferd.state.folder import data_folder, make_folder
from inferd.state.open import open_database, sqlite_path
from inferd.state.presence import BEAT_S, LockedPresence
from inferd.state.thread import StateThread
from inferd.tenancy.door import KeyDoor, check_exposure, limits_of
from inferd.tenancy.idempotency import IdempotencyStore
from inferd.tenancy.keys import (
    KeyInfo,
    KeyRow,
    KeySpec,
    NewKey,
    create_key,
    list_keys,
    revoke_key,
    rotate_key,
)
from inferd.tenancy.leases import Leases
from inferd.tenancy.limiter import Limiter, QuotaUse
from inferd.tenancy.principal import Principal
from inferd.tenancy.ring import KeyRing
from inferd.tenancy.usage import COLUMNS, Column, UsageJournal, UsageRow, forget_before, read_usage

REFRESH_S: Final = 0.25
"""How often changes of keys are looked for. One number is read; a notification of PostgreSQL's would need a
second connection and could be lost with it, and is no faster than anybody notices."""

EXCHANGE_S: Final = 0.25
SETTLE_S: Final = 2.0
ENTER_S: Final = 1.0
HOURLY_S: Final = 3600.0


class Control:
    """Made, started, used, closed."""

    def __init__(self, config: Config, emit: Emit = ignore) -> None:
        self._config = config
        self._folder = data_folder(config.state)
        self._lock = threading.Lock()  # between a refresh and another configuration
        self._rows: Sequence[KeyRow] = ()
        self._ring = KeyRing(config.tenants)
        self._limiter = Limiter()
        self._journal = UsageJournal(self._folder, config.state.url)
        self._presence = LockedPresence(self._lock_folder())
        self._leases = Leases(self._limiter, self._presence)
        self._emit = emit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = StateThread(self._connect, self._tell)
        self.door = KeyDoor(self._ring, self._limiter, self._journal, config, emit)
        self.idempotency = IdempotencyStore(config.state.idempotency_ttl_s, self._thread, self._presence)

    async def start(self) -> None:
        """Open the database and read what the door must know; then keep both current.

        Raises ConfigError (unusable database, newer schema, an exposed address without keys) and
        StateUnavailable (the database cannot be reached). Nothing is left running then.
        """
        self._loop = asyncio.get_running_loop()
        database = await asyncio.to_thread(self._open)
        self._thread.every(REFRESH_S, self._refresh)
        self._thread.every(EXCHANGE_S, self._leases.exchange)
        self._thread.every(BEAT_S, self._presence.beat)
        self._thread.every(ENTER_S, self._journal.enter)
        self._thread.every(HOURLY_S, self._forget)
        self._thread.every(HOURLY_S, self.idempotency.purge)
        self._thread.at_end(self._journal.close)
        self._thread.at_end(self._leases.release)
        self._thread.at_end(self._presence.leave)
        self._thread.start(database)

    async def close(self) -> None:
        """Enter the usage, give back what is leased, close the database. Within bounded time."""
        await asyncio.to_thread(self._thread.close)
        self._presence.unlock()

    def apply(self, config: Config) -> None:
        """Tenants of a configuration that was read again; their new limits count as soon as they are leased.
        The database, and who needs keys, stay as they are."""
        self._ring.configure(config.tenants)
        with self._lock:
            self._config = config
            self._limiter.configure(limits_of(self._rows, config), clock.now())

    def quotas(self) -> list[QuotaUse]:
        """How much of each tenant's and key's limits is in use at this server."""
        return self._limiter.use(clock.now())

    # -- what may be asked -------------------------------------------------------------------------

    async def create_key(self, spec: KeySpec, by: Principal) -> NewKey:
        """Make a key; it opens this server's door when this returns, other servers' within a second.
        Raises InvalidRequest, Forbidden, StateUnavailable."""

        def job(database: Database) -> NewKey:
            made = create_key(database, spec, by=by, now=clock.wall())
            self._refresh(database)
            return made

        return await self._thread.call(job)

    async def list_keys(self, tenant: str | None = None) -> list[KeyInfo]:
        return await self._thread.call(lambda database: list_keys(database, now=clock.wall(), tenant=tenant))

    async def revoke_key(self, key_id: str) -> KeyInfo:
        """End a key: at once here, within a second elsewhere; requests in flight go on. Raises KeyNotFound."""

        def job(database: Database) -> KeyInfo:
            info = revoke_key(database, key_id, now=clock.wall())
            self._refresh(database)
            return info

        return await self._thread.call(job)

    async def rotate_key(self, key_id: str, overlap_s: float, by: Principal) -> NewKey:
        """Replace a key; the old one ends after the overlap. Raises KeyNotFound, InvalidRequest, Forbidden."""

        def job(database: Database) -> NewKey:
            made = rotate_key(database, key_id, by=by, overlap_s=overlap_s, now=clock.wall())
            self._refresh(database)
            return made

        return await self._thread.call(job)

    async def usage(
        self,
        *,
        by: Sequence[Column] = COLUMNS,
        tenant: str | None = None,
        key_id: str | None = None,
        since: str | None = None,
    ) -> list[UsageRow]:
        """The ledger, with every request that was settled before the call."""

        def job(database: Database) -> list[UsageRow]:
            self._journal.enter(database)
            return read_usage(database, by=by, tenant=tenant, key_id=key_id, since=since)

        return await self._thread.call(job)

    # -- the database's thread ---------------------------------------------------------------------

    def _open(self) -> Database:
        make_folder(self._folder)
        database = open_database(self._config.state.url, self._folder)
        try:
            self._presence.enter(database)
            self._refresh(database)
            check_exposure(self._config.server, self._ring.num_usable(clock.wall()))
            self._journal.recover(database)
            self._journal.prepare()
            self._settle(database)
        except BaseException:
            self._leave(database)
            raise
        return database

    def _lock_folder(self) -> Path:
        """One that all users of a local database share; for another one this machine's own."""
        path = sqlite_path(self._config.state.url, self._folder)
        return self._folder / "run" if path is None else path.with_name(path.name + "-users")

    def _settle(self, database: Database) -> None:
        """Let the other servers give this one its share before the first request; not for long."""
        deadline = clock.now() + SETTLE_S
        while not self._leases.is_settled and clock.now() < deadline:
            time.sleep(EXCHANGE_S / 4)
            self._leases.exchange(database)

    def _leave(self, database: Database) -> None:
        """After a start that failed."""
        with contextlib.suppress(StateUnavailable):
            self._journal.close(database)
            self._leases.release(database)
            self._presence.leave(database)
        self._presence.unlock()
        database.close()

    def _connect(self) -> Database:
        """After an outage: whatever the database says now holds."""
        database = open_database(self._config.state.url, self._folder)
        try:
            self._presence.enter(database)
        except BaseException:
            database.close()
            raise
        self._ring.reread()
        self._leases.reread()
        return database

    def _tell(self, available: bool) -> None:
        """Events belong to the event loop, which may be over when the thread has last words."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._emit, StateChanged(available=available))

    def _refresh(self, database: Database) -> None:
        def limit(rows: Sequence[KeyRow]) -> None:
            with self._lock:
                self._rows = rows
                self._limiter.configure(limits_of(rows, self._config), clock.now())
            try:
                self._leases.exchange(database)
            except StateUnavailable:
                # Neither may a revocation wait for leases, nor a new key come without its limits: it is
                # refused until they are there.
                self._limiter.publish()

        self._ring.refresh(database, limit)

    def _forget(self, database: Database) -> None:
        days = self._config.state.usage_retention_days
        if days is not None:
            forget_before(database, days, clock.wall())
