"""A server that leaves waits for its work until a second Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from inferd.app.departure import Departure


@pytest.fixture
def _handlers() -> Iterator[None]:
    """A process that leaves ignores these signals for good; the test's process does not leave."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
def test_what_a_departure_waits_for_is_cancelled_by_a_second_interrupt_only() -> None:
    async def scenario() -> None:
        departure = Departure()
        was_cancelled = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                was_cancelled.set()
                raise

        departure.handle_signals()
        waiting = asyncio.ensure_future(departure.wait_unless_interrupted(work()))
        signal.raise_signal(signal.SIGINT)
        await asyncio.wait_for(departure.leave.wait(), 10)
        assert not waiting.done()
        signal.raise_signal(signal.SIGINT)
        await asyncio.wait_for(waiting, 10)
        assert was_cancelled.is_set()
        departure.release_signals()

    asyncio.run(scenario())


def test_a_departure_waits_until_its_work_is_done() -> None:
    async def scenario() -> list[str]:
        done: list[str] = []

        async def work() -> None:
            await asyncio.sleep(0.05)
            done.append("work")

        await Departure().wait_unless_interrupted(work())
        return done

    assert asyncio.run(scenario()) == ["work"]
