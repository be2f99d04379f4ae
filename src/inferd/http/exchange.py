"""One HTTP/1.1 request and its answer: the answer's framing, and flow control in both directions.

The application has two interfaces to an exchange. ASGI's ``receive`` and ``send`` serve a request in a task of its own.
``answer``, ``begin``, ``write`` and ``finish`` serve it without a task, from callbacks. Knows HTTP semantics and
HTTP/1.1's framing (RFC 9110 and RFC 9112). Does not know routes or what the application serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final, Literal, Protocol
from urllib.parse import unquote

import httptools

from inferd import clock
from inferd.errors import InferdError
from inferd.http.asgi import Headers, Message, Scope
from inferd.http.upgrade import UpgradedConnection, UpgradeOffer

READ_AHEAD_BYTES: Final = 64 * 1024
"""Bytes of a body that are buffered for the application; beyond that the connection stops reading."""

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode("ascii")) for status in HTTPStatus
}
_BODILESS: Final = (204, 304)  # statuses without a body (RFC 9110, section 6.4.1)
Framing = Literal["none", "length", "close", "chunked"]  # how a client finds the end of the answer's body


class BadTarget(Exception):
    """The request's target is not a path (RFC 9112, section 3.2)."""


class Responder(Protocol):
    """The object that answers a connection's current request: an ``Exchange``, or one without an ASGI request.

    ``keep_alive``: the connection stays open after the answer. ``is_started``: some of the answer was sent.
    """

    keep_alive: bool
    is_started: bool

    @property
    def is_body_complete(self) -> bool:
        """Whether all of the request was read."""

    def disconnected(self) -> None:
        """The client has disconnected, or the server is closing the connection: no more of the answer is sent."""

    def writable_changed(self, is_writable: bool) -> None:
        """The transport's write buffer became full, or has room again."""


class ExchangeConnection(Protocol):
    """What an exchange requires of its connection. ``is_writable``: the write buffer has room."""

    is_writable: bool

    def write(self, data: bytes) -> None:
        """Write to the transport."""

    def abort(self) -> None:
        """Close the connection at once."""

    def exchange_over(self, exchange: Responder) -> None:
        """The answer is complete: continue with the next request."""

    def resume_reading_body(self) -> None:
        """The application has received all of the body that was buffered: read more of it from the socket."""

    def upgrade(self, exchange: Responder, upgraded: UpgradedConnection, serving: Coroutine[Any, Any, None]) -> None:
        """Pass the connection to ``upgraded`` and run ``serving`` as a task."""

    async def drained(self) -> None:
        """Wait until the write buffer has room or the connection is closing."""


class Exchange:
    """A request whose headers are complete, and the state of its answer."""

    __slots__ = (
        "_chunks",
        "_connection",
        "_framing",
        "_head",
        "_is_end_delivered",
        "_waiter",
        "body_error",
        "expects_continue",
        "headers",
        "http_version",
        "is_body_complete",
        "is_disconnected",
        "is_over",
        "is_started",
        "keep_alive",
        "may_upgrade",
        "method",
        "num_buffered",
        "on_disconnect",
        "on_writable",
        "raw_head",
        "target",
    )

    def __init__(
        self,
        connection: ExchangeConnection,
        method: str,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        http_version: str,
        *,
        keep_alive: bool,
    ) -> None:
        self._connection = connection
        self._chunks: list[bytes] = []
        self._is_end_delivered = False  # the application has received the end of the body
        self._head: bytes | None = None  # of the answer; it is sent together with the first bytes of the body
        self._framing: Framing = "none"
        self._waiter: asyncio.Future[None] | None = None
        self.method = method
        self.target = target
        self.headers = headers
        self.http_version = http_version
        self.keep_alive = keep_alive
        self.expects_continue = False
        self.may_upgrade = False  # the client offers to continue with WebSocket
        self.is_body_complete = False
        self.num_buffered = 0  # bytes of the body that the application has not received yet
        self.raw_head = b""  # the head's bytes without its empty line, if one read began with it and had all of it
        self.is_started = False  # some of the answer was sent
        self.is_over = False  # all of the answer was sent
        self.is_disconnected = False  # no more of the answer can be sent
        self.body_error: Callable[[], InferdError] | None = None  # makes the error, where the body cannot be read
        self.on_disconnect: Callable[[], None] | None = None  # called once, if the answer is not complete by then
        self.on_writable: Callable[[bool], None] | None = None  # called when ``is_writable`` changes

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
        if self.on_disconnect is not None and not self.is_over:
            self.on_disconnect()

    def writable_changed(self, is_writable: bool) -> None:
        if self.on_writable is not None:
            self.on_writable(is_writable)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the request ------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Bytes of the body according to Content-Length; 0 where there is no such header."""
        for name, value in self.headers:
            if name == b"content-length":
                digits = value.strip()
                return int(digits) if digits.isdigit() else 0
        return 0

    @property
    def path(self) -> str:
        """The decoded path of the request's target. Raises BadTarget."""
        return _split(self.target)[0]

    def whole_body(self) -> bytes:
        """All of a complete body. ``receive`` still returns it."""
        assert self.is_body_complete, "the body has not arrived yet"
        chunks = self._chunks
        if len(chunks) == 1:
            return chunks[0]
        body = b"".join(chunks)
        self._chunks = [body]
        return body

    def take_body(self) -> None:
        """Drop the body, after it was used: ``receive`` no longer returns it."""
        self._is_end_delivered = True
        self._chunks = []

    def scope(self) -> Scope:
        """ASGI's connection scope of the request. Raises BadTarget."""
        path, raw_path, query = _split(self.target)
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": self.http_version,
            "method": self.method,
            "scheme": "http",
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": self.headers,
            "inferd.offer": UpgradeOffer(self._upgrade, query.decode("latin-1")) if self.may_upgrade else None,
        }

    def _upgrade(self, upgraded: UpgradedConnection, serving: Coroutine[Any, Any, None]) -> None:
        if self.is_disconnected:
            serving.close()
            raise BrokenPipeError
        self.is_started = self.is_over = True
        self._connection.upgrade(self, upgraded, serving)

    async def receive(self) -> Message:
        """ASGI: wait for the next part of the body, or, after its end, for the disconnect or the end of the answer.

        Raises the error of ``fail_body``. Sends ``100 Continue`` first, if the client waits for it (RFC 9110, section
        10.1.1).
        """
        if self.expects_continue and not self.is_body_complete and not self.is_started:
            self.expects_continue = False
            self._connection.write(_CONTINUE)
        while True:
            if self._chunks or (self.is_body_complete and not self._is_end_delivered):
                data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
                self._chunks = []
                self.num_buffered = 0
                self._is_end_delivered = self.is_body_complete
                if not self.is_body_complete:
                    self._connection.resume_reading_body()
                return {"type": "http.request", "body": data, "more_body": not self.is_body_complete}
            if self.is_disconnected or self.is_over:
                return {"type": "http.disconnect"}
            if self.body_error is not None:
                raise self.body_error()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    # -- the answer -------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """ASGI: send a part of the answer. Waits while the write buffer is full. Does nothing after a disconnect."""
        if self.is_disconnected:
            return
        if message["type"] == "http.response.start":
            length: int | None = None
            headers: list[tuple[bytes, bytes]] = []
            for name, value in message.get("headers", ()):
                if name == b"content-length":
                    length = int(value)
                else:
                    headers.append((name, value))
            self.begin(message["status"], headers, length)
            return
        data: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        if data:
            self.write(data, last=not more)
        elif not more:
            self.finish()
        if more and not self._connection.is_writable:
            await self._connection.drained()

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete answer."""
        self.begin(status, headers, len(body))
        self.write(body, last=True)

    def continue_chunked(self) -> None:
        """Continue an answer whose head with ``Transfer-Encoding: chunked`` was sent by another object."""
        self._framing = "chunked"
        self.is_started = True

    def begin(self, status: int, headers: Headers | list[tuple[bytes, bytes]], length: int | None) -> None:
        """Make the answer's head. It is sent together with the first bytes of the body.

        ``length``: bytes of the body, or None where it is not known yet. The body is then sent in chunks, or, to a
        client of HTTP/1.0, until the connection closes (RFC 9112, section 6.3).
        """
        assert self._head is None, "an answer has one head"
        assert not self.is_started, "an answer begins once"
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        for name, value in headers:
            if name == b"connection" and value == b"close":
                self.keep_alive = False
                continue
            lines.append(b"%b: %b\r\n" % (name, value))
        if status in _BODILESS:
            self._framing = "none"
        elif length is not None:
            lines.append(b"content-length: %d\r\n" % length)
            self._framing = "none" if self.method == "HEAD" else "length"
        elif self.http_version == "1.0":
            self.keep_alive = False
            self._framing = "close"
        else:
            lines.append(b"transfer-encoding: chunked\r\n")
            self._framing = "none" if self.method == "HEAD" else "chunked"
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(date_line())
        self._head = b"".join(lines)

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
        head = self._head
        if head is not None:
            self._head = None
            out = head + out
        self.is_started = True
        if out:
            self._connection.write(out)
        if last:
            self._finish()

    def finish(self) -> None:
        """End the body."""
        if self.is_disconnected or self.is_over:
            return
        out = b"0\r\n\r\n" if self._framing == "chunked" else b""
        if self._head is not None:
            out, self._head = self._head + out, None
        self.is_started = True
        if out:
            self._connection.write(out)
        self._finish()

    @property
    def has_begun(self) -> bool:
        """Whether the answer's head was made, sent or not."""
        return self.is_started or self._head is not None

    def cut(self) -> None:
        """Abort the connection within the answer. The client sees that the answer is incomplete."""
        if not self.is_disconnected:
            self._connection.abort()

    def _finish(self) -> None:
        self.is_over = True
        self._wake()
        self._connection.exchange_over(self)

    @property
    def is_writable(self) -> bool:
        """Whether the connection's write buffer has room."""
        return self._connection.is_writable


_targets: dict[bytes, tuple[str, bytes, bytes]] = {}
_MAX_TARGETS = 256


def _split(target: bytes) -> tuple[str, bytes, bytes]:
    """The decoded path, the path and the query of a request's target. Short targets are cached. Raises BadTarget."""
    known = _targets.get(target)
    if known is not None:
        return known
    if target == b"*":
        return "*", target, b""
    try:
        url = httptools.parse_url(target)
        raw_path: bytes = url.path or b"/"
        path = raw_path.decode("ascii")
    except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
        raise BadTarget from None
    if "%" in path:
        path = unquote(path)
    parts = (path, raw_path, url.query or b"")
    if len(_targets) < _MAX_TARGETS and len(target) <= 64 and not parts[2]:
        _targets[target] = parts
    return parts


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
