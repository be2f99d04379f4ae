"""A WebSocket (RFC 6455) on an upgraded HTTP/1.1 connection: receiving and sending messages, flow control, time limits.

The library ``websockets`` does the framing. Does not know what messages mean. Compression (RFC 7692) is not offered:
samples hardly compress, and the size of a decompressed message has no limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import Protocol, Side, State

from inferd import clock
from inferd.http.exchange import Headers
from inferd.http.handshake import answer_handshake
from inferd.http.stall import WriteStall
from inferd.http.upgrade import UpgradedConnection, UpgradeOffer

MAX_MESSAGE_BYTES: Final = 1 << 20
MESSAGES_PER_TURN: Final = 64  # received by one task before other tasks run
READ_BYTES: Final = 4 * 1024  # parsed in one turn of the event loop
AHEAD_BYTES: Final = 128 * 1024  # of messages that wait for ``receive``; beyond that no more is read
MESSAGE_BYTES: Final = 64  # memory of a waiting message besides its own bytes
WRITE_AHEAD_BYTES: Final = 64 * 1024  # in the transport's write buffer; beyond that writing pauses
PING_EVERY_S: Final = 20.0  # seconds without received bytes after which a ping is sent
PONG_S: Final = 20.0  # seconds after a ping within which something has to be received
CLOSE_S: Final = 5.0  # seconds for a client to answer a close frame
MAX_REASON_BYTES: Final = 123  # of a close frame (RFC 6455, section 5.5)

_log = logging.getLogger("inferd.http.websocket")
_log.setLevel(logging.WARNING)  # the library logs every closed connection at a lower level


class PeerDisconnected(Exception):
    """The client has disconnected, or the WebSocket is closing: nothing can be sent or received any more."""


class ServerShuttingDown(Exception):
    """The server is shutting down: no more messages are received."""


class WebSocket(UpgradedConnection):
    """The WebSocket of one client. One task at a time may call ``receive`` and ``send``.

    ``on_disconnect`` is called once when the client disconnects or closes the WebSocket. ``on_protocol_error`` is
    called when the client violates the protocol, with the code and reason of the close frame. It returns the text
    message that is sent before that frame.
    """

    __slots__ = (
        "_close_since",
        "_fragments",
        "_heard_at",
        "_is_disconnected",
        "_is_reading_paused",
        "_is_text",
        "_is_writable",
        "_messages",
        "_num_received",
        "_on_closed",
        "_pinged_at",
        "_protocol",
        "_response",
        "_send_s",
        "_stall",
        "_transport",
        "_unread",
        "_waiter",
        "_waiting_bytes",
        "is_stopping",
        "on_disconnect",
        "on_protocol_error",
    )
    __deletable__ = ("_on_closed",)

    _transport: asyncio.Transport
    _on_closed: Callable[[], None]

    def __init__(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Read the handshake from a request's path and headers (RFC 6455, section 4.2). Raises InvalidRequest."""
        self._response = answer_handshake(path, headers)
        self._protocol = Protocol(Side.SERVER, max_size=MAX_MESSAGE_BYTES, logger=_log)
        self._unread = bytearray()
        self._messages: deque[str | bytes] = deque()
        self._waiting_bytes = 0
        self._num_received = 0
        self._fragments = bytearray()  # of a message whose last fragment has not arrived
        self._is_text = False
        self._waiter: asyncio.Future[None] | None = None
        self._is_writable = True
        self._is_reading_paused = False
        self._is_disconnected = False
        self._heard_at = clock.now()
        self._pinged_at = 0.0  # when a ping was sent after which nothing was received; 0: there is none
        self._close_since = 0.0  # when a close frame was sent; 0: none was
        self._stall = WriteStall()
        self._send_s = 60.0
        self.is_stopping = False
        self.on_disconnect: Callable[[], None] | None = None
        self.on_protocol_error: Callable[[int, str], bytes] | None = None

    def accept(self, offer: UpgradeOffer, headers: Headers, serving: Coroutine[Any, Any, None]) -> None:
        """Accept the handshake: send its answer, with ``headers`` in addition, and run ``serving`` as a task.

        Raises BrokenPipeError when the client has disconnected.
        """
        for name, value in headers:
            self._response.headers[name.decode("latin-1")] = value.decode("latin-1")
        offer.upgrade(self, serving)

    # -- called by the task -----------------------------------------------------------------

    async def receive(self) -> str | bytes:
        """Wait for the next message. Raises PeerDisconnected, ServerShuttingDown."""
        while True:
            self._check()
            if self._messages:
                message = self._messages.popleft()
                self._waiting_bytes -= len(message) + MESSAGE_BYTES
                self._resume_reading()
                self._num_received += 1
                if self._num_received % MESSAGES_PER_TURN == 0:
                    await asyncio.sleep(0)  # other tasks run
                    self._check()
                return message
            await self._wait_for_change()

    async def send(self, text: bytes) -> None:
        """Send a text message in UTF-8. Waits while the write buffer is full. Raises PeerDisconnected."""
        if self._is_over:
            raise PeerDisconnected
        self._protocol.send_text(text)
        self._flush()
        while not self._is_writable:
            await self._wait_for_change()
            if self._is_over:
                raise PeerDisconnected

    def close(self, code: int, reason: str) -> None:
        """Send a close frame with ``code`` (RFC 6455, section 7.4) and ``reason``. Idempotent.

        The connection closes when the client has answered it, or after ``CLOSE_S``.
        """
        if self._is_over:
            return
        cut = reason.encode("utf-8")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
        self._protocol.send_close(code, cut)
        self._close_since = clock.now()
        self._messages.clear()
        self._flush()
        self._waiting_bytes = 0
        self._resume_reading()  # for the client's close frame

    @property
    def _is_over(self) -> bool:
        return self._is_disconnected or self._protocol.state is not State.OPEN

    def _check(self) -> None:
        if self._is_over:
            raise PeerDisconnected
        if self.is_stopping:
            raise ServerShuttingDown

    async def _wait_for_change(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- called by the transport ------------------------------------------------------------

    def start(self, transport: asyncio.Transport, send_s: float, on_closed: Callable[[], None]) -> None:
        self._transport = transport
        self._send_s = send_s
        self._on_closed = on_closed
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
        """Parse a part of a large read, which may hold thousands of frames, in each turn of the event loop."""
        data = bytes(self._unread[:READ_BYTES])
        del self._unread[:READ_BYTES]
        if self._is_disconnected:
            self._unread.clear()
            return
        self._read(data)
        if self._unread:
            asyncio.get_running_loop().call_soon(self._read_unread)
        else:
            self._resume_reading()

    def _read(self, data: bytes) -> None:
        was_open = self._protocol.state is State.OPEN
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Frame) and was_open:
                self._add_frame(event)
        fault = self._protocol.close_sent
        if was_open and fault is not None and self._protocol.close_rcvd is None and self.on_protocol_error is not None:
            self._transport.write(
                Frame(Opcode.TEXT, self.on_protocol_error(fault.code, fault.reason)).serialize(mask=False)
            )
        self._flush()
        self._wake()
        if self._waiting_bytes > AHEAD_BYTES and not self._is_over:
            self._pause_reading()

    def eof_received(self) -> None:
        """The client has closed its side. asyncio closes the transport after this call."""
        self._protocol.receive_eof()
        self._disconnect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disconnect()
        on_closed = self._on_closed
        del self._on_closed  # it refers to this object
        on_closed()
        self._protocol.parser.close()
        self._protocol.parser_exc = None

    def pause_writing(self) -> None:
        self._is_writable = False
        self._stall.begin(self._transport)
        self._pause_reading()  # reading a ping would write a pong

    def resume_writing(self) -> None:
        self._is_writable = True
        self._stall.end()
        self._wake()
        self._resume_reading()

    def _pause_reading(self) -> None:
        if not self._is_reading_paused and not self._transport.is_closing():
            self._is_reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if (
            self._is_reading_paused
            and self._is_writable
            and not self._unread
            and (self._waiting_bytes <= AHEAD_BYTES // 2 or self._is_over)
        ):
            self._is_reading_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _add_frame(self, frame: Frame) -> None:
        opcode = frame.opcode
        if opcode in (Opcode.TEXT, Opcode.BINARY):
            self._is_text = opcode is Opcode.TEXT
            if frame.fin:
                self._add_message(bytes(frame.data))
            else:
                self._fragments[:] = frame.data
        elif opcode is Opcode.CONT:
            self._fragments += frame.data
            if frame.fin:
                whole = bytes(self._fragments)
                self._fragments.clear()
                self._add_message(whole)
        elif opcode is Opcode.CLOSE:
            self._notify_disconnect()

    def _add_message(self, data: bytes) -> None:
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
            # Both close frames were exchanged. Reading continues: closing a socket with unread bytes resets the
            # connection, and the client might lose the close frame.
            self._close_since = self._close_since or clock.now()
            if not self._transport.is_closing() and self._transport.can_write_eof():
                self._transport.write_eof()
            self._notify_disconnect()

    def _disconnect(self) -> None:
        self._is_disconnected = True
        self._messages.clear()
        self._notify_disconnect()

    def _notify_disconnect(self) -> None:
        self._wake()
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        if on_disconnect is not None:
            on_disconnect()

    # -- called by the server ---------------------------------------------------------------

    def shut_down(self) -> None:
        self.is_stopping = True
        self._wake()

    def abort(self) -> None:
        self._transport.abort()

    def check_timeouts(self, now: float) -> None:
        if self._stall.is_active:
            if self._stall.has_expired(self._transport, now, self._send_s):
                self.abort()
        elif self._close_since:
            if now - self._close_since > CLOSE_S:
                self.abort()
        elif self._is_reading_paused or self._is_over:
            return
        elif self._pinged_at:
            if now - self._pinged_at > PONG_S:
                self.abort()
        elif now - self._heard_at > PING_EVERY_S:
            self._pinged_at = now
            self._protocol.send_ping(b"")
            self._flush()
