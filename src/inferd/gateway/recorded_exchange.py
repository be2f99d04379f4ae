"""An exchange without a connection, whose answer is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from inferd.http.exchange import Exchange, Headers
from inferd.http.head import RequestHead
from inferd.http.upgrade import UpgradedConnection


class RecordedExchange(Exchange):
    """A request without a connection, whose answer is recorded. ``ended`` is called once, with its end. ``take`` gets
    every piece of a streamed answer, which is not recorded then."""

    def __init__(
        self,
        ended: Callable[[], None],
        head: RequestHead,
        body: bytes,
        take: Callable[[bytes], None] | None = None,
    ) -> None:
        super().__init__(_NoConnection(), head, keep_alive=False, body=body)
        self._ended: Callable[[], None] | None = ended
        self._take = take
        self._is_stream = False
        self.status = 0
        self.headers: Headers | list[tuple[bytes, bytes]] = ()
        self.parts: list[bytes] = []

    def begin(self, status: int, headers: Headers | list[tuple[bytes, bytes]], length: int | None) -> None:
        self.status = status
        self.headers = headers
        self._is_stream = length is None
        self.is_started = True

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        self.begin(status, headers, len(body))
        self.write(body, last=True)

    def write(self, data: bytes, *, last: bool = False) -> None:
        if not self.is_disconnected and not self.is_over:
            if self._is_stream and self._take is not None:
                self._take(data)
            else:
                self.parts.append(data)
            if last:
                self.finish()

    def finish(self) -> None:
        if not self.is_disconnected and not self.is_over:
            self.is_over = True
            self._end()

    def cut(self) -> None:
        self.disconnected()

    def disconnected(self) -> None:
        super().disconnected()
        self._end()

    def _end(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()


class _NoConnection:
    """Replaces the connection of a client that reads everything."""

    is_writable = True
    peer = ""

    def write(self, data: bytes) -> None:
        """Discard the bytes: the answer is recorded."""

    def abort(self) -> None:
        """Nothing is open."""

    def exchange_over(self, exchange: Exchange) -> None:
        """No request follows."""

    def peer_uid(self) -> int | None:
        """The client is not known."""
        return None

    def resume_reading_body(self) -> None:
        """The body is complete."""

    def upgrade(self, exchange: Exchange, upgraded: UpgradedConnection, serving: Coroutine[Any, Any, None]) -> None:
        raise AssertionError("no other protocol was offered")

    async def drained(self) -> None:
        """Return at once: there is always room."""

    def spawn(self, serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(serving)
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)
        return task


_tasks: set[asyncio.Task[None]] = set()
"""The loop itself holds tasks weakly."""
