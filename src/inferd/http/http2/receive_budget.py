"""How much a connection keeps of large messages that are not complete: what comes beyond waits for others to be.

A stream asks before it lets more come than its first window; one may always come, whatever its size.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

MAX_RESERVED_BYTES: Final = 16 * 1024 * 1024  # of large messages that are not complete, but for one


class ReceivingStream(Protocol):
    """What the grants use of a stream."""

    wanted_bytes: int  # bytes to be granted
    reserved_bytes: int  # bytes that were granted, of a message that is not complete
    is_over: bool

    def grant_window(self, size: int, /) -> None:
        """The peer may send ``size`` bytes more."""


class ReceiveBudget:
    """One connection's."""

    __slots__ = ("_reserved_bytes", "_waiting")

    def __init__(self) -> None:
        self._reserved_bytes = 0  # granted to streams whose message is not complete
        self._waiting: deque[ReceivingStream] = deque()  # for that

    def request(self, stream: ReceivingStream) -> None:
        """Let what a stream wants come, or line it up."""
        if self._waiting or (self._reserved_bytes and self._reserved_bytes + stream.wanted_bytes > MAX_RESERVED_BYTES):
            self._waiting.append(stream)
        else:
            self._grant(stream)

    def _grant(self, stream: ReceivingStream) -> None:
        size, stream.wanted_bytes = stream.wanted_bytes, 0
        stream.reserved_bytes += size
        self._reserved_bytes += size
        stream.grant_window(size)

    def release(self, stream: ReceivingStream) -> None:
        """Its message is complete, or of no interest."""
        self._reserved_bytes -= stream.reserved_bytes
        stream.reserved_bytes = stream.wanted_bytes = 0
        while self._waiting:
            first = self._waiting[0]
            if (
                first.wanted_bytes
                and self._reserved_bytes
                and self._reserved_bytes + first.wanted_bytes > MAX_RESERVED_BYTES
            ):
                return
            self._waiting.popleft()
            if first.wanted_bytes and not first.is_over:
                self._grant(first)

    def clear(self) -> None:
        """Nobody waits any more."""
        self._waiting.clear()
