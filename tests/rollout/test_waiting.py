"""Items that wait for a moment without calls: their order, one in a turn, and none for long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from inferd.rollout import waiting
from inferd.rollout.waiting import Waiting


class Begun:
    """What has begun, at most ``room`` at a time."""

    def __init__(self, room: int = 100) -> None:
        self.items: list[int] = []
        self.room = room
        self.waiting: Waiting[int] = Waiting(self.begin, lambda item: len(self.items) < self.room)

    def begin(self, item: int) -> None:
        self.items.append(item)


def run(test: Callable[[], Awaitable[None]], patience_s: float = 60.0) -> None:
    async def inside() -> None:
        await asyncio.wait_for(test(), 50)

    with mock.patch.object(waiting, "PATIENCE_S", patience_s):
        asyncio.run(inside())


def test_one_item_begins_in_each_turn_of_the_loop() -> None:
    async def test() -> None:
        begun = Begun()
        for item in range(3):
            begun.waiting.add(item)
        seen = []
        for _ in range(4):
            seen.append(len(begun.items))
            await asyncio.sleep(0)
        assert seen == [0, 1, 2, 3]
        assert begun.items == [0, 1, 2]

    run(test)


def test_without_room_an_item_waits_and_in_the_end_begins_all_the_same() -> None:
    async def test() -> None:
        begun = Begun(room=1)
        loop = asyncio.get_running_loop()
        at = loop.time()
        for item in range(3):
            begun.waiting.add(item)
        while len(begun.items) < 3:
            await asyncio.sleep(0.01)
        assert loop.time() - at >= 0.2
        assert len(begun.waiting) == 0

    run(test, patience_s=0.2)


def test_an_item_begins_as_soon_as_there_is_room() -> None:
    async def test() -> None:
        begun = Begun(room=1)
        for item in range(3):
            begun.waiting.add(item)
        for _ in range(3):
            await asyncio.sleep(0)
        assert begun.items == [0]
        begun.room = 2
        begun.waiting.look()
        for _ in range(3):
            await asyncio.sleep(0)
        assert begun.items == [0, 1]

    run(test)


def test_nothing_begins_after_clear() -> None:
    async def test() -> None:
        begun = Begun()
        begun.waiting.add(1)
        begun.waiting.clear()
        for _ in range(5):
            await asyncio.sleep(0)
        assert begun.items == []

    run(test, patience_s=0.0)


@given(st.lists(st.sampled_from(["add", "began", "ended", "turn"]), max_size=40))
def test_items_begin_in_their_order_and_none_beside_a_call(steps: list[str]) -> None:
    async def test() -> None:
        begun, num_calls, num_added = Begun(), 0, 0
        for step in steps:
            before = len(begun.items)
            match step:
                case "add":
                    begun.waiting.add(num_added)
                    num_added += 1
                case "began":
                    begun.waiting.call_began()
                    num_calls += 1
                case "ended" if num_calls:
                    begun.waiting.call_ended()
                    num_calls -= 1
                case "turn":
                    await asyncio.sleep(0)
            more = len(begun.items) - before
            assert more == 0 or (step == "turn" and num_calls == 0 and more == 1)
        for _ in range(num_calls):
            begun.waiting.call_ended()
        while len(begun.items) < num_added:
            await asyncio.sleep(0)
        assert begun.items == list(range(num_added))
        assert len(begun.waiting) == 0

    run(test)
