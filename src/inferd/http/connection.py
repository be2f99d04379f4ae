"""One client's HTTP/1.1 connection: parsing within limits, requests in order, and time limits.

Knows HTTP/1.1's framing. Does not know what the application serves. A message that two programs could parse differently
is refused and ends the connection (RFC 9112, sections 2.2, 6.3 and 11.2).

An existing ASGI server is not used, because a task per request and ASGI's messages cost more than everything else that
a relayed request needs (``bench/gateway``). The parser is llhttp, through ``httptools``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol, cast

import httptools

from inferd import clock
from inferd.errors import InferdError, InvalidRequest
from inferd.http import cost
from inferd.http.exchange import READ_AHEAD_BYTES, BadTarget, Exchange
from inferd.http.head import MAX_CACHED_HEAD_BYTES, HeadCache, RequestHead
from inferd.http.limits import MAX_HEADER_BYTES, MAX_HEADERS
from inferd.http.stall import WriteStall
from inferd.http.upgrade import ClientConnection, UpgradedConnection, address_of

MAX_DISCARDED_BYTES: Final = 64 * 1024 * 1024
"""Bytes of a body that are read and discarded after its request was answered."""

SLICE_BYTES: Final = 4096
"""A read up to this size is parsed at once, a larger one in pieces. Between two pieces, parsing can stop."""

CHUNKS_BYTES: Final = 32 * 1024
"""The size of a piece where it is not known how many bytes of the body remain."""

REQUESTS_PER_TURN: Final = 64
"""Requests of one connection that begin in one turn of the event loop. The last piece may add a few more."""

# Limits on pipelining: requests, and bytes, that are read while an earlier request is answered. Reading has to go on
# to some extent, because a disconnect is only detected while reading.
PIPELINE_AHEAD: Final = 8
PIPELINE_AHEAD_BYTES: Final = 64 * 1024

WRITE_AHEAD_BYTES: Final = 64 * 1024
GATHER_BYTES: Final = 64 * 1024
"""A request with a body up to this size is passed to the application when the body is complete."""

GATHER_S: Final = 1.0
"""Seconds to wait for such a body. After them the application gets the request and waits for the body itself."""

_CLOSE = b"content-type: application/json\r\nconnection: close\r\ncontent-length: "

_log = logging.getLogger("inferd.http")


def _refusal(status: bytes, message: bytes, code: bytes, more: bytes = b"") -> bytes:
    kind = b"server_error" if status.startswith(b"5") else b"invalid_request_error"
    body = b'{"error":{"message":"%b","type":"%b","param":null,"code":"%b"}}' % (message, kind, code)
    return b"HTTP/1.1 " + status + b"\r\n" + more + _CLOSE + str(len(body)).encode() + b"\r\n\r\n" + body


_BAD_REQUEST = _refusal(b"400 Bad Request", b"This is not a valid HTTP/1.1 request.", b"invalid_http")
_HEADERS_TOO_LARGE = _refusal(
    b"431 Request Header Fields Too Large",
    b"The request line and headers are larger than 64 KiB; send less.",
    b"headers_too_large",
)
_TOO_MANY_HEADERS = _refusal(
    b"431 Request Header Fields Too Large",
    b"The request has more than %d headers; send fewer." % MAX_HEADERS,
    b"headers_too_large",
)
_HEADERS_TOO_SLOW = _refusal(
    b"408 Request Timeout", b"The request's headers did not arrive in time.", b"request_timeout"
)
_TOO_MUCH_WORK = _refusal(
    b"400 Bad Request",
    b"This connection sends too many tiny chunks or headers; send larger ones.",
    b"too_much_work",
)
_DEFECT = _refusal(
    b"500 Internal Server Error", b"The server met an internal error; the log has the details.", b"internal_error"
)
TOO_MANY_CONNECTIONS: Final = _refusal(
    b"503 Service Unavailable",
    b"The server has reached server.max_connections; try again in a second, or raise that setting.",
    b"too_many_connections",
    b"retry-after: 1\r\n",
)


class Phase(Enum):
    """What a connection waits for. A phase that waits for the client has a time limit (``Connection._limit_s``)."""

    READING_HEAD = "a request's head, of which some has arrived; or the first request of a new connection"
    GATHERING = "the rest of a small body, before the application gets the request"
    ANSWERING = "the application"
    DISCARDING = "the rest of a body whose request is answered already"
    IDLE = "the next request"
    CLOSING = "the write buffer, whose last bytes are being sent"


_READING_HEAD, _GATHERING, _ANSWERING, _DISCARDING, _IDLE, _CLOSING = Phase  # a member's lookup costs Python calls


class Parsing(Enum):
    """What happens to the bytes that are read."""

    ON = "they are parsed"
    UPGRADE_OFFERED = "they are kept: if the request is upgraded, they belong to the other protocol"
    PAUSED = "they are kept until this connection may begin more requests"
    ENDED = "they are discarded, because no request can follow"


_ON, _UPGRADE_OFFERED, _PAUSED, _ENDED = Parsing


def _malformed() -> InferdError:
    return InvalidRequest(
        "The request's body is no valid HTTP/1.1; send what its headers announce.", code="invalid_http"
    )


def _too_large() -> InferdError:
    return InvalidRequest(
        f"The request's body has over {MAX_HEADER_BYTES >> 10} KiB of chunk extensions or trailers; send less.",
        code="headers_too_large",
    )


def _too_much_work() -> InferdError:
    return InvalidRequest(
        "This connection sends too many tiny chunks or headers; send larger ones.",
        code="too_much_work",
    )


class Timeouts(NamedTuple):
    """Time limits for a client, in seconds."""

    header_s: float = 30.0  # for a request's head, from its first byte or from the beginning of the connection
    keep_alive_s: float = 75.0  # between two requests
    send_s: float = 60.0  # without reading a byte of its answer
    discard_s: float = 60.0  # for the rest of a body after its request was answered


class Application(Protocol):
    """Answers requests."""

    def serve(self, exchange: Exchange, /) -> None:
        """Answer a request, at once or in a task. Its body may be incomplete. Raises BadTarget."""

    def refuse(self, exchange: Exchange, error: InferdError, /) -> None:
        """Answer a request with ``error``: its body cannot be read, and ``serve`` did not get it. Raises BadTarget."""


class Server(Protocol):
    """What a connection requires of its server."""

    app: Application
    heads: HeadCache
    timeouts: Timeouts
    connections: set[ClientConnection]
    max_connections: int

    is_stopping: bool

    def spawn(self, serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``serving`` as a task."""

    def reject_connection(self, transport: asyncio.Transport) -> None:
        """Answer a connection beyond ``max_connections`` with status 503, and close it."""

    def connection_closed(self, connection: ClientConnection) -> None:
        """Forget a connection that is closed."""


class Connection(ClientConnection):
    """Serves the requests of one client in the order in which they arrive."""

    __slots__ = (
        "_ahead_bytes",
        "_at_boundary",
        "_body_read",
        "_budget",
        "_cost",
        "_cost_credit",
        "_current",
        "_discarded_bytes",
        "_drain_waiter",
        "_final_refusal",
        "_framing_bytes",
        "_gathering",
        "_header_bytes",
        "_headers",
        "_heads",
        "_in_headers",
        "_incoming",
        "_is_read_paused",
        "_is_starting",
        "_num_read",
        "_parser",
        "_parsing",
        "_phase",
        "_piece_bytes",
        "_queue",
        "_raw_head",
        "_server",
        "_since",
        "_stall",
        "_target",
        "_transport",
        "_unparsed",
        "is_writable",
        "write",
    )

    __deletable__ = ("_parser",)

    _transport: asyncio.Transport
    write: Callable[[bytes], None]

    def __init__(self, server: Server) -> None:
        self._server = server
        self._heads = server.heads
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._phase = _READING_HEAD
        self._since = clock.now()  # of the phase, where it has a time limit
        self._parsing = _ON
        # Of the request that is being read.
        self._at_boundary = True  # the last request that was read is complete, or there was none
        self._raw_head = b""  # as ``Exchange.raw_head``
        self._in_headers = True
        self._header_bytes = 0  # of its head, in pieces before the current one
        self._piece_bytes = 0  # of the piece that is being parsed
        self._body_read = 0  # bytes of its body so far
        self._framing_bytes = 0  # since the last byte of the body: chunk sizes, chunk extensions and trailers
        self._incoming: Exchange | None = None  # the request, after its head is complete
        self._discarded_bytes = 0
        # Of the current turn of the event loop.
        self._num_read = 0  # requests whose head is complete
        self._cost = self._cost_credit = 0  # in units of ``http.cost``
        self._budget = cost.CostBudget(self._since)
        # Requests that are complete or being read, in their order: the current one, then the queue.
        self._current: Exchange | None = None  # the one that is being answered
        self._queue: deque[Exchange] = deque()
        self._gathering: Exchange | None = None  # the first in the queue, if it waits for its body
        self._ahead_bytes = 0  # read while requests were waiting in the queue
        self._is_starting = False  # guards ``_start_next`` against recursion
        self._final_refusal = b""  # an error that is sent after the answers to all earlier requests
        # Flow control.
        self._is_read_paused = False
        self._unparsed: bytes | None = None  # bytes that were read and kept; None while ``_parsing`` is ON
        self._drain_waiter: asyncio.Future[None] | None = None
        self._stall = WriteStall()
        self.is_writable = True

    # -- called by the transport ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if len(self._server.connections) >= self._server.max_connections:
            self._server.reject_connection(self._transport)
            return
        self._transport.set_write_buffer_limits(WRITE_AHEAD_BYTES)
        self.write = self._transport.write
        self._server.connections.add(self)

    @property
    def peer(self) -> str:
        """The client's address without its port; empty for a Unix socket."""
        return address_of(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_requests()
        self._server.connection_closed(self)
        del self._parser  # it refers to this object; without the cycle both are freed at once

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        if self._unparsed is not None:
            self._keep_unparsed(data)
            return
        if self._at_boundary and self._current is None:
            if self.is_writable and (known := self._heads.find(data)) is not None:
                head, body = known
                self._phase = _ANSWERING
                self._in_headers = False
                self._current = exchange = Exchange(self, head, keep_alive=not self._server.is_stopping, body=body)
                self._dispatch(exchange)
                return
            end = data.find(b"\r\n\r\n")
            self._raw_head = data[:end] if 0 < end < MAX_CACHED_HEAD_BYTES else b""
        self._process(data)

    def _process(self, data: bytes) -> None:
        """Parse what one turn may parse, start the first complete request, and decide whether to continue reading."""
        self._num_read = self._cost = 0
        self._parse_pieces(data)
        if self._transport.is_closing():
            return
        earned, self._cost_credit = self._cost_credit, 0
        if not self._budget.spend(self._cost, earned, clock.now) and self._parsing is not _ENDED:
            self._stop_parsing(_TOO_MUCH_WORK, _too_much_work)
            if self._transport.is_closing():
                return
        self._start_next()
        if self._transport.is_closing():
            return
        incoming = self._incoming
        if incoming is None and self._current is None and not self._in_headers:
            self._phase, self._since = _IDLE, clock.now()
        num_ahead = self._num_ahead
        self._ahead_bytes = self._ahead_bytes + len(data) if num_ahead > 0 else 0
        if self._parsing is not _ENDED and (
            num_ahead >= PIPELINE_AHEAD
            or self._parsing is _PAUSED
            or self._ahead_bytes > PIPELINE_AHEAD_BYTES
            or (incoming is not None and not incoming.is_over and incoming.num_buffered > READ_AHEAD_BYTES)
        ):
            self._pause_reading()
            if self._parsing is _PAUSED and num_ahead <= 0:
                asyncio.get_running_loop().call_soon(self._parse_kept)

    @property
    def _num_ahead(self) -> int:
        """Requests that wait until the current one is answered."""
        return len(self._queue) - (self._current is None)

    @property
    def _is_parsing_paused(self) -> bool:
        """Whether bytes are kept until this connection may begin more requests."""
        return self._parsing is _PAUSED

    def _parse_pieces(self, data: bytes) -> None:
        """Parse ``data`` in pieces; parsing can stop between two of them. The rest is kept in ``_unparsed``."""
        begin, size = 0, len(data)
        if size <= SLICE_BYTES:
            try:
                self._parse(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._decline_upgrade(data[upgrade.args[0] :])
                size = len(data)
        while begin < size and not self._transport.is_closing():
            if self._parsing is _ON and self._is_turn_over():
                self._parsing, self._unparsed = _PAUSED, data[begin:]
                return
            end = self._piece_end(data, begin)
            try:
                self._parse(data if end - begin == size else memoryview(data)[begin:end])
            except httptools.HttpParserUpgrade as upgrade:
                data = self._decline_upgrade(data[begin + upgrade.args[0] :])
                begin, size = 0, len(data)
                continue
            if self._parsing is _ENDED:
                return
            begin = end

    def _piece_end(self, data: bytes, begin: int) -> int:
        """Where the piece of a read that starts at ``begin`` ends: after one head, or after one body.

        A body in one piece is copied once, and no piece completes many requests.
        """
        size = len(data)
        if size - begin <= SLICE_BYTES:
            return size
        if self._incoming is not None:
            left = self._incoming.announced_length - self._body_read
            return min(size, begin + (left if left > 0 else CHUNKS_BYTES))
        head_end = data.find(b"\r\n\r\n", begin)
        return min(head_end + 4 if head_end >= 0 else size, begin + CHUNKS_BYTES)

    def _is_turn_over(self) -> bool:
        """Whether no more may be parsed in this turn. Starts the first complete request, so that it can count."""
        if self._cost >= cost.MAX_PER_TURN:
            return True
        if self._incoming is not None or not self._num_read:
            return False
        self._start_next()
        return self._num_read >= REQUESTS_PER_TURN or self._num_ahead >= PIPELINE_AHEAD

    def _parse(self, data: bytes | memoryview) -> None:
        """Parse one piece. Raises HttpParserUpgrade with the number of bytes of ``data`` that were parsed."""
        self._piece_bytes = len(data)
        self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise
        except httptools.HttpParserCallbackError:
            raise  # a defect of inferd: the event loop logs it and closes the connection
        except httptools.HttpParserError:
            if self._parsing is not _ENDED:  # bytes after the last request are not parsed
                self._stop_parsing(_BAD_REQUEST, _malformed)
            return
        if self._parsing is _ENDED:
            return
        if self._in_headers:
            self._header_bytes += len(data)
            if self._phase is not _READING_HEAD:
                self._phase, self._since = _READING_HEAD, clock.now()
            if self._header_bytes > MAX_HEADER_BYTES + SLICE_BYTES:  # the first piece may begin before the head
                self._stop_parsing(_HEADERS_TOO_LARGE, _too_large)
        elif self._incoming is not None and self._framing_bytes > MAX_HEADER_BYTES:
            # Chunk extensions or trailers without end. The parser buffers a whole trailer.
            self._stop_parsing(_HEADERS_TOO_LARGE, _too_large)

    def _keep_unparsed(self, data: bytes) -> None:
        assert self._unparsed is not None
        if self._parsing is _ENDED:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self._transport.abort()
            return
        self._unparsed += data
        if len(self._unparsed) > READ_AHEAD_BYTES:
            self._pause_reading()

    def _stop_parsing(self, answer: bytes, error: Callable[[], InferdError]) -> None:
        """Stop parsing at input that is refused. The requests before it are answered first.

        Within a body, its request fails with ``error``. Otherwise ``answer`` is sent, and the connection closes.
        """
        self._parsing, self._unparsed = _ENDED, b""
        self._discarded_bytes = 0
        if self._phase is _READING_HEAD:
            self._phase = _ANSWERING
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            self._final_refusal = answer
        else:
            incoming.fail_body(error)
            if incoming.is_over:
                self._close()  # the request was answered before

    def _pause_reading(self) -> None:
        if not self._is_read_paused:
            self._is_read_paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self.is_writable = False
        self._stall.begin(self._transport)
        if self._current is not None:
            self._current.writable_changed(False)

    def resume_writing(self) -> None:
        self.is_writable = True
        self._stall.end()
        self._wake_drain()
        if self._current is not None:
            self._current.writable_changed(True)
        else:
            self._resume()

    # -- called by the parser ---------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._at_boundary = False
        self._target = b""
        self._headers = []
        self._discarded_bytes = 0
        if not self._in_headers:
            self._in_headers = True
            self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._cost += cost.HEADER
        if self._in_headers:  # otherwise it is a trailer, and never a header (RFC 9110, section 6.5.1)
            if len(self._headers) < MAX_HEADERS:
                self._headers.append((name.lower(), value))
            elif self._parsing is not _ENDED:
                self._stop_parsing(_TOO_MANY_HEADERS, _too_large)

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser.should_upgrade():
            return  # the parser stops here; ``_decline_upgrade`` continues
        self._in_headers = False
        self._framing_bytes = self._body_read = 0
        self._phase = _ANSWERING
        if self._transport.is_closing() or self._parsing is _ENDED:
            return
        headers = self._headers
        if self._header_bytes + self._piece_bytes > MAX_HEADER_BYTES:
            size = len(self._target) + sum((len(name) + len(value) for name, value in headers), 0)
            if size > MAX_HEADER_BYTES:
                self._stop_parsing(_HEADERS_TOO_LARGE, _too_large)
                return
        version: str = parser.get_http_version()
        if version not in ("1.1", "1.0"):  # a request line without a version is HTTP/0.9
            self._stop_parsing(_BAD_REQUEST, _malformed)
            return
        head = RequestHead(parser.get_method().decode("ascii"), self._target, headers, version)
        exchange = Exchange(
            self,
            head,
            keep_alive=version == "1.1" and parser.should_keep_alive() and not self._server.is_stopping,
        )
        names = [name for name, _ in headers]
        num_hosts = names.count(b"host")
        if num_hosts != 1 and (version == "1.1" or num_hosts > 1):
            self._stop_parsing(_BAD_REQUEST, _malformed)
            return
        if b"transfer-encoding" in names and not _is_chunked(headers, version):
            self._stop_parsing(_BAD_REQUEST, _malformed)
            return
        if b"expect" in names:
            exchange.expects_continue = version == "1.1" and (b"expect", b"100-continue") in [
                (name, value.strip().lower()) for name, value in headers
            ]
        raw_head, self._raw_head = self._raw_head, b""
        if raw_head and exchange.keep_alive:
            self._heads.add(raw_head, head)
        if self._unparsed is not None:  # an upgrade is offered: HTTP ends with this request, whatever is answered
            exchange.keep_alive = False
            exchange.may_upgrade = True
        self._num_read += 1
        self._incoming = exchange
        self._queue.append(exchange)

    def on_body(self, body: bytes) -> None:
        incoming = self._incoming
        self._cost += cost.CHUNK
        if incoming is None or self._transport.is_closing():
            return
        self._framing_bytes = 0
        self._body_read += len(body)
        if incoming.is_over:
            # An answer that was sent before the body (413) leaves the rest of the body. It is read and discarded, up
            # to a limit, so that a client that writes everything before it reads still sees the answer.
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self._transport.abort()
            return
        self._cost_credit += len(body) >> 2
        incoming.put_body(body)

    def on_message_complete(self) -> None:
        self._at_boundary = True
        incoming, self._incoming = self._incoming, None
        if incoming is None or self._transport.is_closing():
            return
        incoming.end_body()
        if not incoming.keep_alive and self._parsing is _ON:
            self._parsing, self._unparsed = _ENDED, b""  # what follows is no request (RFC 9112, section 9.6)
            self._discarded_bytes = 0
        if incoming.is_over:
            self._phase, self._since = _IDLE, clock.now()

    def _decline_upgrade(self, rest: bytes) -> bytes:
        """What to parse instead of a head that offers an upgrade, and of ``rest``, which follows it: the same head
        without the offer.

        Java's client offers HTTP/2 with every first request. The parser stops after such a head and would parse the
        body as the next request, so a new parser gets the head without the offer. What follows an offer of WebSocket
        is kept, not parsed, because the application may accept the offer.
        """
        self._raw_head = b""
        if self._parsing is _ENDED:
            return b""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._stop_parsing(_BAD_REQUEST, _malformed)
            return b""
        kept = [
            (name, value) for name, value in self._headers if name not in (b"upgrade", b"http2-settings", b"connection")
        ]
        options = [
            option.strip() for name, value in self._headers if name == b"connection" for option in value.split(b",")
        ]
        options = [option for option in options if option.lower() not in (b"upgrade", b"http2-settings")]
        if options:
            kept.append((b"connection", b", ".join(options)))
        head = b"%b %b HTTP/%b\r\n" % (method, self._target, self._parser.get_http_version().encode("ascii"))
        head += b"".join(b"%b: %b\r\n" % header for header in kept) + b"\r\n"
        offers_websocket = method == b"GET" and _offers_websocket(self._headers, self._parser.get_http_version())
        self._parser = httptools.HttpRequestParser(self)
        if offers_websocket:
            self._parsing, self._unparsed = _UPGRADE_OFFERED, b""
            self._keep_unparsed(rest)
            return head
        return head + rest

    # -- starting requests ------------------------------------------------------------------

    def _start_next(self) -> None:
        """Start the requests of the queue, one after the other, while none is being answered.

        None starts while the write buffer is full. So pipelined requests cannot make the server buffer answers without
        a limit.
        """
        if self._is_starting:
            return
        self._is_starting = True
        try:
            while self._current is None and self._queue and self.is_writable and not self._transport.is_closing():
                exchange = self._queue[0]
                if not exchange.is_body_complete and exchange.body_error is None and self._awaits_body(exchange):
                    return
                self._queue.popleft()
                self._gathering = None
                if self._phase is not _READING_HEAD:
                    self._phase = _ANSWERING
                self._current = exchange
                self._dispatch(exchange)
            if self._final_refusal and self._current is None and not self._queue:
                self._refuse(self._final_refusal)
        finally:
            self._is_starting = False

    def _awaits_body(self, exchange: Exchange) -> bool:
        """Whether to wait for the rest of a small body, so that the application gets a complete request."""
        if exchange.expects_continue or exchange.num_buffered > GATHER_BYTES:
            return False
        now = clock.now()
        if self._gathering is not exchange:
            length = exchange.head.header(b"content-length")
            if length is not None and (len(length) > 6 or not length.isdigit() or int(length) > GATHER_BYTES):
                return False
            self._gathering = exchange
            self._phase, self._since = _GATHERING, now
        return now - self._since < GATHER_S

    def _dispatch(self, exchange: Exchange) -> None:
        app = self._server.app
        try:
            if exchange.body_error is not None:
                app.refuse(exchange, exchange.body_error())
            else:
                app.serve(exchange)
        except BadTarget:
            self._refuse(_BAD_REQUEST)
        except Exception:
            # The application answers its own exceptions. One that arrives here is a defect in the application.
            _log.exception("a request failed outside of the application")
            if not exchange.is_over and not exchange.is_disconnected:
                self._refuse(_DEFECT)

    # -- called by exchanges ----------------------------------------------------------------

    def abort(self) -> None:
        self._transport.abort()

    async def drained(self) -> None:
        while not self.is_writable and not self._transport.is_closing():
            if self._drain_waiter is None:
                self._drain_waiter = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drain_waiter)

    def peer_uid(self) -> int | None:
        """The user of the client's process, where it is connected by a Unix socket on Linux."""
        connected: socket.socket | None = self._transport.get_extra_info("socket")
        if connected is None or connected.family != socket.AF_UNIX or sys.platform != "linux":
            return None
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(credentials[4:8], sys.byteorder)

    def resume_reading_body(self) -> None:
        self._resume_reading()

    def upgrade(self, exchange: Exchange, upgraded: UpgradedConnection, serving: Coroutine[Any, Any, None]) -> None:
        """Pass the transport to ``upgraded``, with the bytes that were read after the request's head."""
        assert exchange is self._current, "only the current request can be upgraded"
        server, transport = self._server, self._transport
        self._current = None
        rest, self._unparsed = self._unparsed, None
        server.connections.discard(self)
        server.connections.add(upgraded)
        transport.set_protocol(upgraded)
        upgraded.start(transport, server.timeouts.send_s, lambda: server.connection_closed(upgraded))
        if not self.is_writable:
            upgraded.pause_writing()
        if self._is_read_paused:
            transport.resume_reading()
        del self._parser
        if rest:
            upgraded.data_received(rest)
        if server.is_stopping:
            upgraded.shut_down()
        server.spawn(serving)

    def spawn(self, serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._server.spawn(serving)
        task.add_done_callback(self._served)
        return task

    def _served(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        # The application answers its own exceptions. One that arrives here is a defect in the application.
        _log.error("a request failed outside of the application", exc_info=error)
        if not self._transport.is_closing():
            self._refuse(_DEFECT)

    def exchange_over(self, exchange: Exchange) -> None:
        """The answer to the current request is complete: close, or start the next request."""
        if exchange is not self._current:
            return
        self._current = None
        self._cost_credit += cost.REFUSAL_CREDIT
        if self._transport.is_closing():
            return
        if not exchange.keep_alive or self._server.is_stopping:
            self._close()
            return
        if self._phase is not _READING_HEAD:
            self._phase, self._since = (_IDLE if exchange.is_body_complete else _DISCARDING), clock.now()
        if (self._queue or self._final_refusal) and not self._is_starting:
            # An answer may end within its own task, and that task must not start another request.
            asyncio.get_running_loop().call_soon(self._resume)
        if self._is_read_paused:
            self._resume_reading()

    def _resume_reading(self) -> None:
        # A request that waits for its body does not block reading: the body is yet to be read.
        num_ahead = len(self._queue) - (self._gathering is not None)
        if not self._is_read_paused or self._transport.is_closing() or num_ahead:
            return
        if self._parsing is not _PAUSED:
            self._is_read_paused = False
            self._transport.resume_reading()
        elif not self._is_starting:
            asyncio.get_running_loop().call_soon(self._parse_kept)

    def _parse_kept(self) -> None:
        """Parse what was kept while parsing was paused."""
        if self._parsing is not _PAUSED or self._transport.is_closing() or self._num_ahead > 0:
            return
        data, self._unparsed = self._unparsed, None
        assert data is not None
        self._parsing = _ON
        try:
            self._process(data)
        except Exception:
            self._abort_on_defect()
            return
        if not self._is_parsing_paused:
            self._resume_reading()

    def _resume(self) -> None:
        """Continue after the write buffer has room again: start the next request and read."""
        try:
            self._start_next()
        except Exception:
            self._abort_on_defect()
            return
        self._resume_reading()

    def _abort_on_defect(self) -> None:
        """Log an exception and abort. Only for callbacks after which the event loop would not close the connection."""
        _log.exception("a connection could not go on with what was read")
        self._transport.abort()

    # -- the end ----------------------------------------------------------------------------

    def shut_down(self) -> None:
        if self._current is None and self._gathering is None:
            self._close()
        elif self._current is not None:
            self._current.keep_alive = False

    def check_timeouts(self, now: float) -> None:
        transport = self._transport
        if self._stall.is_active:
            if self._stall.has_expired(transport, now, self._server.timeouts.send_s):
                transport.abort()
            return
        if transport.is_closing() and self._phase is not _CLOSING:
            self._phase, self._since = _CLOSING, now
        if self._phase is _READING_HEAD and self._is_read_paused:
            self._since = now  # the server does not read the rest of the head yet
        limit_s = self._limit_s()
        if limit_s is not None and now - self._since > limit_s:
            self._time_out()

    def _limit_s(self) -> float | None:
        """Seconds that the current phase may take; None: as long as the application needs."""
        timeouts = self._server.timeouts
        match self._phase:
            case Phase.READING_HEAD:
                return timeouts.header_s
            case Phase.GATHERING:
                return GATHER_S
            case Phase.ANSWERING:
                return None
            case Phase.DISCARDING:
                return timeouts.discard_s
            case Phase.IDLE:
                return timeouts.keep_alive_s
            case Phase.CLOSING:
                return timeouts.send_s

    def _time_out(self) -> None:
        """The current phase took too long."""
        if self._phase is _READING_HEAD:
            self._stop_parsing(_HEADERS_TOO_SLOW, _malformed)
            self._start_next()
        elif self._phase is _GATHERING:
            self._start_next()
        elif self._phase is _CLOSING:
            self._transport.abort()
        else:
            self._close()

    def _refuse(self, answer: bytes) -> None:
        """Close. Send ``answer`` before, unless some of the current answer was sent: the two would mix."""
        if self._transport.is_closing():
            return
        current = self._current
        if current is None or not current.is_started:
            self._transport.write(answer)
        self._close()

    def _close(self) -> None:
        self._transport.close()
        self._drop_requests()

    def _drop_requests(self) -> None:
        """Tell the current request and the gathered one that they will not be answered, and forget the rest."""
        current, waiting = self._current, self._gathering
        self._current = self._gathering = self._incoming = None
        self._queue.clear()
        self._wake_drain()
        if current is not None:
            current.disconnected()
        if waiting is not None:  # the application does not know the request yet; it counts and logs it
            waiting.disconnected()
            with contextlib.suppress(BadTarget):
                self._server.app.serve(waiting)

    def _wake_drain(self) -> None:
        if self._drain_waiter is not None:
            if not self._drain_waiter.done():
                self._drain_waiter.set_result(None)
            self._drain_waiter = None


def _offers_websocket(headers: list[tuple[bytes, bytes]], version: str) -> bool:
    """Whether the request offers an upgrade to WebSocket alone, and has no body (RFC 6455, section 4.2.1)."""
    if version != "1.1" or any(name in (b"content-length", b"transfer-encoding") for name, _ in headers):
        return False
    return [value.strip().lower() for name, value in headers if name == b"upgrade"] == [b"websocket"]


def _is_chunked(headers: list[tuple[bytes, bytes]], version: str) -> bool:
    """Whether the only transfer coding is ``chunked`` (RFC 9112, section 6.1). The server decodes no other."""
    return version == "1.1" and all(
        value.strip().lower() == b"chunked" for name, value in headers if name == b"transfer-encoding"
    )
