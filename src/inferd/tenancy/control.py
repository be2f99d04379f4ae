"""Keys, quotas, usage and idempotency of one server, connected to their database.

``Control`` opens the database, registers the periodic tasks of its thread, and offers the operations on keys and usage
to the event loop. Requests of models never wait for the database here.
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
"""Time between two checks for changed keys; each reads one number. PostgreSQL's notifications would need a second
connection, could be lost with it, and would save at most this time."""

EXCHANGE_S: Final = 0.25
SETTLE_S: Final = 2.0
ENTER_S: Final = 1.0
HOURLY_S: Final = 3600.0


class Control:
    """Everything about keys, quotas and usage of one server. Call ``start`` once, then the others, then ``close``."""

    def __init__(self, config: Config, emit: Emit = ignore) -> None:
        self._config = config
        self._folder = data_folder(config.state)
        self._lock = threading.Lock()  # held by a refresh and by a change of the configuration
        self._rows: Sequence[KeyRow] = ()
        self._ring = KeyRing(config.tenants)
        self._limiter = Limiter()
        self._journal = UsageJournal(self._folder, config.state.url)
        self.presence = LockedPresence(self._lock_folder())
        self._leases = Leases(self._limiter, self.presence)
        self._emit = emit
        self._loop: asyncio.AbstractEventLoop | None = None
        self.state = StateThread(self._connect, self._emit_availability)
        self.door = KeyDoor(self._ring, self._limiter, self._journal, config, emit)
        self.idempotency = IdempotencyStore(config.state.idempotency_ttl_s, self.state, self.presence)

    async def start(self) -> None:
        """Open the database, read keys and shares of limits, and start the thread that keeps them current.

        Raises ConfigError (unusable database, newer schema, an exposed address without keys) and
        StateUnavailable (the database cannot be reached). No thread runs after an error.
        """
        self._loop = asyncio.get_running_loop()
        database = await asyncio.to_thread(self._open)
        self.state.run_every(REFRESH_S, self._refresh)
        self.state.run_every(EXCHANGE_S, self._leases.exchange)
        self.state.run_every(BEAT_S, self.presence.beat)
        self.state.run_every(ENTER_S, self._journal.enter)
        self.state.run_every(HOURLY_S, self._purge_usage)
        self.state.run_every(HOURLY_S, self.idempotency.purge)
        self.state.run_at_close(self._journal.close)
        self.state.run_at_close(self._leases.release)
        self.state.run_at_close(self.presence.leave)
        self.state.start(database)

    async def close(self) -> None:
        """Enter the usage into the ledger, return the leases and close the database, within a bounded time."""
        await asyncio.to_thread(self.state.close)
        self.presence.unlock()

    def apply(self, config: Config) -> None:
        """Adopt the tenants of a new configuration. New limits hold as soon as they are leased. The database and the
        requirement of keys stay as they are."""
        self._ring.configure(config.tenants)
        with self._lock:
            self._config = config
            self._limiter.configure(limits_of(self._rows, config), clock.now())

    def quotas(self) -> list[QuotaUse]:
        """How much of each tenant's and key's limits is in use at this server."""
        return self._limiter.use(clock.now())

    # -- operations ---------------------------------------------------------------------------------

    async def create_key(self, spec: KeySpec, by: Principal) -> NewKey:
        """Create a key. This server accepts it when the call returns, other servers within a second.
        Raises InvalidRequest, Forbidden, StateUnavailable."""

        def job(database: Database) -> NewKey:
            made = create_key(database, spec, by=by, now=clock.wall())
            self._refresh(database)
            return made

        return await self.state.call(job)

    async def list_keys(self, tenant: str | None = None) -> list[KeyInfo]:
        return await self.state.call(lambda database: list_keys(database, now=clock.wall(), tenant=tenant))

    async def revoke_key(self, key_id: str) -> KeyInfo:
        """Revoke a key, here at once and at other servers within a second. Requests in flight continue. Raises
        KeyNotFound."""

        def job(database: Database) -> KeyInfo:
            info = revoke_key(database, key_id, now=clock.wall())
            self._refresh(database)
            return info

        return await self.state.call(job)

    async def rotate_key(self, key_id: str, overlap_s: float, by: Principal) -> NewKey:
        """Replace a key; the old one ends after the overlap. Raises KeyNotFound, InvalidRequest, Forbidden."""

        def job(database: Database) -> NewKey:
            made = rotate_key(database, key_id, by=by, overlap_s=overlap_s, now=clock.wall())
            self._refresh(database)
            return made

        return await self.state.call(job)

    async def usage(
        self,
        *,
        by: Sequence[Column] = COLUMNS,
        tenant: str | None = None,
        key_id: str | None = None,
        since: str | None = None,
    ) -> list[UsageRow]:
        """Rows of the ledger, with every request that ended before the call."""

        def job(database: Database) -> list[UsageRow]:
            self._journal.enter(database)
            return read_usage(database, by=by, tenant=tenant, key_id=key_id, since=since)

        return await self.state.call(job)

    # -- the database's thread ---------------------------------------------------------------------

    def _open(self) -> Database:
        make_folder(self._folder)
        database = open_database(self._config.state.url, self._folder)
        try:
            self.presence.enter(database)
            self._refresh(database)
            check_exposure(self._config.server, self._ring.num_usable(clock.wall()))
            self._journal.recover(database)
            self._journal.prepare()
            self._await_shares(database)
        except BaseException:
            self._abandon_start(database)
            raise
        return database

    def _lock_folder(self) -> Path:
        """The folder of lock files: beside a SQLite database, where all its users find it, else in the data folder."""
        path = sqlite_path(self._config.state.url, self._folder)
        return self._folder / "run" if path is None else path.with_name(path.name + "-users")

    def _await_shares(self, database: Database) -> None:
        """Wait for a share of each limit from the other servers, for at most ``SETTLE_S``."""
        deadline = clock.now() + SETTLE_S
        while not self._leases.has_every_share and clock.now() < deadline:
            time.sleep(EXCHANGE_S / 4)
            self._leases.exchange(database)

    def _abandon_start(self, database: Database) -> None:
        """Undo a start that failed."""
        with contextlib.suppress(StateUnavailable):
            self._journal.close(database)
            self._leases.release(database)
            self.presence.leave(database)
        self.presence.unlock()
        database.close()

    def _connect(self) -> Database:
        """Connect again after an outage and read everything again."""
        database = open_database(self._config.state.url, self._folder)
        try:
            self.presence.enter(database)
        except BaseException:
            database.close()
            raise
        self._ring.reread()
        self._leases.reread()
        return database

    def _emit_availability(self, available: bool) -> None:
        """Emit the event in the event loop, which may have ended before the thread does."""
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
                # A revocation must not wait for leases, and a new key must not be used without its limits: requests
                # with it are refused until a share is leased.
                self._limiter.publish()

        self._ring.refresh(database, limit)

    def _purge_usage(self, database: Database) -> None:
        days = self._config.state.usage_retention_days
        if days is not None:
            forget_before(database, days, clock.wall())
