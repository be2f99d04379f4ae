"""One stream of a connection: what is written to it within the windows of flow control, and what it may still bring.

Knows frames and windows (RFC 9113, section 5.2); a subclass knows what is said.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from inferd import clock
from inferd.http.cost import ANSWER_CREDIT, FRAME
from inferd.http.http2.frames import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW,
    HEAD,
    HEADERS,
    NO_ERROR,
    headers,
    reset,
    window_update,
)
from inferd.http.http2.receive_budget import ReceiveBudget

SLOWEST: Final = 16 * 1024  # bytes per second, behind which a peer's time is not prolonged

_DATA_TAIL: Final = bytes((DATA, 0))
_LAST_HEADERS: Final = bytes((HEADERS, END_HEADERS | END_STREAM))
_FIRST_HEADERS: Final = bytes((HEADERS, END_HEADERS))


class StreamConnection(Protocol):
    """What a stream uses of its connection."""

    receive_budget: ReceiveBudget
    send_queue: deque[Stream]  # streams with pending bytes that their own windows allow
    sendable: int  # bytes that the connection's window allows
    first_window: int  # the window of a new stream
    max_frame: int
    table_update: bytes  # the beginning of the next header block
    has_answered: bool  # an answer was sent since the client's last ping
    cost_credit: int
    cost: int
    is_writable: bool

    def write(self, data: bytes, /) -> None: ...
    def pump(self) -> None:
        """Send one frame of each stream in ``line`` in turn, as far as the windows allow."""

    def stream_closed(self, stream: Stream, /) -> None:
        """Forget a stream that is over."""

    def charge(self, cost: int, /) -> None:
        """Count ``cost``, in units of ``http.cost``, for a message of a stream."""

    def call_in_turn(self, call: Callable[[], None], /) -> None:
        """Call it in a turn of the loop in which no other connection continues."""


class Stream(ABC):
    """A request and its answer. It is over when both sides have said everything, or one of them gives up."""

    __slots__ = (
        "_blocked_since",
        "_last_sent_at",
        "_pending",
        "_sent_bytes",
        "_trailers",
        "connection",
        "id",
        "is_over",
        "is_queued",
        "is_request_complete",
        "receivable",
        "reserved_bytes",
        "wanted_bytes",
        "window_offset",
    )

    def __init__(self, connection: StreamConnection, number: int) -> None:
        self.connection = connection
        self.id = number
        self.window_offset = 0  # what the peer takes beyond its window for new streams; less than 0 when it took some
        self.receivable = FIRST_WINDOW  # bytes that the peer may still send
        self.wanted_bytes = 0  # bytes to be granted when there is room for them
        self.is_request_complete = False
        self.is_over = False
        self.is_queued = False  # for the connection's window
        self.reserved_bytes = 0  # bytes of a large message that the connection counts
        self._pending: deque[memoryview] | None = None  # what the windows did not take yet
        self._trailers: bytes | None = None  # behind it

    # -- the peer's side, called by the connection ------------------------------------------

    @abstractmethod
    def data_received(self, data: bytes, start: int, stop: int, is_end: bool) -> None:
        """``data[start:stop]`` came; with ``is_end`` nothing more will."""

    @abstractmethod
    def peer_cancelled(self) -> None:
        """The peer has given it up, or is gone: nothing can be said any more."""

    @abstractmethod
    def drained(self) -> None:
        """What did not fit into the windows has left."""

    @abstractmethod
    def send_timed_out(self) -> None:
        """The peer has taken nothing, or too little, for too long."""

    def check_timeouts(self, now: float, timeout_s: float) -> None:
        """About once a second."""
        if self._pending is not None and (
            now - self._last_sent_at > timeout_s or now - self._blocked_since > timeout_s + self._sent_bytes / SLOWEST
        ):
            self.send_timed_out()

    # -- what may come ----------------------------------------------------------------------

    def request_window(self, size: int) -> None:
        """``size`` bytes are wanted that will be kept until they are complete: let them come as soon as the
        connection keeps few enough."""
        self.wanted_bytes = size
        self.connection.receive_budget.request(self)

    def grant_window(self, size: int) -> None:
        """The peer may send so many bytes more."""
        self.receivable += size
        self.connection.write(window_update(self.id, size))

    # -- what is said -----------------------------------------------------------------------

    @property
    def is_blocked(self) -> bool:
        return self._pending is not None

    def send_answer(self, head: bytes, prefix: bytes, body: bytes, trailers: bytes) -> None:
        """A whole answer: header block, ``prefix`` and ``body``, trailers."""
        connection = self.connection
        size = len(prefix) + len(body)
        if (
            size > connection.sendable
            or size > connection.first_window + self.window_offset
            or size > connection.max_frame
            or connection.table_update
            or len(trailers) > connection.max_frame
        ):
            self.send_headers(head)
            self.send_data(prefix + body)  # which is what it earns
            self.send_trailers(trailers)
            return
        connection.sendable -= size
        connection.has_answered = True
        connection.cost_credit += ANSWER_CREDIT
        number = self.id.to_bytes(4, "big")
        connection.write(
            b"".join(
                (
                    len(head).to_bytes(3, "big"),
                    _FIRST_HEADERS,
                    number,
                    head,
                    size.to_bytes(3, "big"),
                    _DATA_TAIL,
                    number,
                    prefix,
                    body,
                    len(trailers).to_bytes(3, "big"),
                    _LAST_HEADERS,
                    number,
                    trailers,
                )
            )
        )
        self._finish()

    def send_headers_only(self, block: bytes) -> None:
        """An answer of headers alone."""
        self._write_headers(block, is_end=True)
        self._finish()

    def send_headers(self, head: bytes) -> None:
        self._write_headers(head, is_end=False)

    def send_data(self, data: bytes) -> None:
        """Say it as far as the windows allow; the rest waits."""
        connection = self.connection
        size = len(data)
        connection.cost_credit += ANSWER_CREDIT + size
        if (
            self._pending is None
            and size <= connection.sendable
            and size <= connection.first_window + self.window_offset
            and size <= connection.max_frame
        ):
            connection.sendable -= size
            self.window_offset -= size
            connection.has_answered = True
            connection.write(HEAD.pack(size >> 8, size & 0xFF, DATA, 0, self.id) + data)
            return
        if self._pending is None:
            self._pending = deque()
            self._blocked_since = self._last_sent_at = clock.now()
            self._sent_bytes = 0
        self._pending.append(memoryview(data))
        self.enqueue()
        connection.pump()

    def send_trailers(self, trailers: bytes) -> None:
        """Nothing more is said behind what waits and these."""
        if self._pending is not None:
            self._trailers = trailers
            return
        self._write_headers(trailers, is_end=True)
        self._finish()

    def reset(self, code: int = CANCEL) -> None:
        """Give it up."""
        if not self.is_over:
            self.connection.write(reset(self.id, code))
            self._close()

    def enqueue(self) -> None:
        """If something waits, and the stream's own window would take some of it, wait for the connection's."""
        if self._pending is not None and not self.is_queued and self.connection.first_window + self.window_offset > 0:
            self.is_queued = True
            self.connection.send_queue.append(self)

    def pump(self) -> None:
        """Say what waits, in one frame, as far as the windows allow."""
        connection, pending = self.connection, self._pending
        if pending is None:
            return  # it was given up while it stood in line
        room = min(connection.sendable, connection.first_window + self.window_offset, connection.max_frame)
        if room <= 0:
            return
        piece = pending[0]
        size = len(piece)
        if size <= room:
            pending.popleft()
        else:
            pending[0] = piece[room:]
            piece = piece[:room]
            size = room
        connection.cost += FRAME + (size >> 9)
        connection.sendable -= size
        self.window_offset -= size
        self._sent_bytes += size
        self._last_sent_at = clock.now()
        connection.has_answered = True
        connection.write(b"".join((HEAD.pack(size >> 8, size & 0xFF, DATA, 0, self.id), piece)))
        if pending:
            self.enqueue()
            return
        self._pending = None
        if self._trailers is not None:
            self._write_headers(self._trailers, is_end=True)
            self._finish()
        else:
            self.drained()

    def discard_pending(self) -> None:
        """Forget what waits: nobody takes it."""
        if self._pending is not None:
            self._pending = self._trailers = None

    def _write_headers(self, block: bytes, *, is_end: bool) -> None:
        connection = self.connection
        connection.has_answered = True
        if connection.table_update:
            block, connection.table_update = connection.table_update + block, b""
        connection.write(headers(self.id, block, connection.max_frame, is_end=is_end))

    def _finish(self) -> None:
        if not self.is_request_complete:
            self.connection.write(reset(self.id, NO_ERROR))  # the rest of the request is wanted by nobody
        self._close()

    def _close(self) -> None:
        self.is_over = True
        self.discard_pending()
        self.connection.stream_closed(self)
