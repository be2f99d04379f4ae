"""One HTTP/1.1 request and its answer: the answer's framing, and flow control in both directions.

The application reads the body with ``take_body`` or ``read`` and answers with ``answer``, or with ``begin``, ``write``
and ``finish``. Knows HTTP semantics and HTTP/1.1's framing (RFC 9110 and RFC 9112). Does not know routes or what the
application serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final, Literal, Protocol

from inferd import clock
from inferd.errors import InferdError
from inferd.http.head import BadTarget, RequestHead
from inferd.http.upgrade import UpgradedConnection, UpgradeOffer

__all__ = ["READ_AHEAD_BYTES", "BadTarget", "Channel", "ClientLeft", "Exchange", "Headers", "Listener"]

Headers = tuple[tuple[bytes, bytes], ...]

READ_AHEAD_BYTES: Final = 64 * 1024
"""Bytes of a body that are buffered for the application; beyond that the connection stops reading."""

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode("ascii")) for status in HTTPStatus
}
_header_line: Final = b"%b: %b\r\n".__mod__
_CLOSE: Final = (b"connection", b"close")
_BODILESS: Final = (204, 304)  # statuses without a body (RFC 9110, section 6.4.1)
Framing = Literal["none", "length", "close", "chunked"]  # how a client finds the end of the answer's body


class ClientLeft(Exception):
    """The client closed the connection before its request was complete."""


class Listener(Protocol):
    """The application's part that a request in progress calls."""

    def disconnected(self) -> None:
        """The client has disconnected, or the server is closing the connection: no more of the answer is sent."""

    def writable_changed(self, is_writable: bool) -> None:
        """The transport's write buffer became full, or has room again."""


class Channel(Protocol):
    """What an exchange requires of its connection. ``is_writable``: the write buffer has room."""

    is_writable: bool

    @property
    def peer(self) -> str:
        """The client's address without its port; empty for a Unix socket."""
        ...

    def write(self, data: bytes) -> None:
        """Write to the transport."""

    def peer_uid(self) -> int | None:
        """The user of the process at the other end of a Unix socket; None: it is not known."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""

    def exchange_over(self, exchange: Exchange) -> None:
        """The answer is complete: continue with the next request."""

    def resume_reading_body(self) -> None:
        """The application has received all of the body that was buffered: read more of it from the socket."""

    def upgrade(self, exchange: Exchange, upgraded: UpgradedConnection, serving: Coroutine[Any, Any, None]) -> None:
        """Pass the connection to ``upgraded`` and run ``serving`` as a task."""

    async def drained(self) -> None:
        """Wait until the write buffer has room, or the connection is closed."""

    def spawn(self, serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Serve in a task that the server waits for when it stops."""
        ...


class Exchange:
    """A request whose headers are complete, and the state of its answer."""

    # Class attributes are the defaults, because most requests change few of these.
    _answer_head: bytes | None = None  # until it is sent with the first bytes of the body
    _framing: Framing = "none"
    _is_given = False  # the end of the body was returned by ``read``
    _waiter: asyncio.Future[None] | None = None
    expects_continue = False
    is_disconnected = False
    is_over = False  # all of the answer was sent
    is_started = False  # some of the answer was sent
    may_upgrade = False  # the client offers to upgrade the connection
    num_buffered = 0
    body_error: Callable[[], InferdError] | None = None  # why the body will never be complete

    def __init__(self, channel: Channel, head: RequestHead, *, keep_alive: bool, body: bytes | None = None) -> None:
        """``body``: the complete body, if it has arrived; else ``put_body`` adds it."""
        self._channel = channel
        self._chunks: list[bytes] = [] if body is None else [body]
        self.head = head
        self.keep_alive = keep_alive
        self.listener: Listener | None = None
        self.is_body_complete = body is not None

    # -- called by the connection -----------------------------------------------------------

    def put_body(self, data: bytes) -> None:
        """Add a part of the body."""
        self._chunks.append(data)
        self.num_buffered += len(data)
        self._wake()

    def end_body(self) -> None:
        """The body is complete."""
        self.is_body_complete = True
        self._wake()

    def fail_body(self, error: Callable[[], InferdError]) -> None:
        """The rest of the body cannot be read: ``receive`` raises what ``error`` returns, and the connection closes
        after the answer."""
        self.body_error = error
        self.keep_alive = False
        self._wake()

    def disconnected(self) -> None:
        """The client has disconnected, or the server is closing the connection. Idempotent."""
        if self.is_disconnected:
            return
        self.is_disconnected = True
        self._wake()
        if self.listener is not None and not self.is_over:
            self.listener.disconnected()

    def writable_changed(self, is_writable: bool) -> None:
        if self.listener is not None:
            self.listener.writable_changed(is_writable)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the request ------------------------------------------------------------------------

    @property
    def peer(self) -> str:
        """The client's address without its port; empty: it is not known."""
        return self._channel.peer

    @property
    def announced_length(self) -> int:
        """The length in the headers of a body that is not complete; 0: it is not known."""
        digits = (self.head.header(b"content-length") or b"").strip()
        return int(digits) if digits.isdigit() else 0

    @property
    def peer_uid(self) -> int | None:
        """The user of the client of a Unix socket; None: it is not known."""
        return self._channel.peer_uid()

    @property
    def offer(self) -> UpgradeOffer | None:
        """The client's offer to upgrade the connection; None: there is none."""
        return UpgradeOffer(self._upgrade, self.head.query) if self.may_upgrade else None

    def take_body(self) -> bytes:
        """The bytes of the body that have arrived and were not read. Nothing more can be read after this."""
        chunks, self._chunks = self._chunks, []
        self._is_given = True
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _upgrade(self, upgraded: UpgradedConnection, serving: Coroutine[Any, Any, None]) -> None:
        if self.is_disconnected:
            serving.close()
            raise BrokenPipeError
        self.is_started = self.is_over = True
        self._channel.upgrade(self, upgraded, serving)

    async def read(self) -> tuple[bytes, bool]:
        """The next part of the body, and whether it is the last one.

        Raises ClientLeft, and the error of ``fail_body``. Sends ``100 Continue`` first, if the client waits for it
        (RFC 9110, section 10.1.1).
        """
        if self.expects_continue and not self.is_body_complete and not self.is_started:
            self.expects_continue = False
            self._channel.write(_CONTINUE)
        while True:
            if self._chunks or (self.is_body_complete and not self._is_given):
                data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
                self._chunks = []
                self.num_buffered = 0
                self._is_given = self.is_body_complete
                if not self.is_body_complete:
                    self._channel.resume_reading_body()
                return data, self.is_body_complete
            if self.is_disconnected or self.is_over:
                raise ClientLeft
            if self.body_error is not None:
                raise self.body_error()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    # -- the answer -------------------------------------------------------------------------

    async def drained(self) -> None:
        """Wait while the write buffer is full."""
        if not self._channel.is_writable and not self.is_disconnected:
            await self._channel.drained()

    def spawn(self, serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._channel.spawn(serving)

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete answer."""
        head = self._head(status, headers, len(body))
        if not self.is_disconnected:
            self.is_started = True
            self._channel.write(head + body if self._framing == "length" else head)
            self._finish()

    def begin(self, status: int, headers: Headers | list[tuple[bytes, bytes]], length: int | None) -> None:
        """Make the answer's head. It is sent together with the first bytes of the body.

        ``length``: bytes of the body, or None where it is not known yet. The body is then sent in chunks, or, to a
        client of HTTP/1.0, until the connection closes (RFC 9112, section 6.3).
        """
        assert self._answer_head is None, "an answer has one head"
        self._answer_head = self._head(status, headers, length)

    def _head(self, status: int, headers: Headers | list[tuple[bytes, bytes]], length: int | None) -> bytes:
        assert not self.is_started, "an answer begins once"
        if _CLOSE in headers:
            self.keep_alive = False
            headers = [header for header in headers if header != _CLOSE]
        length_line, self._framing = b"", "none"
        if status in _BODILESS:
            pass
        elif length is not None:
            length_line = b"content-length: %d\r\n" % length
            self._framing = "length"
        elif self.head.http_version == "1.0":
            self.keep_alive = False
            self._framing = "close"
        else:
            length_line = b"transfer-encoding: chunked\r\n"
            self._framing = "chunked"
        if self.head.method == "HEAD" and self._framing != "close":
            self._framing = "none"
        return b"".join(
            (
                _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status,
                *map(_header_line, headers),
                length_line,
                b"" if self.keep_alive else b"connection: close\r\n",
                date_line(),
            )
        )

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Send ``data``, which is not empty, as a part of the body. ``last``: the body ends with it."""
        if self.is_disconnected or self.is_over:
            return
        framing = self._framing
        if framing == "chunked":
            out = (b"%x\r\n%b\r\n0\r\n\r\n" if last else b"%x\r\n%b\r\n") % (len(data), data)
        elif framing == "none":
            out = b""
        else:
            out = data
        head = self._answer_head
        if head is not None:
            self._answer_head = None
            out = head + out
        self.is_started = True
        if out:
            self._channel.write(out)
        if last:
            self._finish()

    def finish(self) -> None:
        """End the body."""
        if self.is_disconnected or self.is_over:
            return
        out = b"0\r\n\r\n" if self._framing == "chunked" else b""
        if self._answer_head is not None:
            out, self._answer_head = self._answer_head + out, None
        self.is_started = True
        if out:
            self._channel.write(out)
        self._finish()

    @property
    def has_begun(self) -> bool:
        """Whether the answer's head was made, sent or not."""
        return self.is_started or self._answer_head is not None

    def cut(self) -> None:
        """Abort the connection within the answer. The client sees that the answer is incomplete."""
        if not self.is_disconnected:
            self._channel.abort()

    def _finish(self) -> None:
        self.is_over = True
        if self._waiter is not None:
            self._wake()
        self._channel.exchange_over(self)

    @property
    def is_writable(self) -> bool:
        """Whether the connection's write buffer has room."""
        return self._channel.is_writable


_date_line = b""
_date_at = 0


def date_line() -> bytes:
    """The Date header (RFC 9110, section 6.6.1) and the empty line after the head. Made once a second."""
    global _date_line, _date_at  # noqa: PLW0603
    now = int(clock.wall())
    if now != _date_at:
        _date_at = now
        _date_line = b"date: %b\r\n\r\n" % formatdate(now, usegmt=True).encode("ascii")
    return _date_line
