"""Reads the items of one request in a task: a sink that is an asynchronous iterator.

Waiting outputs of a worker are merged into one, so that a slow reader costs bounded memory. A relayed answer, and an
answer of several predictions, is buffered up to ``HIGH_WATER_BYTES``; then the request's replica is paused. The last
item is the one with ``end``. This module does not know queues or replicas.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from inferd.router.merging import MergedOutput, joined, joined_pieces
from inferd.types import End, Item, Output, Relay, Relayed, Request, Sink

HIGH_WATER_BYTES: Final = 64 * 1024

# Pieces of a relayed answer are joined when they are read, outputs of a worker when they arrive.
_Waiting: TypeAlias = Output | MergedOutput | list[Relayed]


class Handle(Protocol):
    """The methods of a submitted request that its sink calls (``ticket.Ticket``)."""

    @property
    def end(self) -> End | None:
        """The outcome and usage; None: the request has not ended."""
        ...

    def cancel(self) -> None:
        """The client has disconnected: stop computing. Idempotent. The end still comes."""

    def pause(self) -> None:
        """The reader is slow: pause the replica, where that is possible. Idempotent."""

    def resume(self) -> None:
        """Continue after ``pause``. Idempotent."""

    def when_over(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` once, when the request ends. Only for a request that has not ended."""


class Submitting(Protocol):
    """The part of the router that ``open_stream`` needs."""

    def submit(self, request: Request, sink: Sink, relay: Relay | None = None) -> Handle:
        """Submit a request whose items ``sink`` gets."""
        ...


class Stream:
    """Reads one request's items in a task."""

    __slots__ = ("_held_bytes", "_is_over", "_waiter", "_waiting", "request")

    request: Handle

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()  # in the order of arrival
        self._held_bytes = 0  # of the waiting relayed items and predictions
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False  # the last item was delivered

    def deliver(self, item: Item) -> None:
        """Buffer an item for the reader."""
        self._is_over = item.end is not None
        last = self._waiting[-1] if self._waiting else None
        if isinstance(item, Relayed):
            if isinstance(last, list):
                last.append(item)
            else:
                self._waiting.append([item])
        elif last is None or isinstance(last, list) or _is_prediction(last) or _is_prediction(item):
            self._waiting.append(item)  # predictions are never merged
        else:
            self._waiting[-1] = joined(last, item)
        self._held_bytes += _size(item)
        if self._held_bytes > HIGH_WATER_BYTES and not self._is_over:
            self.request.pause()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def put_back(self, item: Item) -> None:
        """Return the item that was read last; it is read again before the waiting items."""
        self._waiting.appendleft([item] if isinstance(item, Relayed) else item)
        self._held_bytes += _size(item)

    def close(self) -> None:
        """Cancel the request if it has not ended, and discard the waiting items. Idempotent."""
        if not self._is_over:
            self._waiting.clear()
            self._held_bytes = 0
        self.request.cancel()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Item:
        while (item := self._next()) is None:
            if self._is_over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return item

    def _next(self) -> Item | None:
        """The next waiting item; None: there is none."""
        if not self._waiting:
            return None
        waiting = self._waiting.popleft()
        if isinstance(waiting, MergedOutput):
            return waiting.output()
        item = waiting if isinstance(waiting, Output) else joined_pieces(waiting)
        if num_bytes := _size(item):
            self._held_bytes -= num_bytes
            if self._held_bytes == 0:
                self.request.resume()
        return item


def open_stream(router: Submitting, request: Request, relay: Relay | None = None) -> Stream:
    """Submit a request whose items a task reads. Raises what ``submit`` raises."""
    stream = Stream()
    stream.request = router.submit(request, stream, relay)
    return stream


def _is_prediction(item: Output | MergedOutput) -> bool:
    return isinstance(item, Output) and item.prediction is not None


def _size(item: Item) -> int:
    """The bytes of a piece of a relayed answer or of a prediction."""
    if isinstance(item, Relayed):
        return len(item.data)
    return len(item.prediction.body) if item.prediction is not None else 0


if TYPE_CHECKING:
    _: type[Sink] = Stream
