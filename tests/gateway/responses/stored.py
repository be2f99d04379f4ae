"""A gateway that stores responses in a database of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gateway.fakes import FakeDoor, FakeRouter, Running, running

from inferd.config.server import StoredConfig
from inferd.errors import InferdError
from inferd.gateway.runs import Runs
from inferd.state.open import open_database
from inferd.state.presence import LockedPresence
from inferd.state.thread import StateThread
from inferd.stored.port import StoredResponse
from inferd.stored.store import DurableStore
from inferd.tenancy.principal import Principal

KEYS = {"sk-a": Principal(key_id="a", tenant="team-a"), "sk-b": Principal(key_id="b", tenant="team-b")}


class Store(DurableStore):
    """Refuses to store while ``refusal`` is set."""

    refusal: InferdError | None = None

    async def put(self, response: StoredResponse) -> None:
        if self.refusal is not None:
            raise self.refusal
        await super().put(response)


@contextlib.contextmanager
def storing(folder: Path, **app: Any) -> Iterator[tuple[Running, Store]]:
    """``app``: further arguments of ``create_app``."""
    url = f"sqlite:///{folder / 'state.db'}"
    presence = LockedPresence(folder / "users")
    state = StateThread(lambda: open_database(url, folder))
    store = Store(state, presence, StoredConfig())
    store.schedule()
    database = open_database(url, folder)
    presence.enter(database)
    state.run_at_close(presence.leave)
    state.start(database)
    door = FakeDoor(KEYS)
    runs = Runs(store, door, lambda: False)
    try:
        with running(FakeRouter("tiny"), door=door, stored=store, runs=runs, **app) as server:
            keeping = asyncio.run_coroutine_threadsafe(runs.keep(server.app), server.loop)
            try:
                yield server, store
            finally:
                keeping.cancel()
    finally:
        state.close()
        presence.unlock()
