"""Keeps copies until the gateway answers no call, so that they delay no answer; a copy waits a short time at most.

Knows the event loop and how many calls are open. Knows neither requests nor answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

PATIENCE_S: Final = 0.1
"""A copy waits so long for a moment without calls, and for its turn."""

T = TypeVar("T")


class Waiting(Generic[T]):
    """Items that wait, the oldest first. Lives in the event loop.

    While no call is open, one item begins in each turn of the loop, if it has room: a request that arrives meanwhile
    waits for one of them at most. ``begin`` also gets each item that has waited for ``PATIENCE_S``, with room or without.
    """

    def __init__(self, begin: Callable[[T], None], has_room: Callable[[T], bool]) -> None:
        self._begin = begin
        self._has_room = has_room
        self._num_calls = 0
        self._items: deque[tuple[T, float]] = deque()  # until when they wait, by the loop's clock
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._items)

    def call_began(self) -> None:
        """A call is open, until ``call_ended``."""
        self._num_calls += 1

    def call_ended(self) -> None:
        """The last byte of a call's answer was written, or its client left."""
        self._num_calls -= 1
        self.look()

    def add(self, item: T) -> None:
        """Begin the item in a turn of the loop to come."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_S
        self._items.append((item, until))
        if self._timer is None:
            self._timer = loop.call_at(until, self._check_patience)
        self.look()

    def look(self) -> None:
        """Begin the oldest item in the next turn of the loop, if it may: a call has ended, or there is room again."""
        if self._turn is None and self._may_begin():
            self._turn = asyncio.get_running_loop().call_soon(self._begin_next)

    def clear(self) -> None:
        """Begin none of them."""
        self._items.clear()
        for handle in (self._turn, self._timer):
            if handle is not None:
                handle.cancel()
        self._turn = self._timer = None

    def _may_begin(self) -> bool:
        return bool(self._items) and self._num_calls == 0 and self._has_room(self._items[0][0])

    def _begin_next(self) -> None:
        self._turn = None
        if self._may_begin():
            self._begin(self._items.popleft()[0])
            self.look()

    def _check_patience(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._items and self._items[0][1] <= loop.time():
            self._begin(self._items.popleft()[0])
        if self._items:
            self._timer = loop.call_at(self._items[0][1], self._check_patience)
