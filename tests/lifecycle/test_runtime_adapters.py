"""Adapters that operators load: one desired state for all servers of a database, over restarts and failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from inferd.config import Config, StateConfig
from inferd.errors import InvalidRequest
from inferd.lifecycle.adapters import AdapterRow, Rows, RuntimeAdapters
from inferd.tenancy.control import Control


class Server:
    """What its replicas were told last."""

    def __init__(self, control: Control) -> None:
        self.loaded: Mapping[str, AdapterRow] = {}
        self.runtime = RuntimeAdapters(control.state, self._adopt)

    async def _adopt(self, rows: Rows) -> None:
        self.loaded = dict(rows)


@asynccontextmanager
async def server(folder: Path, name: str) -> AsyncIterator[Server]:
    url = f"sqlite://{folder / 'state.db'}"
    control = Control(Config(state=StateConfig(data_dir=str(folder / name), url=url)))
    await control.start()
    try:
        made = Server(control)
        await made._adopt(await made.runtime.read())
        yield made
    finally:
        await control.close()


def nothing_failed() -> None:
    """Every replica could load it."""


def failed() -> None:
    raise InvalidRequest("It cannot be loaded.")


def test_rows_reach_other_servers_and_later_ones(tmp_path: Path) -> None:
    async def run() -> None:
        row, other = AdapterRow("x", "chat", "/a"), AdapterRow("y", "chat", "org/y")
        async with server(tmp_path, "one") as one, server(tmp_path, "two") as two:
            await one.runtime.put(row, nothing_failed)
            await one.runtime.put(other, nothing_failed)
            assert two.loaded == {}
            await two.runtime.look()
            assert one.loaded == two.loaded == {"x": row, "y": other}
            await two.runtime.put(row._replace(source="/b"), nothing_failed)
            await two.runtime.remove("y")
            await one.runtime.look()
            assert one.loaded == {"x": row._replace(source="/b")}
        async with server(tmp_path, "three") as later:
            assert later.loaded == {"x": row._replace(source="/b")}

    asyncio.run(run())


def test_the_same_row_again_is_news_to_others_whose_files_may_have_changed(tmp_path: Path) -> None:
    async def run() -> None:
        row = AdapterRow("x", "chat", "/a")
        async with server(tmp_path, "one") as one, server(tmp_path, "two") as two:
            await one.runtime.put(row, nothing_failed)
            await two.runtime.look()
            two.loaded = {}
            await two.runtime.look()
            assert two.loaded == {}, "nothing changed"
            await one.runtime.put(row, nothing_failed)
            await two.runtime.look()
            assert two.loaded == {"x": row}

    asyncio.run(run())


def test_what_fails_here_is_no_row_and_what_was_loaded_is_loaded_again(tmp_path: Path) -> None:
    async def run() -> None:
        row = AdapterRow("x", "chat", "/a")
        async with server(tmp_path, "one") as one, server(tmp_path, "two") as two:
            await one.runtime.put(row, nothing_failed)
            with pytest.raises(InvalidRequest):
                await one.runtime.put(row._replace(source="/bad"), failed)
            with pytest.raises(InvalidRequest):
                await one.runtime.put(AdapterRow("y", "chat", "/bad"), failed)
            await two.runtime.look()
            assert one.loaded == two.loaded == {"x": row}

    asyncio.run(run())
