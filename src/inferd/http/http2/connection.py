"""One client's HTTP/2 connection: frames within limits, flow control in both directions, and time limits.

Knows RFC 9113. Does not know what requests mean. The frames of a read are processed at once, up to the cost of one turn
of the event loop (``http.cost``). What is written in one turn is sent in one write.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, cast

from inferd import clock
from inferd.http import cost
from inferd.http.http2 import frames as f
from inferd.http.http2.blocks import HeaderBlocks
from inferd.http.http2.frames import Fault
from inferd.http.http2.hpack import Header
from inferd.http.http2.receive_budget import ReceiveBudget
from inferd.http.http2.server import Server
from inferd.http.http2.stream import Stream
from inferd.http.limits import MAX_HEADER_BYTES
from inferd.http.stall import WriteStall
from inferd.http.tls import end_writing
from inferd.http.upgrade import ClientConnection, address_of

_log = logging.getLogger("inferd.http")

MAX_STREAMS: Final = 1024  # open at the same time
WINDOW: Final = 4 * 1024 * 1024  # for receiving, of the connection; streams limit what is buffered
WRITE_AHEAD_BYTES: Final = 256 * 1024  # in the transport's write buffer; beyond that reading pauses
GATHER_BYTES: Final = 64 * 1024  # written in one turn of the event loop; more is sent before the turn ends
HANDSHAKE_S: Final = 10.0  # seconds for the preface and the first SETTINGS
HEADER_S: Final = 30.0  # seconds for a header block in several frames
PING_AFTER_S: Final = 60.0  # seconds without received bytes after which the server sends a ping
PONG_S: Final = 20.0  # seconds after that ping within which something has to be received
MIN_PING_S: Final = 5.0  # seconds between two of the client's pings between which no answer was sent
MAX_EXCESS_PINGS: Final = 3  # of such pings that came sooner
CLOSE_S: Final = 1.0  # seconds for a peer to read GOAWAY before the connection ends or no more streams are accepted

_PING_PAYLOAD: Final = b"inferd.."  # of this server's pings

_HTTP1: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
    b"This port speaks gRPC, over HTTP/2; the other one (server.port) speaks HTTP/1.1.\n"
)
_SETTINGS: Final = f.settings(((f.MAX_CONCURRENT_STREAMS, MAX_STREAMS), (f.MAX_HEADER_LIST_SIZE, MAX_HEADER_BYTES)))
_PREFACE: Final = _SETTINGS + f.window_update(0, WINDOW - f.FIRST_WINDOW)


class Phase(IntEnum):
    """The life of a connection. Phases follow in this order; some are skipped."""

    PREFACE = 0  # the client's preface has not arrived (RFC 9113, section 3.4)
    SETTINGS = 1  # its first SETTINGS have not arrived
    OPEN = 2
    SHUTTING_DOWN = 3  # GOAWAY was announced; streams are accepted until the client has seen it (section 6.8)
    DRAINING = 4  # no further streams are accepted; the open ones are finished
    CLOSING = 5  # nothing is read any more; what was written is being sent
    FAILED = 6  # likewise after a connection error, but only for ``CLOSE_S``
    CLOSED = 7


_PREFACE_PHASE, _SETTINGS_PHASE, _OPEN, _SHUTTING_DOWN, _DRAINING, _CLOSING, _FAILED, _CLOSED = Phase


class Connection(ClientConnection):
    """Serves the streams of one client."""

    __slots__ = (
        "_blocks",
        "_budget",
        "_excess_pings",
        "_expected_kind",
        "_has_received",
        "_is_turn_pending",
        "_last_seen",
        "_last_served",
        "_out",
        "_out_bytes",
        "_phase",
        "_ping_sent_at",
        "_pinged_at",
        "_ready",
        "_receivable",
        "_received_at",
        "_server",
        "_since",
        "_soon",
        "_stall",
        "_timer",
        "_transport",
        "_unacknowledged",
        "_unparsed",
        "cost",
        "cost_credit",
        "first_window",
        "has_answered",
        "is_closing",
        "is_writable",
        "max_frame",
        "receive_budget",
        "send_queue",
        "sendable",
        "streams",
        "table_update",
    )

    _transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self._server = server
        self._soon = server.call_soon
        self._phase = _PREFACE_PHASE
        self.is_closing = False  # nothing is read any more; faster than comparing the phase for each frame
        self._since = now = clock.now()  # of the phase, where it has a time limit
        self._timer: asyncio.TimerHandle | None = None  # ends the connection after it began to close
        # Reading.
        self._unparsed = b""  # of an incomplete frame, or what one turn has left
        self._is_turn_pending = False  # ``_unparsed`` waits for a turn of the event loop
        self._expected_kind: int | None = f.SETTINGS  # the only kind of frame that may follow; None: any
        self._blocks = HeaderBlocks()
        self._last_seen = 0  # the last stream that the client has opened
        self._last_served = 0  # while draining: the last stream that is served
        self._receivable = WINDOW  # bytes that the client may still send
        self._unacknowledged = 0  # received bytes by which the window was not opened again yet
        self.receive_budget = ReceiveBudget()
        # Cost and liveness.
        self._budget = cost.CostBudget(now)
        self.cost = 0  # of this turn, in units of ``http.cost``
        self.cost_credit = 0  # since it was last added to the budget
        self._pinged_at = 0.0  # when the client sent its last ping
        self._excess_pings = 0
        self.has_answered = False  # since the client's last ping
        self._has_received = False  # since the last check of timeouts
        self._received_at = now
        self._ping_sent_at = 0.0  # when the server sent a ping after which nothing was received; 0: there is none
        # Writing.
        self._out: list[bytes] = []  # written in this turn, and not passed to the transport yet
        self._out_bytes = 0
        self._stall = WriteStall()
        self.streams: dict[int, Stream] = {}
        self._ready: deque[Callable[[], None]] = deque()  # called after the frames of this read are processed
        self.send_queue: deque[Stream] = deque()
        self.sendable = f.FIRST_WINDOW
        self.first_window = f.FIRST_WINDOW
        self.max_frame = f.MAX_FRAME
        self.table_update = b""
        self.is_writable = True

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self.is_closing = phase >= _CLOSING

    # -- called by the transport ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._server.accepts_connection():
            self._enter(_CLOSED)
            self._transport.write(
                _SETTINGS + f.goaway(0, f.ENHANCE_YOUR_CALM, "too_many_connections: raise server.max_connections")
            )
            self._transport.close()
            return
        self._transport.set_write_buffer_limits(WRITE_AHEAD_BYTES)
        self._server.connections.add(self)

    @property
    def peer(self) -> str:
        return address_of(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter(_CLOSED)
        self._out.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._cancel_streams()
        self._server.connection_closed(self)

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        if self.is_closing:
            return
        if self._unparsed:
            data = self._unparsed + data
            self._unparsed = b""
        if self._is_turn_pending:
            self._unparsed = data
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        """Process as many frames as one turn allows, and keep the rest."""
        self.cost += cost.READ
        try:
            at = 0
            if self._phase is _PREFACE_PHASE:
                at = self._read_preface(data)
                if not at:
                    return
            if self._is_ready_done():
                at = self._read_frames(data, at)
                self._is_ready_done()
            spent, earned, self.cost, self.cost_credit = self.cost, self.cost_credit, 0, 0
            if not self._budget.spend(spent, earned, clock.now):
                raise Fault(f.ENHANCE_YOUR_CALM, "too_much_work")
        except Fault as fault:
            self._fail(fault.code, fault.why)
            return
        except Exception:
            # The event loop would not close the connection after every callback that calls this.
            _log.exception("a connection's frames could not be taken")
            self._fail(f.INTERNAL_ERROR, "internal_error")
            return
        if at < len(data):
            self._unparsed = data[at:]
        if (self._ready or (self._unparsed and spent >= cost.MAX_PER_TURN)) and not self.is_closing:
            self._wait_for_turn()
        if self._unacknowledged >= WINDOW // 2:
            self._receivable += self._unacknowledged
            self.write(f.window_update(0, self._unacknowledged))
            self._unacknowledged = 0

    def call_in_turn(self, call: Callable[[], None]) -> None:
        self._server.turn_queue.add(call)

    def _is_ready_done(self) -> bool:
        """Run the calls of ``after_frames``, up to the cost of a turn; False: some of them wait for another turn."""
        while self._ready and self.cost < cost.MAX_PER_TURN:
            self._ready.popleft()()
        return not self._ready

    def after_frames(self, call: Callable[[], None]) -> None:
        """Call ``call`` after the frames of the current read were processed, as one of them may cancel the request."""
        self._ready.append(call)

    def _wait_for_turn(self) -> None:
        """Pause reading, and process the rest of the frames in another turn."""
        self._is_turn_pending = True
        self._transport.pause_reading()
        self._server.turn_queue.add(self._continue)

    def _continue(self) -> None:
        self._is_turn_pending = False
        if self._transport.is_closing():
            return
        if not self.is_closing:
            if not self.is_writable:
                return  # ``resume_writing`` continues
            data, self._unparsed = self._unparsed, b""
            self._read(data)
        if not self._is_turn_pending and self.is_writable:
            self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        if self.is_closing:
            return
        out = self._out
        if not out:
            self._soon(self._flush)
        out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes > GATHER_BYTES:
            self._flush()

    def _flush(self) -> None:
        out = self._out
        if out:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
            self._out_bytes = 0
            out.clear()

    def pause_writing(self) -> None:
        """Pause reading as well, so that a client that reads nothing cannot make the server write more."""
        self.is_writable = False
        self._stall.begin(self._transport)
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.is_writable = True
        self._stall.end()
        if not self._is_turn_pending and not self._transport.is_closing():
            if self._unparsed or self._ready:
                self._wait_for_turn()
            else:
                self._transport.resume_reading()
        self.pump()
        for stream in tuple(self.streams.values()):
            if not stream.is_blocked:
                stream.drained()

    def charge(self, cost: int) -> None:
        self.cost += cost

    # -- frames -----------------------------------------------------------------------------

    def _read_preface(self, data: bytes) -> int:
        """Read the client's preface. Return its size; 0: it is incomplete, or the client does not speak HTTP/2."""
        size = len(f.PREFACE)
        if data[:size] != f.PREFACE:
            if f.PREFACE.startswith(data):
                self._unparsed = data
            else:
                self._enter(_CLOSED)
                self._transport.write(_HTTP1)
                self._transport.close()
            return 0
        self._enter(_SETTINGS_PHASE)
        self.write(_PREFACE)
        return size

    def _read_frames(self, data: bytes, at: int) -> int:
        """Process complete frames from ``at`` on, within the turn's cost. Return where the last ends. Raises Fault."""
        unpack, streams, end, turn = f.HEAD.unpack_from, self.streams, len(data), cost.MAX_PER_TURN
        while end - at >= f.HEAD_BYTES and self.cost < turn:
            high, low, kind, flags, number = unpack(data, at)
            size = high << 8 | low
            if size > f.MAX_FRAME:
                raise Fault(f.FRAME_SIZE_ERROR, f"a frame of {size} bytes; at most {f.MAX_FRAME} are taken")
            start = at + f.HEAD_BYTES
            stop = start + size
            if stop > end:
                break
            at = stop
            number &= 0x7FFFFFFF
            if self._expected_kind is not None and kind != self._expected_kind:
                raise Fault(f.PROTOCOL_ERROR, f"a frame of kind {kind} where kind {self._expected_kind} must come")
            self.cost += cost.FRAME + (size >> 9)
            if kind == f.DATA:
                self._receivable -= size
                self._unacknowledged += size
                if self._receivable < 0:
                    raise Fault(f.FLOW_CONTROL_ERROR, "more than the connection's window")
                stream = streams.get(number)
                if stream is None or stream.is_request_complete:
                    self._late_data(number, stream)
                    continue
                stream.receivable -= size
                if stream.receivable < 0:
                    self._reset_stream(stream, f.FLOW_CONTROL_ERROR)
                    continue
                if flags & f.PADDED:
                    start, stop = _unpadded(data, start, stop)
                if flags & f.END_STREAM:
                    stream.is_request_complete = True
                    stream.data_received(data, start, stop, True)
                else:
                    self.cost_credit += stop - start >> 4
                    stream.data_received(data, start, stop, False)
            elif kind == f.HEADERS:
                self._headers(number, data, start, stop, flags)
            else:
                self._control_frame(kind, flags, number, data[start:stop])
            if self.is_closing:
                return end
        return at

    def _headers(self, number: int, data: bytes, start: int, stop: int, flags: int) -> None:
        if not number & 1:
            raise Fault(f.PROTOCOL_ERROR, f"a client began the stream {number}")
        if flags & f.PADDED:
            start, stop = _unpadded(data, start, stop)
        if flags & f.WITH_PRIORITY:
            if stop - start < 5:
                raise Fault(f.FRAME_SIZE_ERROR, "HEADERS without room for their priority")
            if int.from_bytes(data[start : start + 4], "big") & 0x7FFFFFFF == number:
                raise Fault(f.PROTOCOL_ERROR, f"the stream {number} depends on itself")
            start += 5
        is_end = bool(flags & f.END_STREAM)
        if flags & f.END_HEADERS:
            self._block_complete(number, data[start:stop], is_end)
            return
        self._blocks.begin(number, data[start:stop], is_end, clock.now())
        self._expected_kind = f.CONTINUATION

    def _continuation(self, number: int, payload: bytes, is_last: bool) -> None:
        self._blocks.append(number, payload)
        if is_last:
            self._expected_kind = None
            self._block_complete(number, *self._blocks.whole())

    def _block_complete(self, number: int, block: bytes, is_end: bool) -> None:
        if number <= self._last_seen:
            self._trailers(number, block, is_end)
            return
        head = self._blocks.known.get(block)
        if head is None:
            headers = self._decoded(block)
            self._last_seen = number
            head = self._server.read_head(headers)
            if head is None:
                self.write(f.reset(number, f.PROTOCOL_ERROR))
                return
            self._blocks.remember(block, head)
        self._last_seen = number
        if self._phase is _DRAINING and number > self._last_served:
            return  # the client knows from GOAWAY that the stream is not processed
        if len(self.streams) >= MAX_STREAMS:
            self.write(f.reset(number, f.REFUSED_STREAM))
            return
        self.cost += cost.STREAM
        stream = self._server.open_stream(self, number, head)
        if not stream.is_over:
            self.streams[number] = stream
            if is_end:
                stream.is_request_complete = True
                stream.data_received(b"", 0, 0, True)

    def _decoded(self, block: bytes) -> Sequence[Header] | None:
        """As ``HeaderBlocks.decode``, with the cost."""
        self.cost += cost.HEADERS + len(block)
        headers = self._blocks.decode(block)
        self.cost += self._blocks.num_headers * cost.HEADER
        return headers

    def _trailers(self, number: int, block: bytes, is_end: bool) -> None:
        """Trailers of a request. They are decoded, because they may change HPACK's table, and not used."""
        headers = self._decoded(block)
        stream = self.streams.get(number)
        if stream is None:
            return  # the stream was answered or cancelled before
        if stream.is_request_complete:
            self._reset_stream(stream, f.STREAM_CLOSED)
        elif not is_end or headers is None or any(name[:1] == b":" for name, _ in headers):
            self._reset_stream(stream, f.PROTOCOL_ERROR)
        else:
            stream.is_request_complete = True
            stream.data_received(b"", 0, 0, True)

    def _late_data(self, number: int, stream: Stream | None) -> None:
        """DATA of a stream that is not open (RFC 9113, section 5.1)."""
        if not number or number > self._last_seen:
            raise Fault(f.PROTOCOL_ERROR, f"DATA of the stream {number}, which has not begun")
        if stream is not None:
            self._reset_stream(stream, f.STREAM_CLOSED)

    def _control_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == f.WINDOW_UPDATE:
            self._window_update(number, payload)
        elif kind == f.RST_STREAM:
            self._reset(number, payload)
        elif kind == f.PING:
            self._ping(number, flags, payload)
        elif kind == f.SETTINGS:
            self._settings(number, flags, payload)
        elif kind == f.CONTINUATION:
            self._continuation(number, payload, bool(flags & f.END_HEADERS))
        elif kind == f.PUSH_PROMISE:
            raise Fault(f.PROTOCOL_ERROR, "a client promised a stream")
        elif kind == f.GOAWAY:
            if number or len(payload) < 8:
                raise Fault(f.PROTOCOL_ERROR if number else f.FRAME_SIZE_ERROR, "GOAWAY of a wrong form")
        else:  # PRIORITY, which is deprecated (section 5.3.2), or an unknown kind, which is ignored (section 4.1)
            if kind == f.PRIORITY and (not number or len(payload) != 5):
                raise Fault(f.FRAME_SIZE_ERROR if number else f.PROTOCOL_ERROR, "PRIORITY of a wrong form")

    def _window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Fault(f.FRAME_SIZE_ERROR, "WINDOW_UPDATE of a wrong size")
        more = int.from_bytes(payload, "big") & 0x7FFFFFFF
        if not number:
            self.sendable += more
            if not more or self.sendable > f.MAX_WINDOW:
                raise Fault(f.FLOW_CONTROL_ERROR if more else f.PROTOCOL_ERROR, "a window of no possible size")
        else:
            if number > self._last_seen or not number & 1:
                raise Fault(f.PROTOCOL_ERROR, f"WINDOW_UPDATE of the stream {number}, which has not begun")
            stream = self.streams.get(number)
            if stream is None:
                return
            stream.window_offset += more
            if not more or self.first_window + stream.window_offset > f.MAX_WINDOW:
                self._reset_stream(stream, f.FLOW_CONTROL_ERROR if more else f.PROTOCOL_ERROR)
                return
            stream.enqueue()
        if self.send_queue:
            self.pump()

    def _reset(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Fault(f.FRAME_SIZE_ERROR, "RST_STREAM of a wrong size")
        if not number & 1 or number > self._last_seen:
            raise Fault(f.PROTOCOL_ERROR, f"RST_STREAM of the stream {number}, which has not begun")
        stream = self.streams.get(number)
        if stream is not None:
            self._cancel_stream(stream)

    def _ping(self, number: int, flags: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise Fault(f.PROTOCOL_ERROR if number else f.FRAME_SIZE_ERROR, "PING of a wrong form")
        if flags & f.ACK:
            if self._phase is _SHUTTING_DOWN:
                self._send_final_goaway()
            return
        now = clock.now()
        if self.has_answered:
            self.has_answered, self._excess_pings = False, 0
        elif now - self._pinged_at < MIN_PING_S:
            self._excess_pings += 1
            if self._excess_pings > MAX_EXCESS_PINGS:
                raise Fault(f.ENHANCE_YOUR_CALM, "too_many_pings")
        self._pinged_at = now
        self.write(f.frame(f.PING, f.ACK, 0, payload))

    def _settings(self, number: int, flags: int, payload: bytes) -> None:
        if number:
            raise Fault(f.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & f.ACK:
            if payload:
                raise Fault(f.FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS with content")
            if self._expected_kind is not None:
                raise Fault(f.PROTOCOL_ERROR, "an acknowledgement in place of SETTINGS")
            return
        self._expected_kind = None
        if self._phase is _SETTINGS_PHASE:
            self._enter(_OPEN)
        self.cost += cost.FRAME * (2 + len(self.streams))
        for name, value in dict(f.read_settings(payload)).items():  # the last value of a name counts
            if name == f.INITIAL_WINDOW_SIZE:
                if value > f.MAX_WINDOW or any(
                    value + one.window_offset > f.MAX_WINDOW for one in self.streams.values()
                ):
                    raise Fault(f.FLOW_CONTROL_ERROR, f"windows of {value} bytes")
                self.first_window = value
            elif name == f.MAX_FRAME_SIZE:
                if not f.MAX_FRAME <= value < 1 << 24:
                    raise Fault(f.PROTOCOL_ERROR, f"frames of {value} bytes")
                self.max_frame = value
            elif name == f.ENABLE_PUSH:
                if value > 1:
                    raise Fault(f.PROTOCOL_ERROR, f"ENABLE_PUSH is {value}")
            elif name == f.HEADER_TABLE_SIZE and value < 4096:
                self.table_update = b"\x20"  # required (RFC 7541, section 4.2), though this server's table is empty
        self.write(f.SETTINGS_ACK)
        for stream in self.streams.values():
            stream.enqueue()
        self.pump()

    # -- streams ----------------------------------------------------------------------------

    def stream_closed(self, stream: Stream) -> None:
        self.streams.pop(stream.id, None)
        if stream.reserved_bytes or stream.wanted_bytes:
            self.receive_budget.release(stream)
        if self._phase is _DRAINING and not self.streams:
            self._close(_CLOSING)

    def pump(self) -> None:
        queue = self.send_queue
        while queue and self.sendable > 0 and self.is_writable:
            stream = queue.popleft()
            stream.is_queued = False
            stream.pump()

    def _reset_stream(self, stream: Stream, code: int) -> None:
        """A stream error (RFC 9113, section 5.4.2)."""
        self.write(f.reset(stream.id, code))
        self._cancel_stream(stream)

    def _cancel_stream(self, stream: Stream) -> None:
        self.cost += cost.STREAM
        stream.is_over = True
        stream.discard_pending()
        self.stream_closed(stream)
        stream.peer_cancelled()

    # -- the end ----------------------------------------------------------------------------

    def shut_down(self) -> None:
        """Shut down in two steps (RFC 9113, section 6.8), so that no request is lost that is on its way.

        The first GOAWAY announces the shutdown. When the client has answered the ping that follows it, or after
        ``CLOSE_S``, the second one names the last stream that is served.
        """
        if self._phase >= _SHUTTING_DOWN:
            return
        if self._phase is _PREFACE_PHASE:
            self._close(_CLOSING)
            return
        self._enter(_SHUTTING_DOWN)
        self._since = clock.now()
        self.write(f.goaway(f.MAX_WINDOW, f.NO_ERROR) + f.frame(f.PING, 0, 0, _PING_PAYLOAD))

    def _send_final_goaway(self) -> None:
        self._enter(_DRAINING)
        self._last_served = self._last_seen
        self.write(f.goaway(self._last_seen, f.NO_ERROR))
        if not self.streams:
            self._close(_CLOSING)

    def abort(self) -> None:
        self._transport.abort()

    def check_timeouts(self, now: float) -> None:
        if self._has_received:
            self._has_received, self._received_at, self._ping_sent_at = False, now, 0.0
        if self._stall.is_active and self._stall.has_expired(self._transport, now, self._server.send_s):
            self._transport.abort()
            return
        phase = self._phase
        if phase >= _CLOSING:
            return  # ``_timer`` ends the connection
        if phase <= _SETTINGS_PHASE:
            if now - self._since > HANDSHAKE_S:
                self._transport.abort()
        elif self._blocks.since and now - self._blocks.since > HEADER_S:
            self._fail(f.ENHANCE_YOUR_CALM, "headers that do not end")
        elif phase is _SHUTTING_DOWN and now - self._since > CLOSE_S:
            self._send_final_goaway()
        elif self._ping_sent_at:
            if now - self._ping_sent_at > PONG_S:
                self._transport.abort()
        elif now - self._received_at > PING_AFTER_S and self.is_writable:
            self._ping_sent_at = now
            self.write(f.frame(f.PING, 0, 0, _PING_PAYLOAD))
        for stream in tuple(self.streams.values()):
            stream.check_timeouts(now, self._server.send_s)

    def _fail(self, code: int, why: str) -> None:
        """End the connection with an error (RFC 9113, section 5.4.1).

        What the client sends is read and discarded for ``CLOSE_S``. Closing a socket with unread bytes resets the
        connection, and the client might lose GOAWAY.
        """
        self._unparsed = b""
        self.write(f.goaway(self._last_seen, code, why))
        self._close(_FAILED)
        self._cancel_streams()

    def _close(self, phase: Phase) -> None:
        """Send what was written, then end the connection. ``phase``: CLOSING or FAILED."""
        self._flush()
        self._enter(phase)
        if self._timer is None:
            self._since = clock.now()
            end_writing(self._transport)
            self._timer = asyncio.get_running_loop().call_later(CLOSE_S, self._abort_when_sent)

    def _abort_when_sent(self) -> None:
        is_sending = self._phase is _CLOSING and self._transport.get_write_buffer_size() > 0
        if is_sending and clock.now() - self._since < self._server.send_s:
            self._timer = asyncio.get_running_loop().call_later(CLOSE_S, self._abort_when_sent)
        else:
            self._transport.abort()

    def _cancel_streams(self) -> None:
        for stream in tuple(self.streams.values()):
            self._cancel_stream(stream)
        self.receive_budget.clear()


def _unpadded(data: bytes, start: int, stop: int) -> tuple[int, int]:
    """The payload without padding (RFC 9113, section 6.1). Raises Fault."""
    if start == stop:
        raise Fault(f.FRAME_SIZE_ERROR, "a padded frame without its padding's length")
    padding = data[start]
    if padding >= stop - start:
        raise Fault(f.PROTOCOL_ERROR, "more padding than frame")
    return start + 1, stop - padding
