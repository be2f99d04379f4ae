"""A limit on the memory for incomplete large messages of one HTTP/2 connection.

A stream requests memory before it enlarges its receive window (RFC 9113, section 5.2) beyond the initial one. Where the
connection has no memory left, the stream waits for another one's message to be complete. A single stream may always
receive, whatever its size.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

MAX_RESERVED_BYTES: Final = 16 * 1024 * 1024
"""Bytes of incomplete large messages of one connection, unless a single message is larger."""


class ReceivingStream(Protocol):
    """What the budget requires of a stream."""

    wanted_bytes: int  # requested and not reserved yet
    reserved_bytes: int  # reserved for a message that is not complete
    is_over: bool

    def grant_window(self, size: int, /) -> None:
        """Allow the peer to send ``size`` bytes more."""


class ReceiveBudget:
    """The reserved memory of one connection, and the streams that wait for some, in their order."""

    __slots__ = ("_reserved_bytes", "_waiting")

    def __init__(self) -> None:
        self._reserved_bytes = 0
        self._waiting: deque[ReceivingStream] = deque()

    def request(self, stream: ReceivingStream) -> None:
        """Reserve ``stream.wanted_bytes`` and open the stream's window, now or when there is memory."""
        if self._waiting or not self._fits(stream):
            self._waiting.append(stream)
        else:
            self._grant(stream)

    def _fits(self, stream: ReceivingStream) -> bool:
        return not self._reserved_bytes or self._reserved_bytes + stream.wanted_bytes <= MAX_RESERVED_BYTES

    def _grant(self, stream: ReceivingStream) -> None:
        size, stream.wanted_bytes = stream.wanted_bytes, 0
        stream.reserved_bytes += size
        self._reserved_bytes += size
        stream.grant_window(size)

    def release(self, stream: ReceivingStream) -> None:
        """The stream's message is complete, or not needed any more: give its memory to those that wait."""
        self._reserved_bytes -= stream.reserved_bytes
        stream.reserved_bytes = stream.wanted_bytes = 0
        while self._waiting:
            first = self._waiting[0]
            if first.wanted_bytes and not self._fits(first):
                return
            self._waiting.popleft()
            if first.wanted_bytes and not first.is_over:
                self._grant(first)

    def clear(self) -> None:
        """Forget all streams that wait."""
        self._waiting.clear()
