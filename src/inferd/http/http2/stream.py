"""One HTTP/2 stream: sending an answer within the flow control windows, and the window for receiving.

Knows frames and windows (RFC 9113, sections 5.2 and 6.9). A subclass knows what requests and answers mean.
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
from inferd.open_class import mypyc_attr

SLOWEST: Final = 16 * 1024
"""Bytes per second. A peer that receives or sends faster than this gets more time for a large message."""

_DATA_TAIL: Final = bytes((DATA, 0))
_LAST_HEADERS: Final = bytes((HEADERS, END_HEADERS | END_STREAM))
_FIRST_HEADERS: Final = bytes((HEADERS, END_HEADERS))


class StreamConnection(Protocol):
    """What a stream requires of its connection."""

    receive_budget: ReceiveBudget
    send_queue: deque[Stream]  # streams with pending bytes that their own windows allow
    sendable: int  # bytes that the connection's window allows
    first_window: int  # the initial window of the peer's streams
    max_frame: int  # payload bytes of a frame that the peer accepts
    table_update: bytes  # the beginning of the next header block
    has_answered: bool  # an answer was sent since the client's last ping
    cost_credit: int  # in units of ``http.cost``, like ``cost``
    cost: int
    is_writable: bool  # the transport's write buffer has room

    @property
    def peer(self) -> str:
        """The client's address without its port; empty for a Unix socket."""

    def write(self, data: bytes, /) -> None:
        """Send ``data`` at the end of this turn of the event loop."""

    def pump(self) -> None:
        """Send one frame of each stream in ``send_queue`` in turn, as far as the windows allow."""

    def stream_closed(self, stream: Stream, /) -> None:
        """Forget a stream that is over."""

    def charge(self, cost: int, /) -> None:
        """Count ``cost``, in units of ``http.cost``, for a message of a stream."""

    def call_in_turn(self, call: Callable[[], None], /) -> None:
        """Call ``call`` in a turn of the event loop in which no other connection continues."""

    def after_frames(self, call: Callable[[], None], /) -> None:
        """Call ``call`` after the frames of the current read were processed."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Stream(ABC):
    """A request and its answer. It is over when both are complete, or when one side has cancelled it."""

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
        self.window_offset = 0  # the send window is ``connection.first_window`` plus this; negative after sending
        self.receivable = FIRST_WINDOW  # bytes that the peer may still send
        self.wanted_bytes = 0  # as ``ReceivingStream`` defines it
        self.is_request_complete = False  # END_STREAM was received
        self.is_over = False
        self.is_queued = False  # in ``connection.send_queue``
        self.reserved_bytes = 0  # as ``ReceivingStream`` defines it
        self._pending: deque[memoryview] | None = None  # bytes for which the windows have no room yet
        self._trailers: bytes | None = None  # the header block that follows the pending bytes
        # While bytes are pending: ``_blocked_since``, ``_last_sent_at`` (seconds) and ``_sent_bytes`` since then.

    # -- called by the connection -----------------------------------------------------------

    @abstractmethod
    def data_received(self, data: bytes, start: int, stop: int, is_end: bool) -> None:
        """Receive ``data[start:stop]``; ``is_end``: the request ends with it."""

    @abstractmethod
    def peer_cancelled(self) -> None:
        """The peer has reset the stream, or the connection is closed: nothing can be sent any more."""

    @abstractmethod
    def drained(self) -> None:
        """All pending bytes were sent, or the connection's write buffer has room again."""

    @abstractmethod
    def send_timed_out(self) -> None:
        """The peer opened its windows too slowly: cancel the stream."""

    def check_timeouts(self, now: float, timeout_s: float) -> None:
        """Called about once a second.

        Sending times out after ``timeout_s`` without a byte, and when the whole takes longer than ``timeout_s`` plus
        the time at ``SLOWEST`` bytes per second.
        """
        if self._pending is not None and (
            now - self._last_sent_at > timeout_s or now - self._blocked_since > timeout_s + self._sent_bytes / SLOWEST
        ):
            self.send_timed_out()

    # -- receiving --------------------------------------------------------------------------

    def request_window(self, size: int) -> None:
        """Open the window by ``size`` bytes for a large message, as soon as the receive budget allows."""
        self.wanted_bytes = size
        self.connection.receive_budget.request(self)

    def grant_window(self, size: int) -> None:
        """Allow the peer to send ``size`` bytes more (WINDOW_UPDATE)."""
        self.receivable += size
        self.connection.write(window_update(self.id, size))

    # -- sending ----------------------------------------------------------------------------

    @property
    def is_blocked(self) -> bool:
        """Whether bytes wait for the windows."""
        return self._pending is not None

    def send_answer(self, head: bytes, prefix: bytes, body: bytes, trailers: bytes) -> None:
        """Send a complete answer: the header block ``head``, then ``prefix`` and ``body``, then ``trailers``."""
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
            self.send_data(prefix + body)  # adds the cost credit as well
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
        """Send an answer that has only a header block."""
        self._write_headers(block, is_end=True)
        self._finish()

    def send_headers(self, head: bytes) -> None:
        """Begin an answer with the header block ``head``."""
        self._write_headers(head, is_end=False)

    def send_data(self, data: bytes) -> None:
        """Send ``data``, or queue it where the windows have no room. The answer continues."""
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
        """End the answer with a header block, after the pending bytes."""
        if self._pending is not None:
            self._trailers = trailers
            return
        self._write_headers(trailers, is_end=True)
        self._finish()

    def reset(self, code: int = CANCEL) -> None:
        """Cancel the stream with RST_STREAM. Idempotent."""
        if not self.is_over:
            self.connection.write(reset(self.id, code))
            self._close()

    def enqueue(self) -> None:
        """Add the stream to the connection's ``send_queue``, if its own window has room for pending bytes."""
        if self._pending is not None and not self.is_queued and self.connection.first_window + self.window_offset > 0:
            self.is_queued = True
            self.connection.send_queue.append(self)

    def pump(self) -> None:
        """Send pending bytes in one frame, as far as the windows allow."""
        connection, pending = self.connection, self._pending
        if pending is None:
            return  # the stream was cancelled while it was queued
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
        """Drop the pending bytes of a cancelled stream."""
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
            self.connection.write(reset(self.id, NO_ERROR))  # the rest of the request is not needed (section 8.1)
        self._close()

    def _close(self) -> None:
        self.is_over = True
        self.discard_pending()
        self.connection.stream_closed(self)
