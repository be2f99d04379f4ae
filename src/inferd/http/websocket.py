"""A WebSocket (RFC 6455) on a connection that HTTP has begun: messages in, messages out, and when to give up.

Framing is ``websockets``' own state machine; here are bytes, time, and how much may wait. Nothing of what messages mean.
No compression is spoken: samples do not shrink, and what is inflated has no bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import Protocol, Side, State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from inferd import clock
from inferd.errors import InvalidRequest
from inferd.http.asgi import Headers as RawHeaders
from inferd.http.upgrade import Offer, Successor

SUBPROTOCOL: Final = "inferd"
MAX_MESSAGE_BYTES: Final = 1 << 20
MESSAGES_PER_TURN: Final = 64  # that are received before others have their turn
READ_BYTES: Final = 4 * 1024  # that are looked at in one go
AHEAD_BYTES: Final = 128 * 1024  # of messages that wait to be looked at; then no more is read
MESSAGE_BYTES: Final = 64  # what a message costs beside its own bytes
WRITE_AHEAD_BYTES: Final = 64 * 1024
PING_EVERY_S: Final = 20.0  # of silence
PONG_S: Final = 20.0  # until something is heard again
CLOSE_S: Final = 5.0  # for a client to answer a close
MAX_REASON_BYTES: Final = 123

_log = logging.getLogger("inferd.http.websocket")
_log.setLevel(logging.WARNING)  # the state machine tells of every connection that ends


class PeerLeft(Exception):
    """There is nobody to talk to any more, or nobody who listens."""


class ServerLeaves(Exception):
    """The server is shutting down: nothing more is read."""


class WebSocket(Successor):
    """One client. ``receive`` and ``send`` are for one task; ``on_left`` is called when the client is gone, ``on_fault``
    gives the last message to one who breaks the protocol, by the close's code and reason."""

    __slots__ = (
        "_close_since",
        "_gone",
        "_has_left",
        "_heard_at",
        "_is_read_paused",
        "_is_text",
        "_is_writable",
        "_messages",
        "_num_received",
        "_part",
        "_pinged_at",
        "_protocol",
        "_response",
        "_send_s",
        "_stuck_bytes",
        "_stuck_since",
        "_transport",
        "_unread",
        "_waiter",
        "_waiting_bytes",
        "is_stopping",
        "on_fault",
        "on_left",
    )

    _transport: asyncio.Transport
    _gone: Callable[[], None]

    def __init__(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Reads the handshake from a request's path and headers. Raises InvalidRequest."""
        handshake = _Handshake(logger=_log)
        self._response = handshake.accept(_request(path, headers))
        handshake.parser.close()  # it refers back, and both would wait for the collector
        if self._response.status_code != 101:
            why = " ".join(self._response.body.decode("utf-8", "replace").split())
            raise InvalidRequest(f"The WebSocket handshake is not valid: {why}", code="invalid_handshake")
        self._protocol = Protocol(Side.SERVER, max_size=MAX_MESSAGE_BYTES, logger=_log)
        self._unread = bytearray()
        self._messages: deque[str | bytes] = deque()
        self._waiting_bytes = 0
        self._num_received = 0
        self._part = bytearray()  # of a message in fragments
        self._is_text = False
        self._waiter: asyncio.Future[None] | None = None
        self._is_writable = True
        self._is_read_paused = False
        self._has_left = False
        self._heard_at = clock.now()
        self._pinged_at = 0.0  # 0: nothing is expected
        self._close_since = 0.0  # 0: no close was sent
        self._stuck_since = 0.0
        self._stuck_bytes = 0
        self._send_s = 60.0
        self.is_stopping = False
        self.on_left: Callable[[], None] | None = None
        self.on_fault: Callable[[int, str], bytes] | None = None

    def accept(self, offer: Offer, headers: RawHeaders, serving: Coroutine[Any, Any, None]) -> None:
        """Answer the handshake, with ``headers`` beside its own, and take the connection over.

        Raises BrokenPipeError when the client has left.
        """
        for name, value in headers:
            self._response.headers[name.decode("latin-1")] = value.decode("latin-1")
        offer.take(self, serving)

    # -- the conversation -------------------------------------------------------------------

    async def receive(self) -> str | bytes:
        """The next message. Raises PeerLeft, ServerLeaves."""
        while True:
            self._check()
            if self._messages:
                message = self._messages.popleft()
                self._waiting_bytes -= len(message) + MESSAGE_BYTES
                self._read_on()
                self._num_received += 1
                if self._num_received % MESSAGES_PER_TURN == 0:
                    await asyncio.sleep(0)  # others have their turn
                    self._check()
                return message
            await self._change()

    async def send(self, text: bytes) -> None:
        """A text message; waits while the client takes none. Raises PeerLeft."""
        if self._is_over:
            raise PeerLeft
        self._protocol.send_text(text)
        self._flush()
        while not self._is_writable:
            await self._change()
            if self._is_over:
                raise PeerLeft

    def close(self, code: int, reason: str) -> None:
        """Say goodbye; the connection ends when the client has answered, or does not. Idempotent."""
        if self._is_over:
            return
        cut = reason.encode("utf-8")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
        self._protocol.send_close(code, cut)
        self._close_since = clock.now()
        self._messages.clear()
        self._flush()
        self._waiting_bytes = 0
        self._read_on()  # the client's answer is to be heard

    @property
    def _is_over(self) -> bool:
        return self._has_left or self._protocol.state is not State.OPEN

    def _check(self) -> None:
        if self._is_over:
            raise PeerLeft
        if self.is_stopping:
            raise ServerLeaves

    async def _change(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the transport's side ---------------------------------------------------------------

    def taken(self, transport: asyncio.Transport, send_s: float, gone: Callable[[], None]) -> None:
        self._transport = transport
        self._send_s = send_s
        self._gone = gone
        transport.set_write_buffer_limits(WRITE_AHEAD_BYTES)
        transport.write(self._response.serialize())

    def data_received(self, data: bytes) -> None:
        self._heard_at = clock.now()
        self._pinged_at = 0.0
        if self._unread or len(data) > READ_BYTES:
            if not self._unread:
                asyncio.get_running_loop().call_soon(self._read_unread)
            self._unread += data
            self._pause_reading()
        else:
            self._read(data)

    def _read_unread(self) -> None:
        """Bit by bit: in what was read at once there may be thousands of frames, and others have their turn."""
        data = bytes(self._unread[:READ_BYTES])
        del self._unread[:READ_BYTES]
        if self._has_left:
            self._unread.clear()
            return
        self._read(data)
        if self._unread:
            asyncio.get_running_loop().call_soon(self._read_unread)
        else:
            self._read_on()

    def _read(self, data: bytes) -> None:
        was_open = self._protocol.state is State.OPEN
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Frame) and was_open:
                self._put(event)
        fault = self._protocol.close_sent
        if was_open and fault is not None and self._protocol.close_rcvd is None and self.on_fault is not None:
            self._transport.write(Frame(Opcode.TEXT, self.on_fault(fault.code, fault.reason)).serialize(mask=False))
        self._flush()
        self._wake()
        if self._waiting_bytes > AHEAD_BYTES and not self._is_over:
            self._pause_reading()

    def eof_received(self) -> None:
        """The client says no more: the transport closes after this."""
        self._protocol.receive_eof()
        self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        gone = self._gone
        del self._gone  # it knows of this
        gone()
        self._protocol.parser.close()
        self._protocol.parser_exc = None

    def pause_writing(self) -> None:
        self._is_writable = False
        self._stuck_since = clock.now()
        self._stuck_bytes = self._transport.get_write_buffer_size()
        self._pause_reading()  # even a ping has an answer

    def resume_writing(self) -> None:
        self._is_writable = True
        self._stuck_since = 0.0
        self._wake()
        self._read_on()

    def _pause_reading(self) -> None:
        if not self._is_read_paused and not self._transport.is_closing():
            self._is_read_paused = True
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if (
            self._is_read_paused
            and self._is_writable
            and not self._unread
            and (self._waiting_bytes <= AHEAD_BYTES // 2 or self._is_over)
        ):
            self._is_read_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _put(self, frame: Frame) -> None:
        opcode = frame.opcode
        if opcode in (Opcode.TEXT, Opcode.BINARY):
            self._is_text = opcode is Opcode.TEXT
            if frame.fin:
                self._complete(bytes(frame.data))
            else:
                self._part[:] = frame.data
        elif opcode is Opcode.CONT:
            self._part += frame.data
            if frame.fin:
                whole = bytes(self._part)
                self._part.clear()
                self._complete(whole)
        elif opcode is Opcode.CLOSE:
            self._left()

    def _complete(self, data: bytes) -> None:
        message: str | bytes = data
        if self._is_text:
            try:
                message = data.decode("utf-8")
            except UnicodeDecodeError as error:
                self._protocol.fail(CloseCode.INVALID_DATA, f"A text message must be UTF-8; byte {error.start} is not.")
                return
        self._messages.append(message)
        self._waiting_bytes += len(message) + MESSAGE_BYTES

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                if not self._transport.is_closing():
                    self._transport.write(data)
                continue
            # All was said on both sides. What the client still sends is read, as otherwise the close might be lost.
            self._close_since = self._close_since or clock.now()
            if not self._transport.is_closing() and self._transport.can_write_eof():
                self._transport.write_eof()
            self._left()

    def _leave(self) -> None:
        self._has_left = True
        self._messages.clear()
        self._left()

    def _left(self) -> None:
        self._wake()
        on_left, self.on_left = self.on_left, None
        if on_left is not None:
            on_left()

    # -- the server's side ------------------------------------------------------------------

    def shut(self) -> None:
        self.is_stopping = True
        self._wake()

    def abort(self) -> None:
        self._transport.abort()

    def look(self, now: float) -> None:
        if self._stuck_since:
            left = self._transport.get_write_buffer_size()
            if left != self._stuck_bytes:
                self._stuck_bytes, self._stuck_since = left, now
            elif now - self._stuck_since > self._send_s:
                self.abort()
        elif self._close_since:
            if now - self._close_since > CLOSE_S:
                self.abort()
        elif self._is_read_paused or self._is_over:
            return
        elif self._pinged_at:
            if now - self._pinged_at > PONG_S:
                self.abort()
        elif now - self._heard_at > PING_EVERY_S:
            self._pinged_at = now
            self._protocol.send_ping(b"")
            self._flush()


class _Handshake(ServerProtocol):
    def select_subprotocol(self, subprotocols: Sequence[Subprotocol]) -> Subprotocol | None:
        """A client that offers none needs none."""
        return next((word for word in subprotocols if word == SUBPROTOCOL), None)


def _request(path: str, raw: Iterable[tuple[bytes, bytes]]) -> Request:
    """The handshake; the connection has read that it is one, and its offer is no header any more."""
    headers = Headers([("connection", "Upgrade"), ("upgrade", "websocket")])
    for name, value in raw:
        if name.startswith(b"sec-websocket-"):
            headers[name.decode("latin-1")] = value.decode("latin-1")
    return Request(path, headers)
