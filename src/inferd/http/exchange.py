"""One request on a connection, and its answer: framing on the way out, flow control both ways.

Two ways lead from here into the application: ASGI's ``receive`` and ``send``, for a task per request; and
``answer``, ``begin``, ``write``, ``finish``, for what is forwarded without one. Knows HTTP/1.1 (RFC 9110,
RFC 9112), nothing of paths or what is served.
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
from inferd.http.upgrade import Offer, Successor

READ_AHEAD_BYTES: Final = 64 * 1024

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode("ascii")) for status in HTTPStatus
}
_BODILESS: Final = (204, 304)
Framing = Literal["none", "length", "close", "chunked"]  # how the end of the answer's body is told


class BadTarget(Exception):
    """The request's target is no path."""


class Serving(Protocol):
    """What a connection is busy with."""

    keep_alive: bool
    is_started: bool

    @property
    def is_body_complete(self) -> bool: ...
    def leave(self) -> None:
        """The client is gone, or the connection is given up."""

    def room(self, is_writable: bool) -> None:
        """Whether there is room to write has changed."""


class Line(Protocol):
    """The connection, as an exchange sees it."""

    is_writable: bool

    def write(self, data: bytes) -> None: ...
    def abort(self) -> None: ...
    def exchange_over(self, exchange: Serving) -> None: ...
    def wants_body(self) -> None:
        """The body that was read ahead is used up: read on."""

    def hand_over(self, exchange: Serving, successor: Successor, serving: Coroutine[Any, Any, None]) -> None:
        """The connection is another's from now on."""

    async def drained(self) -> None:
        """Wait until there is room to write, or nobody to write to."""


class Exchange:
    """A request whose headers are complete, and the state of its answer."""

    __slots__ = (
        "_chunks",
        "_framing",
        "_given",
        "_head",
        "_line",
        "_waiter",
        "expects_continue",
        "has_left",
        "headers",
        "http_version",
        "is_body_complete",
        "is_over",
        "is_started",
        "keep_alive",
        "may_hand_over",
        "method",
        "num_buffered",
        "on_leave",
        "on_room",
        "raw_head",
        "spoiled",
        "target",
    )

    def __init__(
        self,
        line: Line,
        method: str,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        http_version: str,
        *,
        keep_alive: bool,
    ) -> None:
        self._line = line
        self._chunks: list[bytes] = []
        self._given = False  # the end of the body was told
        self._head: bytes | None = None  # of the answer, until its first bytes go out with it
        self._framing: Framing = "none"
        self._waiter: asyncio.Future[None] | None = None
        self.method = method
        self.target = target
        self.headers = headers
        self.http_version = http_version
        self.keep_alive = keep_alive
        self.expects_continue = False
        self.may_hand_over = False  # the client offers to go on in another protocol
        self.is_body_complete = False
        self.num_buffered = 0
        self.raw_head = b""  # as it came, where it came alone and in one piece; without the empty line
        self.is_started = False  # some of the answer was sent
        self.is_over = False  # all of it was
        self.has_left = False
        self.spoiled: Callable[[], InferdError] | None = None  # why the body will never be complete
        self.on_leave: Callable[[], None] | None = None  # the client is gone
        self.on_room: Callable[[bool], None] | None = None  # whether there is room to write has changed

    # -- the connection's side --------------------------------------------------------------

    def put_body(self, data: bytes) -> None:
        self._chunks.append(data)
        self.num_buffered += len(data)
        self._wake()

    def end_body(self) -> None:
        self.is_body_complete = True
        self._wake()

    def spoil(self, error: Callable[[], InferdError]) -> None:
        """The rest of the body cannot be read: ``receive`` raises the error, unless the answer needs no body."""
        self.spoiled = error
        self.keep_alive = False
        self._wake()

    def leave(self) -> None:
        """The client is gone, or the connection is given up."""
        if self.has_left:
            return
        self.has_left = True
        self._wake()
        if self.on_leave is not None and not self.is_over:
            self.on_leave()

    def room(self, is_writable: bool) -> None:
        if self.on_room is not None:
            self.on_room(is_writable)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the request ------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Bytes of the body, as its headers tell it; 0: they do not."""
        for name, value in self.headers:
            if name == b"content-length":
                digits = value.strip()
                return int(digits) if digits.isdigit() else 0
        return 0

    @property
    def path(self) -> str:
        """Raises BadTarget."""
        return _split(self.target)[0]

    def whole_body(self) -> bytes:
        """All of a body that is complete; it can still be received."""
        assert self.is_body_complete, "the body has not arrived yet"
        chunks = self._chunks
        if len(chunks) == 1:
            return chunks[0]
        body = b"".join(chunks)
        self._chunks = [body]
        return body

    def take_body(self) -> None:
        """The body was used: it cannot be received any more."""
        self._given = True
        self._chunks = []

    def scope(self) -> Scope:
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
            "inferd.offer": Offer(self._hand_over, query.decode("latin-1")) if self.may_hand_over else None,
        }

    def _hand_over(self, successor: Successor, serving: Coroutine[Any, Any, None]) -> None:
        if self.has_left:
            serving.close()
            raise BrokenPipeError
        self.is_started = self.is_over = True
        self._line.hand_over(self, successor, serving)

    async def receive(self) -> Message:
        """ASGI: the next part of the body; after its end nothing, until the client leaves or all is said.

        Raises the error that ``spoil`` was given.
        """
        if self.expects_continue and not self.is_body_complete and not self.is_started:
            self.expects_continue = False
            self._line.write(_CONTINUE)
        while True:
            if self._chunks or (self.is_body_complete and not self._given):
                data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
                self._chunks = []
                self.num_buffered = 0
                self._given = self.is_body_complete
                if not self.is_body_complete:
                    self._line.wants_body()
                return {"type": "http.request", "body": data, "more_body": not self.is_body_complete}
            if self.has_left or self.is_over:
                return {"type": "http.disconnect"}
            if self.spoiled is not None:
                raise self.spoiled()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    # -- the answer -------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """ASGI: a part of the answer; waits while the client takes none."""
        if self.has_left:
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
        if more and not self._line.is_writable:
            await self._line.drained()

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """A complete answer in one piece."""
        self.begin(status, headers, len(body))
        self.write(body, last=True)

    def go_on(self) -> None:
        """The head of a stream was sent, and maybe some of its body."""
        self._framing = "chunked"
        self.is_started = True

    def begin(self, status: int, headers: Headers | list[tuple[bytes, bytes]], length: int | None) -> None:
        """The head; it goes out with the first bytes of the body. ``length``: None where it is not known."""
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
        """Some of the body, never nothing; ``last``: and there is no more."""
        if self.has_left or self.is_over:
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
            self._line.write(out)
        if last:
            self._over()

    def finish(self) -> None:
        """There is no more."""
        if self.has_left or self.is_over:
            return
        out = b"0\r\n\r\n" if self._framing == "chunked" else b""
        if self._head is not None:
            out, self._head = self._head + out, None
        self.is_started = True
        if out:
            self._line.write(out)
        self._over()

    @property
    def has_begun(self) -> bool:
        """The answer's head is settled; it may not have been sent yet."""
        return self.is_started or self._head is not None

    def cut(self) -> None:
        """End the connection in the middle of the answer, so that the client sees that it is incomplete."""
        if not self.has_left:
            self._line.abort()

    def _over(self) -> None:
        self.is_over = True
        self._wake()
        self._line.exchange_over(self)

    @property
    def is_writable(self) -> bool:
        return self._line.is_writable


_targets: dict[bytes, tuple[str, bytes, bytes]] = {}
_MAX_TARGETS = 256


def _split(target: bytes) -> tuple[str, bytes, bytes]:
    """Decoded path, path and query of a request's target. The usual ones are remembered."""
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
    """The Date header and the empty line behind the head, made once a second."""
    global _date_line, _date_at  # noqa: PLW0603
    now = int(clock.wall())
    if now != _date_at:
        _date_at = now
        _date_line = b"date: %b\r\n\r\n" % formatdate(now, usegmt=True).encode("ascii")
    return _date_line
