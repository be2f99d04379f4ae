"""One client's HTTP/2 connection: frames within limits, flow control both ways, and when to give up.

Knows framing and time (RFC 9113), nothing of what is served. The frames that a read brought are looked at in one go, as far
as a turn of the loop goes (``http.cost``), and what is answered in one turn leaves in one write.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
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
from inferd.http.tls import end_writing
from inferd.http.upgrade import ClientConnection

_log = logging.getLogger("inferd.http")

MAX_STREAMS: Final = 1024
WINDOW: Final = 4 * 1024 * 1024  # of the connection; what is kept of what comes is the streams' to bound
WRITE_AHEAD_BYTES: Final = 256 * 1024
GATHER_BYTES: Final = 64 * 1024  # of answers, which are written before the loop's turn is over
HANDSHAKE_S: Final = 10.0
HEADER_S: Final = 30.0
PING_AFTER_S: Final = 60.0  # of silence, whether the peer is still there
PONG_S: Final = 20.0
MIN_PING_S: Final = 5.0  # between a client's pings to which nothing was said in between
MAX_EXCESS_PINGS: Final = 3
CLOSE_S: Final = 1.0  # for a peer to read why it is sent away, or to hear that no further stream is wanted

_PING_PAYLOAD: Final = b"inferd.."  # in our pings

_HTTP1: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
    b"This port speaks gRPC, over HTTP/2; the other one (server.port) speaks HTTP/1.1.\n"
)
_SETTINGS: Final = f.settings(((f.MAX_CONCURRENT_STREAMS, MAX_STREAMS), (f.MAX_HEADER_LIST_SIZE, MAX_HEADER_BYTES)))
_WELCOME: Final = _SETTINGS + f.window_update(0, WINDOW - f.FIRST_WINDOW)


class Connection(ClientConnection):
    """Serves the streams of one client."""

    __slots__ = (
        "_blocks",
        "_budget",
        "_excess_pings",
        "_expected_kind",
        "_has_preface",
        "_has_received",
        "_is_calm",
        "_is_ended",
        "_is_turn_pending",
        "_last_seen",
        "_last_served",
        "_leave_at",
        "_made_at",
        "_out",
        "_out_bytes",
        "_ping_sent_at",
        "_pinged_at",
        "_receivable",
        "_received_at",
        "_server",
        "_shut_at",
        "_soon",
        "_stuck_bytes",
        "_stuck_since",
        "_timer",
        "_transport",
        "_unacknowledged",
        "_unparsed",
        "cost",
        "cost_credit",
        "first_window",
        "has_answered",
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
        now = clock.now()
        self._server = server
        self._soon = server.call_soon
        self._out: list[bytes] = []  # written, and not yet given to the transport
        self._out_bytes = 0
        self._blocks = HeaderBlocks()
        self._unparsed = b""  # of a frame that has not come whole
        self._has_preface = False  # the preface has come
        self._is_ended = False  # a GOAWAY says why; nothing more is read
        self._expected_kind: int | None = f.SETTINGS  # the only kind of frame that may come next
        self._last_seen = 0  # the last stream that the client has begun
        self._receivable = WINDOW
        self._unacknowledged = 0  # of the window, and not given back yet
        self.receive_budget = ReceiveBudget()
        self._budget = cost.CostBudget(now)
        self._is_turn_pending = False  # for a turn to look at the rest of what was read
        self.cost = 0  # done in this turn
        self.cost_credit = 0  # since that was last entered
        self._excess_pings = 0
        self._pinged_at = 0.0  # when the client last asked whether we are there
        self._has_received = False  # something since the last look
        self._received_at = self._made_at = now
        self._last_served: int | None = None  # the last stream that is served
        self._shut_at = 0.0  # 0: the server stays
        self._leave_at = 0.0  # when it was decided that this connection ends
        self._is_calm = False  # and it ends in peace: what was written is to arrive
        self._stuck_since = 0.0
        self._stuck_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ping_sent_at = 0.0  # when we last asked whether the client is there; 0: it has said something since
        self.streams: dict[int, Stream] = {}
        self.send_queue: deque[Stream] = deque()  # those with something to say that their own windows would take
        self.sendable = f.FIRST_WINDOW
        self.first_window = f.FIRST_WINDOW  # of each stream, as the client has it
        self.max_frame = f.MAX_FRAME
        self.table_update = b""  # what the next header block has to begin with
        self.has_answered = False  # something else than what every client makes us say, since its last ping
        self.is_writable = True

    # -- the transport's side ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._server.accepts_connection():
            self._is_ended = True
            self._transport.write(
                _SETTINGS + f.goaway(0, f.ENHANCE_YOUR_CALM, "too_many_connections: raise server.max_connections")
            )
            self._transport.close()
            return
        self._transport.set_write_buffer_limits(WRITE_AHEAD_BYTES)
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_ended = True
        self._out.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._cancel_streams()
        self._server.connection_closed(self)

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        if self._is_ended:
            return
        if self._unparsed:
            data = self._unparsed + data
            self._unparsed = b""
        if self._is_turn_pending:
            self._unparsed = data
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        """Look at as much as a turn allows, and keep the rest."""
        self.cost += cost.READ
        try:
            at = 0
            if not self._has_preface:
                at = self._read_preface(data)
                if not at:
                    return
            at = self._read_frames(data, at)
            spent, earned, self.cost, self.cost_credit = self.cost, self.cost_credit, 0, 0
            if not self._budget.spend(spent, earned, clock.now):
                raise Fault(f.ENHANCE_YOUR_CALM, "too_much_work")
        except Fault as fault:
            self._fail(fault.code, fault.why)
            return
        except Exception:
            # A boundary: what is raised in a callback ends the connection and its calls, also where the loop does not.
            _log.exception("a connection's frames could not be taken")
            self._fail(f.INTERNAL_ERROR, "internal_error")
            return
        if at < len(data):
            self._unparsed = data[at:]
            if spent >= cost.MAX_PER_TURN and not self._is_ended:
                self._wait_for_turn()
        if self._unacknowledged >= WINDOW // 2:
            self._receivable += self._unacknowledged
            self.write(f.window_update(0, self._unacknowledged))
            self._unacknowledged = 0

    def call_in_turn(self, call: Callable[[], None]) -> None:
        """Call it in a turn of the loop in which no other connection goes on."""
        self._server.turn_queue.add(call)

    def _wait_for_turn(self) -> None:
        """The rest is looked at in another turn, and nothing is read before."""
        self._is_turn_pending = True
        self._transport.pause_reading()
        self._server.turn_queue.add(self._continue)

    def _continue(self) -> None:
        self._is_turn_pending = False
        if self._transport.is_closing():
            return
        if not self._is_ended:
            if not self.is_writable:
                return  # it goes on when its answers are taken
            data, self._unparsed = self._unparsed, b""
            self._read(data)
        if not self._is_turn_pending and self.is_writable:
            self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        """At the end of this turn of the loop, with whatever else is written until then."""
        if self._is_ended:
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
        """Nothing more is read from who does not read: whatever it sends, it cannot make us say more."""
        self.is_writable = False
        self._stuck_since = clock.now()
        self._stuck_bytes = self._transport.get_write_buffer_size()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.is_writable = True
        self._stuck_since = 0.0
        if not self._is_turn_pending and not self._transport.is_closing():
            if self._unparsed:
                self._wait_for_turn()
            else:
                self._transport.resume_reading()
        self.pump()
        for stream in tuple(self.streams.values()):
            if not stream.is_blocked:
                stream.drained()

    def charge(self, cost: int) -> None:
        """What a stream's message costs beside its frames, in units of ``http.cost``."""
        self.cost += cost

    # -- frames -----------------------------------------------------------------------------

    def _read_preface(self, data: bytes) -> int:
        """The preface; 0 while it is not complete, or wrong."""
        size = len(f.PREFACE)
        if data[:size] != f.PREFACE:
            if f.PREFACE.startswith(data):
                self._unparsed = data
            else:
                self._is_ended = True
                self._transport.write(_HTTP1)
                self._transport.close()
            return 0
        self._has_preface = True
        self.write(_WELCOME)
        return size

    def _read_frames(self, data: bytes, at: int) -> int:
        """Every whole frame from ``at`` on; returns where the last one ends. Raises Fault."""
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
            if self._is_ended:
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
        self._blocks.go_on(number, payload)
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
        if self._last_served is not None and number > self._last_served:
            return  # it has been told that nobody looks
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
        """As ``HeaderBlocks.decode``."""
        self.cost += cost.HEADERS + len(block)
        headers = self._blocks.decode(block)
        self.cost += self._blocks.num_headers * cost.HEADER
        return headers

    def _trailers(self, number: int, block: bytes, is_end: bool) -> None:
        """Headers behind a request's body: read, as the table has to be kept, and used by nobody."""
        headers = self._decoded(block)
        stream = self.streams.get(number)
        if stream is None:
            return  # we had answered without waiting for them, or it is a stream that was given up
        if stream.is_request_complete:
            self._reset_stream(stream, f.STREAM_CLOSED)
        elif not is_end or headers is None or any(name[:1] == b":" for name, _ in headers):
            self._reset_stream(stream, f.PROTOCOL_ERROR)
        else:
            stream.is_request_complete = True
            stream.data_received(b"", 0, 0, True)

    def _late_data(self, number: int, stream: Stream | None) -> None:
        """A body's bytes of a stream that takes none."""
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
        else:  # PRIORITY, which nobody heeds any more, or a kind that is not known
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
            if self._shut_at and self._last_served is None:
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
        self.cost += cost.FRAME * (2 + len(self.streams))
        for name, value in dict(f.read_settings(payload)).items():  # of several values the last one holds
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
                self.table_update = b"\x20"  # it wants to hear of that, though our table was empty before
        self.write(f.SETTINGS_ACK)
        for stream in self.streams.values():
            stream.enqueue()
        self.pump()

    # -- streams ----------------------------------------------------------------------------

    def stream_closed(self, stream: Stream) -> None:
        """Both sides have said everything, or one has given up."""
        self.streams.pop(stream.id, None)
        if stream.reserved_bytes or stream.wanted_bytes:
            self.receive_budget.release(stream)
        if self._last_served is not None and not self.streams:
            self._close(is_calm=True)

    def pump(self) -> None:
        """Say what the connection's window has kept back: a frame of each stream in turn."""
        queue = self.send_queue
        while queue and self.sendable > 0 and self.is_writable:
            stream = queue.popleft()
            stream.is_queued = False
            stream.pump()

    def _reset_stream(self, stream: Stream, code: int) -> None:
        """The client has broken a rule of its stream."""
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
        """The server is leaving. First the client hears that it should begin nothing; what it has begun by the time
        it has heard of that is served."""
        if self._shut_at or self._is_ended:
            return
        self._shut_at = clock.now()
        if not self._has_preface:
            self._close(is_calm=True)
            return
        self.write(f.goaway(f.MAX_WINDOW, f.NO_ERROR) + f.frame(f.PING, 0, 0, _PING_PAYLOAD))

    def _send_final_goaway(self) -> None:
        self._last_served = self._last_seen
        self.write(f.goaway(self._last_seen, f.NO_ERROR))
        if not self.streams:
            self._close(is_calm=True)

    def abort(self) -> None:
        self._transport.abort()

    def check_timeouts(self, now: float) -> None:
        """Give up on a client that takes too long, or is not there."""
        if self._has_received:
            self._has_received, self._received_at, self._ping_sent_at = False, now, 0.0
        if self._stuck_since:
            left = self._transport.get_write_buffer_size()
            if left != self._stuck_bytes:
                self._stuck_bytes, self._stuck_since = left, now
            elif now - self._stuck_since > self._server.send_s:
                self._transport.abort()
                return
        if self._is_ended:
            return
        if self._expected_kind == f.SETTINGS:
            if now - self._made_at > HANDSHAKE_S:
                self._transport.abort()
        elif self._blocks.since and now - self._blocks.since > HEADER_S:
            self._fail(f.ENHANCE_YOUR_CALM, "headers that do not end")
        elif self._shut_at and self._last_served is None and now - self._shut_at > CLOSE_S:
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
        """Send the client away. What it still sends is read and not looked at for a moment: who closes a connection
        with unread bytes takes back what was written last."""
        self._unparsed = b""
        self.write(f.goaway(self._last_seen, code, why))
        self._close(is_calm=False)
        self._cancel_streams()

    def _close(self, *, is_calm: bool) -> None:
        """What was written goes out; then the connection ends."""
        self._flush()
        self._is_ended = True
        self._is_calm = is_calm
        if self._timer is None:
            self._leave_at = clock.now()
            end_writing(self._transport)
            self._timer = asyncio.get_running_loop().call_later(CLOSE_S, self._abort_when_sent)

    def _abort_when_sent(self) -> None:
        is_on_its_way = self._is_calm and self._transport.get_write_buffer_size() > 0
        if is_on_its_way and clock.now() - self._leave_at < self._server.send_s:
            self._timer = asyncio.get_running_loop().call_later(CLOSE_S, self._abort_when_sent)
        else:
            self._transport.abort()

    def _cancel_streams(self) -> None:
        """Nothing that is under way will be heard."""
        for stream in tuple(self.streams.values()):
            self._cancel_stream(stream)
        self.receive_budget.clear()


def _unpadded(data: bytes, start: int, stop: int) -> tuple[int, int]:
    if start == stop:
        raise Fault(f.FRAME_SIZE_ERROR, "a padded frame without its padding's length")
    padding = data[start]
    if padding >= stop - start:
        raise Fault(f.PROTOCOL_ERROR, "more padding than frame")
    return start + 1, stop - padding
