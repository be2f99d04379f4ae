"""One client's HTTP/1.1 connection: parsing within limits, requests in order, and when to give up.

Knows framing and time, nothing of what is served. Bytes that two programs could read differently end
the connection (RFC 9112, sections 2.2, 6.3, 11.2).

Why not a well-kept server in front: a task per request and ASGI's messages cost more than everything else
a relayed request needs (``bench/gateway``). The parser is still a well-kept one (llhttp).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Literal, NamedTuple, Protocol, cast

import httptools

from inferd import clock
from inferd.errors import InferdError, InvalidRequest
from inferd.http import work
from inferd.http.asgi import Receive, Scope, Send
from inferd.http.exchange import READ_AHEAD_BYTES, BadTarget, Exchange, Serving
from inferd.http.limits import MAX_HEADER_BYTES, MAX_HEADERS
from inferd.http.upgrade import Guest, Successor

MAX_DISCARDED_BYTES: Final = 64 * 1024 * 1024
SLICE_BYTES: Final = 4096
"""A read up to this size is parsed at once, a larger one in pieces. Between two pieces, parsing can stop."""

CHUNKS_BYTES: Final = 32 * 1024
"""A piece of a body in chunks, whose length is not known."""

REQUESTS_PER_TURN: Final = 64
"""Requests of one connection that one turn of the event loop begins, give or take those of one piece."""

# Requests and bytes of them that are read while another is answered. Not more, and not less: a client that leaves is
# only noticed while reading.
PIPELINE_AHEAD: Final = 8
PIPELINE_AHEAD_BYTES: Final = 64 * 1024
WRITE_AHEAD_BYTES: Final = 64 * 1024
MAX_FAMILIAR_BYTES: Final = 1536  # of a head that is looked up before it is parsed
GATHER_BYTES: Final = 64 * 1024  # a body up to this size is waited for before the application hears of it
GATHER_S: Final = 1.0

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
    b"This connection costs more than it is good for: tiny chunks or headers; send larger ones.",
    b"too_much_work",
)
_DEFECT = _refusal(
    b"500 Internal Server Error", b"The server met an internal error; the log has the details.", b"internal_error"
)
NO_ROOM: Final = _refusal(
    b"503 Service Unavailable",
    b"The server has as many connections as it may; come back in a second, or raise server.max_connections.",
    b"too_many_connections",
    b"retry-after: 1\r\n",
)


Reading = Literal["on", "offer", "later", "end"]
"""What becomes of what is read. on: it is parsed; offer: it is held, as it is not HTTP if an offer is taken; later: it is
held until there is room for more requests; end: it is thrown away, as nothing behind the last request is one."""


def _malformed() -> InferdError:
    return InvalidRequest(
        "The request's body is no valid HTTP/1.1; send what its headers announce.", code="invalid_http"
    )


def _too_large() -> InferdError:
    return InvalidRequest(
        f"More than {MAX_HEADER_BYTES >> 10} KiB of the request's body are extensions of chunks or trailers; send less.",
        code="headers_too_large",
    )


def _too_much_work() -> InferdError:
    return InvalidRequest(
        "This connection costs more than it is good for: tiny chunks or headers; send larger ones.",
        code="too_much_work",
    )


class Waits(NamedTuple):
    """Seconds that a client gets."""

    header_s: float = 30.0  # for a request's headers, from its first byte or the connection's beginning
    keep_alive_s: float = 75.0  # between two requests
    send_s: float = 60.0  # without taking a byte of its answer
    rest_s: float = 60.0  # for the rest of a body, all of which its answer did not need


class Host(Protocol):
    """The server, as a connection sees it."""

    app: Callable[[Scope, Receive, Send], Awaitable[None]]
    forward: Callable[[Exchange], bool] | None
    """Takes a whole request over without a task, or says that it does not."""

    express: Callable[[Connection, bytes], bool] | None
    """Likewise one that has just been read, and is all that was, if its head is familiar."""

    waits: Waits
    connections: set[Guest]
    max_connections: int

    is_stopping: bool

    def refuse(self, exchange: Exchange, error: InferdError, /) -> None:
        """Answer a request that cannot be read to its end, and that the application has not heard of."""

    def spawn(self, serving: Coroutine[Any, Any, None]) -> None: ...
    def turn_away(self, transport: asyncio.Transport) -> None:
        """There is no room for this connection: it is nobody's from now on."""

    def connection_gone(self, connection: Guest) -> None: ...


class Connection(Guest):
    """Serves the requests of one client, one after the other."""

    __slots__ = (
        "_account",
        "_ahead_bytes",
        "_at_boundary",
        "_bare_bytes",
        "_body_read",
        "_current",
        "_discarded",
        "_drain",
        "_earned",
        "_express",
        "_header_bytes",
        "_header_since",
        "_headers",
        "_held",
        "_host",
        "_idle_since",
        "_in_headers",
        "_incoming",
        "_is_moving",
        "_is_read_paused",
        "_last_words",
        "_num_read",
        "_parser",
        "_queue",
        "_raw_head",
        "_reading",
        "_reading_bytes",
        "_rest_since",
        "_stuck_bytes",
        "_stuck_since",
        "_target",
        "_transport",
        "_waiting",
        "_waiting_since",
        "_work",
        "is_writable",
        "write",
    )

    _transport: asyncio.Transport
    write: Callable[[bytes], None]

    def __init__(self, host: Host) -> None:
        self._host = host
        self._express = host.express
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._at_boundary = True  # nothing of a request has been read that is not complete
        self._raw_head = b""  # of the request that is being read, if it came in one piece
        self._in_headers = True
        self._header_bytes = 0
        self._header_since = clock.now()  # 0: no headers are under way
        self._reading_bytes = 0  # of the piece that is being parsed
        self._body_read = 0  # of the body that is under way
        self._num_read = 0  # requests whose headers this turn has read
        self._work = self._earned = 0  # of this turn, in units of ``http.work``
        self._account = work.Account(self._header_since)
        self._bare_bytes = 0  # read since the last byte of a body: sizes of chunks, their extensions, trailers
        self._idle_since = 0.0  # 0: something is under way
        self._incoming: Exchange | None = None  # whose body is being read
        self._rest_since = 0.0  # 0: nothing that is left of a body is being thrown away
        self._waiting: Exchange | None = None  # whose body is waited for, and nobody knows of it yet
        self._waiting_since = 0.0
        self._current: Serving | None = None  # what is being answered
        self._queue: deque[Exchange] = deque()
        self._ahead_bytes = 0  # read while requests waited for the one that is being answered
        self._is_moving = False
        self._is_read_paused = False
        self._reading: Reading = "on"
        self._held: bytes | None = None  # what was read and is not parsed; None: all is
        self._last_words = b""  # a refusal that follows the answers to what was read before
        self._discarded = 0
        self._drain: asyncio.Future[None] | None = None
        self._stuck_since = 0.0
        self._stuck_bytes = 0
        self.is_writable = True

    # -- the transport's side ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if len(self._host.connections) >= self._host.max_connections:
            self._host.turn_away(self._transport)
            return
        self._transport.set_write_buffer_limits(WRITE_AHEAD_BYTES)
        self.write = self._transport.write
        self._host.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._give_up()
        self._host.connection_gone(self)
        del self._parser  # refers back here; without it the connection is freed now, and with it what its requests held

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._idle_since = 0.0
        if self._held is not None:
            self._hold(data)
            return
        if self._at_boundary and self._current is None:
            if self._express is not None and self.is_writable and self._express(self, data):
                return
            end = data.find(b"\r\n\r\n")
            self._raw_head = data[:end] if 0 < end < MAX_FAMILIAR_BYTES else b""
        self._take(data)

    def _take(self, data: bytes) -> None:
        """Parse what this turn may, begin with the requests that are complete, and see whether to read on."""
        self._num_read = self._work = 0
        self._feed(data)
        if self._transport.is_closing():
            return
        earned, self._earned = self._earned, 0
        if not self._account.is_good(self._work, earned, clock.now) and self._reading != "end":
            self._give_up_reading(_TOO_MUCH_WORK, _too_much_work)
            if self._transport.is_closing():
                return
        self._move()
        if self._transport.is_closing():
            return
        incoming = self._incoming
        if (incoming.is_over if incoming is not None else not self._in_headers) and self._current is None:
            self._idle_since = clock.now()
        num_ahead = self._num_ahead
        self._ahead_bytes = self._ahead_bytes + len(data) if num_ahead > 0 else 0
        if self._reading != "end" and (
            num_ahead >= PIPELINE_AHEAD
            or self._reading == "later"
            or self._ahead_bytes > PIPELINE_AHEAD_BYTES
            or (incoming is not None and not incoming.is_over and incoming.num_buffered > READ_AHEAD_BYTES)
        ):
            self._pause_reading()
            if self._reading == "later" and num_ahead <= 0:
                asyncio.get_running_loop().call_soon(self._parse_on)

    @property
    def _num_ahead(self) -> int:
        """Requests that wait for the one that is being answered."""
        return len(self._queue) - (self._current is None)

    @property
    def _waits_for_room(self) -> bool:
        """Whether what was read is held until there is room for more requests."""
        return self._reading == "later"

    def _feed(self, data: bytes) -> None:
        """Parse in pieces that end where parsing may have to stop. What is left waits in ``_held``."""
        begin, size = 0, len(data)
        if size <= SLICE_BYTES:
            try:
                self._parse(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._decline_upgrade(data[upgrade.args[0] :])
                size = len(data)
        while begin < size and not self._transport.is_closing():
            if self._reading == "on" and self._is_enough():
                self._reading, self._held = "later", data[begin:]
                return
            end = self._piece_end(data, begin)
            try:
                self._parse(data if end - begin == size else memoryview(data)[begin:end])
            except httptools.HttpParserUpgrade as upgrade:
                data = self._decline_upgrade(data[begin + upgrade.args[0] :])
                begin, size = 0, len(data)
                continue
            if self._reading == "end":
                return
            begin = end

    def _piece_end(self, data: bytes, begin: int) -> int:
        """Of a large read, one head or one body is a piece: a body is copied once, and few requests end in a piece."""
        size = len(data)
        if size - begin <= SLICE_BYTES:
            return size
        if self._incoming is not None:
            left = self._incoming.length - self._body_read
            return min(size, begin + (left if left > 0 else CHUNKS_BYTES))
        head_end = data.find(b"\r\n\r\n", begin)
        return min(head_end + 4 if head_end >= 0 else size, begin + CHUNKS_BYTES)

    def _is_enough(self) -> bool:
        """Whether no more may be parsed in this turn. Begins with the requests that are complete."""
        if self._work >= work.TURN:
            return True
        if self._incoming is not None or not self._num_read:
            return False
        self._move()
        return self._num_read >= REQUESTS_PER_TURN or self._num_ahead >= PIPELINE_AHEAD

    def _parse(self, data: bytes | memoryview) -> None:
        """Raises HttpParserUpgrade, whose argument is how much of ``data`` was parsed."""
        self._reading_bytes = len(data)
        self._bare_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise
        except httptools.HttpParserCallbackError:
            raise  # a defect of ours; the loop reports it and closes
        except httptools.HttpParserError:
            if self._reading != "end":  # else what cannot be read is behind the last request
                self._give_up_reading(_BAD_REQUEST, _malformed)
            return
        if self._reading == "end":
            return
        if self._in_headers:
            self._header_bytes += len(data)
            if not self._header_since:
                self._header_since = clock.now()
            if self._header_bytes > MAX_HEADER_BYTES + SLICE_BYTES:  # the piece may have begun before the headers
                self._give_up_reading(_HEADERS_TOO_LARGE, _too_large)
        elif self._incoming is not None and self._bare_bytes > MAX_HEADER_BYTES:
            # Extensions or trailers without end; the parser keeps a trailer whole.
            self._give_up_reading(_HEADERS_TOO_LARGE, _too_large)

    def _hold(self, data: bytes) -> None:
        assert self._held is not None
        if self._reading == "end":
            self._discarded += len(data)
            if self._discarded > MAX_DISCARDED_BYTES:
                self._transport.abort()
            return
        self._held += data
        if len(self._held) > READ_AHEAD_BYTES:
            self._pause_reading()

    def _give_up_reading(self, answer: bytes, error: Callable[[], InferdError]) -> None:
        """What follows cannot be read. The request that it belongs to is refused (``error``), or what would have been
        one (``answer``); the requests before it are answered first."""
        self._reading, self._held = "end", b""
        self._discarded = 0
        self._header_since = 0.0
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            self._last_words = answer
        else:
            incoming.spoil(error)
            if incoming.is_over:
                self._close()  # it is answered already: its rest was being thrown away

    def _pause_reading(self) -> None:
        if not self._is_read_paused:
            self._is_read_paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self.is_writable = False
        self._stuck_since = clock.now()
        self._stuck_bytes = self._transport.get_write_buffer_size()
        if self._current is not None:
            self._current.room(False)

    def resume_writing(self) -> None:
        self.is_writable = True
        self._stuck_since = 0.0
        self._wake_drain()
        if self._current is not None:
            self._current.room(True)
        else:
            self._go_on()

    # -- the parser's side ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._at_boundary = False
        self._target = b""
        self._headers = []
        self._discarded = 0
        if not self._in_headers:
            self._in_headers = True
            self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._work += work.HEADER
        if self._in_headers:  # else it is a trailer, which is never taken for a header (RFC 9110, section 6.5.1)
            if len(self._headers) < MAX_HEADERS:
                self._headers.append((name.lower(), value))
            elif self._reading != "end":
                self._give_up_reading(_TOO_MANY_HEADERS, _too_large)

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser.should_upgrade():
            return  # the parser stops here, see ``_decline_upgrade``
        self._in_headers = False
        self._bare_bytes = self._body_read = 0
        self._header_since = 0.0
        if self._transport.is_closing() or self._reading == "end":
            return
        headers = self._headers
        if self._header_bytes + self._reading_bytes > MAX_HEADER_BYTES:
            size = len(self._target) + sum(len(name) + len(value) for name, value in headers)
            if size > MAX_HEADER_BYTES:
                self._give_up_reading(_HEADERS_TOO_LARGE, _too_large)
                return
        version: str = parser.get_http_version()
        if version not in ("1.1", "1.0"):  # a line without a version would be HTTP/0.9
            self._give_up_reading(_BAD_REQUEST, _malformed)
            return
        exchange = Exchange(
            self,
            parser.get_method().decode("ascii"),
            self._target,
            headers,
            version,
            keep_alive=version == "1.1" and parser.should_keep_alive() and not self._host.is_stopping,
        )
        names = [name for name, _ in headers]
        num_hosts = names.count(b"host")
        if num_hosts != 1 and (version == "1.1" or num_hosts > 1):
            self._give_up_reading(_BAD_REQUEST, _malformed)
            return
        if b"transfer-encoding" in names and not _is_chunked(headers, version):
            self._give_up_reading(_BAD_REQUEST, _malformed)
            return
        if b"expect" in names:
            exchange.expects_continue = version == "1.1" and (b"expect", b"100-continue") in [
                (name, value.strip().lower()) for name, value in headers
            ]
        exchange.raw_head, self._raw_head = self._raw_head, b""
        if self._held is not None:  # what follows is not HTTP, or of nobody's
            exchange.keep_alive = False
            exchange.may_hand_over = True
        self._num_read += 1
        self._incoming = exchange
        self._queue.append(exchange)

    def on_body(self, body: bytes) -> None:
        incoming = self._incoming
        self._work += work.CHUNK
        if incoming is None or self._transport.is_closing():
            return
        self._bare_bytes = 0
        self._body_read += len(body)
        if incoming.is_over:
            # An answer sent before the body was read (413) leaves the rest to be thrown away. Up to a limit
            # this goes on, so that a client that writes first and reads later gets to see the answer.
            self._discarded += len(body)
            if self._discarded > MAX_DISCARDED_BYTES:
                self._transport.abort()
            return
        self._earned += len(body) >> 2
        incoming.put_body(body)

    def on_message_complete(self) -> None:
        self._at_boundary = True
        incoming, self._incoming = self._incoming, None
        self._rest_since = 0.0
        if incoming is None or self._transport.is_closing():
            return
        incoming.end_body()
        if not incoming.keep_alive and self._reading == "on":
            self._reading, self._held = "end", b""  # what follows belongs to no request (RFC 9112, section 9.6)
            self._discarded = 0
        if incoming.is_over:
            self._idle_since = clock.now()

    def _decline_upgrade(self, rest: bytes) -> bytes:
        """What to parse instead of a request that offers another protocol, and of what follows it: the same
        without the offer.

        Java's client offers HTTP/2 with every first request. The parser stops after such headers and
        would take the body for the next request, so it gets the same headers again. Of what follows an offer
        of WebSocket nothing is parsed: the offer may be taken.
        """
        self._raw_head = b""
        if self._reading == "end":
            return b""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._give_up_reading(_BAD_REQUEST, _malformed)
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
            self._reading, self._held = "offer", b""
            self._hold(rest)
            return head
        return head + rest

    # -- moving on --------------------------------------------------------------------------

    def _move(self) -> None:
        """Begin with the next request when the one before is answered. While the client takes no answers, none begins: what
        it sends ahead cannot make the server write without end."""
        if self._is_moving:
            return
        self._is_moving = True
        try:
            while self._current is None and self._queue and self.is_writable and not self._transport.is_closing():
                exchange = self._queue[0]
                if not exchange.is_body_complete and exchange.spoiled is None and self._gathers(exchange):
                    return
                self._queue.popleft()
                self._waiting = None
                self._idle_since = 0.0
                self._current = exchange
                self._begin(exchange)
            if self._last_words and self._current is None and not self._queue:
                self._refuse(self._last_words)
        finally:
            self._is_moving = False

    def _gathers(self, exchange: Exchange) -> bool:
        """Whether to wait for the rest of a small body, so that a request is taken in one go."""
        if self._host.forward is None or exchange.expects_continue or exchange.num_buffered > GATHER_BYTES:
            return False
        now = clock.now()
        if self._waiting is not exchange:
            for name, value in exchange.headers:
                if name == b"content-length" and (len(value) > 6 or not value.isdigit() or int(value) > GATHER_BYTES):
                    return False
            self._waiting = exchange
            self._waiting_since = now
        return now - self._waiting_since < GATHER_S

    def _begin(self, exchange: Exchange) -> None:
        forward = self._host.forward
        try:
            if exchange.spoiled is not None:
                self._host.refuse(exchange, exchange.spoiled())
                return
            if forward is not None and exchange.is_body_complete and forward(exchange):
                return
            scope = exchange.scope()
        except BadTarget:
            self._refuse(_BAD_REQUEST)
            return
        self._host.spawn(self._serve(exchange, scope))

    async def _serve(self, exchange: Exchange, scope: Scope) -> None:
        try:
            await self._host.app(scope, exchange.receive, exchange.send)
        except Exception:
            # The application has its own boundary; what gets here is a defect in it.
            _log.exception("a request failed outside of the application")
        if not exchange.is_over and not exchange.has_left:
            self._refuse(_DEFECT)

    # -- the exchange's side ----------------------------------------------------------------

    def abort(self) -> None:
        """Cut the connection; what was written and not sent is lost."""
        self._transport.abort()

    def cut(self, serving: Serving) -> None:
        """Likewise, if it is busy with this one."""
        if self._current is serving:
            self._transport.abort()

    async def drained(self) -> None:
        while not self.is_writable and not self._transport.is_closing():
            if self._drain is None:
                self._drain = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drain)

    def wants_body(self) -> None:
        self._read_on()

    def hand_over(self, exchange: Serving, successor: Successor, serving: Coroutine[Any, Any, None]) -> None:
        """From here on the connection is another's, who reads what was held."""
        assert exchange is self._current, "whoever is answered may have the connection"
        host, transport = self._host, self._transport
        self._current = None
        rest, self._held = self._held, None
        host.connections.discard(self)
        host.connections.add(successor)
        transport.set_protocol(successor)
        successor.taken(transport, host.waits.send_s, lambda: host.connection_gone(successor))
        if not self.is_writable:
            successor.pause_writing()
        if self._is_read_paused:
            transport.resume_reading()
        del self._parser
        if rest:
            successor.data_received(rest)
        if host.is_stopping:
            successor.shut()
        host.spawn(serving)

    def serve(self, serving: Serving) -> None:
        """What was read last is answered by this one: a familiar request, or what a transit is turned into."""
        self._current = serving
        self._header_since = 0.0
        self._in_headers = False

    @property
    def is_stopping(self) -> bool:
        return self._host.is_stopping

    def exchange_over(self, exchange: Serving) -> None:
        """An answer is complete: on to the next request."""
        if exchange is not self._current:
            return
        self._current = None
        self._earned += work.REFUSED
        if self._transport.is_closing():
            return
        if not exchange.keep_alive or self._host.is_stopping:
            self._close()
            return
        if exchange.is_body_complete:
            self._idle_since = clock.now()
        else:
            self._rest_since = clock.now()
        if self._queue or self._last_words:
            self._move()
        if self._is_read_paused:
            self._read_on()

    def _read_on(self) -> None:
        # One that is waited for is still in the queue, and the rest of its body is yet to be read.
        num_ahead = len(self._queue) - (self._waiting is not None)
        if not self._is_read_paused or self._transport.is_closing() or num_ahead:
            return
        if self._reading != "later":
            self._is_read_paused = False
            self._transport.resume_reading()
        elif not self._is_moving:
            asyncio.get_running_loop().call_soon(self._parse_on)

    def _parse_on(self) -> None:
        """Go on with what was read and had to wait."""
        if self._reading != "later" or self._transport.is_closing() or self._num_ahead > 0:
            return
        data, self._held = self._held, None
        assert data is not None
        self._reading = "on"
        try:
            self._take(data)
        except Exception:
            self._broke()
            return
        if not self._waits_for_room:
            self._read_on()

    def _go_on(self) -> None:
        """Begin with what had to wait until the client took its answers."""
        try:
            self._move()
        except Exception:
            self._broke()
            return
        self._read_on()

    def _broke(self) -> None:
        """A boundary: nothing is behind a callback of the loop that would close the connection."""
        _log.exception("a connection could not go on with what was read")
        self._transport.abort()

    # -- the end ----------------------------------------------------------------------------

    def shut(self) -> None:
        """The server is leaving: finish what is under way, begin nothing."""
        if self._current is None and self._waiting is None:
            self._close()
        elif self._current is not None:
            self._current.keep_alive = False

    def look(self, now: float) -> None:
        """Give up on a client that takes too long."""
        waits = self._host.waits
        if self._stuck_since:
            left = self._transport.get_write_buffer_size()
            if left != self._stuck_bytes:
                self._stuck_bytes, self._stuck_since = left, now
            elif now - self._stuck_since > waits.send_s:
                self._transport.abort()
        elif self._transport.is_closing():
            if not self._idle_since:
                self._idle_since = now  # its last bytes are on their way
            elif now - self._idle_since > waits.send_s:
                self._transport.abort()
        elif self._waiting is not None:
            self._move()
        elif self._header_since:
            if self._is_read_paused:
                self._header_since = now  # the rest of them is not read before there is room for the request
            elif now - self._header_since > waits.header_s:
                self._give_up_reading(_HEADERS_TOO_SLOW, _malformed)
                self._move()
        elif (self._idle_since and now - self._idle_since > waits.keep_alive_s) or (
            self._rest_since and now - self._rest_since > waits.rest_s
        ):
            self._close()

    def _refuse(self, answer: bytes) -> None:
        """Say what is wrong, unless that would get into an answer that is under way, and close."""
        if self._transport.is_closing():
            return
        current = self._current
        if current is None or not current.is_started:
            self._transport.write(answer)
        self._close()

    def _close(self) -> None:
        self._idle_since = 0.0
        self._transport.close()
        self._give_up()

    def _give_up(self) -> None:
        """Everything that is not answered never will be."""
        self._header_since = 0.0
        current, waiting = self._current, self._waiting
        self._current = self._waiting = self._incoming = None
        self._queue.clear()
        self._wake_drain()
        if current is not None:
            current.leave()
        if waiting is not None:  # nobody has heard of it: let it be noted that it came
            waiting.leave()
            try:
                scope = waiting.scope()
            except BadTarget:
                return
            self._host.spawn(self._serve(waiting, scope))

    def _wake_drain(self) -> None:
        if self._drain is not None:
            if not self._drain.done():
                self._drain.set_result(None)
            self._drain = None


def _offers_websocket(headers: list[tuple[bytes, bytes]], version: str) -> bool:
    """Whether a request, which has no body, may be answered in WebSocket's frames (RFC 6455, section 4.2.1)."""
    if version != "1.1" or any(name in (b"content-length", b"transfer-encoding") for name, _ in headers):
        return False
    return [value.strip().lower() for name, value in headers if name == b"upgrade"] == [b"websocket"]


def _is_chunked(headers: list[tuple[bytes, bytes]], version: str) -> bool:
    """Whether a body comes in chunks and is wrapped in nothing else: nobody here would unwrap it."""
    return version == "1.1" and all(
        value.strip().lower() == b"chunked" for name, value in headers if name == b"transfer-encoding"
    )
