"""The exchange of the router's hints with the other gateways of the database, away from the path of requests.

It runs while the database has other gateways. Without them, or without the database, each gateway finds out by itself
what hints would have told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

import msgspec

from inferd.errors import StateUnavailable
from inferd.router.hints import Hints
from inferd.router.router import Router
from inferd.state.group import Group
from inferd.state.hints import HintTable

EXCHANGE_S: Final = 1.0

_log = logging.getLogger("inferd.app")


class HintExchange:
    """The exchange between one router and the gateways of its group."""

    def __init__(self, router: Router, table: HintTable, group: Group) -> None:
        self._router = router
        self._table = table
        self._group = group
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Hints)
        self._unreadable: set[str] = set()

    async def keep(self) -> None:
        """Exchange hints until the task is cancelled."""
        while True:
            await asyncio.sleep(EXCHANGE_S)
            if len(self._group.reports) > 1:
                with contextlib.suppress(StateUnavailable):  # the state thread has logged it
                    await self.exchange()

    async def exchange(self) -> None:
        """Tell the other gateways, and hear them. Raises StateUnavailable."""
        hints = self._router.hints()
        for heard in await self._table.exchange(self._encoder.encode(hints) if hints else b""):
            try:
                told = self._decoder.decode(heard.hints)
            except msgspec.MsgspecError as error:
                if heard.gateway not in self._unreadable:
                    _log.warning("the hints of gateway %s cannot be read, and are left out: %s", heard.gateway, error)
                self._unreadable.add(heard.gateway)
                continue
            self._router.adopt_hints(heard.gateway, told)
            await asyncio.sleep(0)  # a turn of the loop for requests between two gateways
