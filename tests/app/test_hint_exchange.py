"""What an exchange of hints counts, and emits once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from tests.router.virtual_loop import VirtualLoop

from inferd.app.hint_exchange import HintExchange
from inferd.events import Event, HintsExchanged
from inferd.observe.metrics import HINT_RESULTS
from inferd.router.hints import HintReport, Hints, ModelHints
from inferd.state.hints import Heard

TOLD = {"m": ModelHints({"http://a m": b"\0" * 24}, ["http://b m"])}


class Routing:
    """A router that has the servers of three of the four hints that it is told, and places two requests by each."""

    def __init__(self) -> None:
        self.own: Hints = TOLD
        self.num_placed = 0

    def hints(self) -> Hints:
        return self.own

    def adopt_hints(self, gateway: str, hints: Hints) -> int:
        self.num_placed += 2
        return 3

    def num_by_hints(self) -> int:
        return self.num_placed


class Table:
    def __init__(self) -> None:
        self.heard: list[Heard] = []

    async def exchange(self, hints: bytes) -> list[Heard]:
        return self.heard


def test_hints_are_counted_by_what_became_of_them() -> None:
    events: list[Event] = []
    table, router = Table(), Routing()
    fakes: Any = (router, table, None)
    exchange = HintExchange(fakes[0], fakes[1], fakes[2], events.append)

    async def scenario() -> None:
        table.heard = [Heard("one", msgspec.msgpack.encode(TOLD), num_missed=5), Heard("two", b"of a later version")]
        began = asyncio.get_running_loop().time()
        await exchange.exchange()
        assert asyncio.get_running_loop().time() == began, "other tasks get a turn, and no time"
        first = HintReport(sent=4, received=3, unknown=1, used=2, stale=5, unreadable=1)
        assert exchange.report == first
        assert events == [HintsExchanged(counts=msgspec.structs.asdict(first))]
        router.own, table.heard = {}, []
        await exchange.exchange()
        assert len(events) == 1, "an exchange of nothing is no news"
        router.own = TOLD
        await exchange.exchange()
        assert exchange.report == msgspec.structs.replace(first, sent=8)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scenario())


def test_every_count_of_the_report_is_a_result_of_the_metric() -> None:
    assert tuple(field.name for field in msgspec.structs.fields(HintReport)) == HINT_RESULTS
