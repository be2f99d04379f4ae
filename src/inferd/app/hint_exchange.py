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
from inferd.events import Emit, HintsExchanged
from inferd.router.hints import HintReport, Hints, num_hints
from inferd.router.router import Router
from inferd.state.group import Group
from inferd.state.hints import HintTable

EXCHANGE_S: Final = 1.0

_log = logging.getLogger("inferd.app")


class HintExchange:
    """The exchange between one router and the gateways of its group. ``report``: what came of it so far."""

    def __init__(self, router: Router, table: HintTable, group: Group, emit: Emit) -> None:
        self._router = router
        self._table = table
        self._group = group
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Hints)
        self._unreadable: set[str] = set()
        self._emit = emit
        self._num_by_hints = 0
        self.report = HintReport()

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
        received = unknown = stale = unreadable = 0
        for heard in await self._table.exchange(self._encoder.encode(hints) if hints else b""):
            stale += heard.num_missed
            try:
                told = self._decoder.decode(heard.hints)
            except msgspec.MsgspecError as error:
                if heard.gateway not in self._unreadable:
                    _log.warning("the hints of gateway %s cannot be read, and are left out: %s", heard.gateway, error)
                self._unreadable.add(heard.gateway)
                unreadable += 1
                continue
            adopted = self._router.adopt_hints(heard.gateway, told)
            received += adopted
            unknown += num_hints(told) - adopted
            await asyncio.sleep(0)  # a turn of the loop for requests between two gateways
        self._count(
            HintReport(
                sent=num_hints(hints),
                received=received,
                unknown=unknown,
                used=self._newly_used(),
                stale=stale,
                unreadable=unreadable,
            )
        )

    def _newly_used(self) -> int:
        """Requests that hints have placed since the last exchange. A model that was removed takes its number along."""
        before, self._num_by_hints = self._num_by_hints, self._router.num_by_hints()
        return max(0, self._num_by_hints - before)

    def _count(self, news: HintReport) -> None:
        """Add to the report, and emit what is new."""
        counts = msgspec.structs.asdict(news)
        if any(counts.values()):
            whole = msgspec.structs.asdict(self.report)
            self.report = HintReport(**{name: whole[name] + count for name, count in counts.items()})
            self._emit(HintsExchanged(counts=counts))
