"""How much a connection keeps of large messages that are not complete: what comes beyond waits for others to be.

A stream asks before it lets more come than its first window; one may always come, whatever its size.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

MAX_KEPT_BYTES: Final = 16 * 1024 * 1024  # of large messages that are not complete, but for one


class Granted(Protocol):
    """What the grants use of a stream."""

    wanted: int  # bytes to be granted
    keeps: int  # bytes that were granted, of a message that is not complete
    is_over: bool

    def granted(self, size: int, /) -> None:
        """The peer may send ``size`` bytes more."""


class Grants:
    """One connection's."""

    __slots__ = ("_kept_bytes", "_waiting")

    def __init__(self) -> None:
        self._kept_bytes = 0  # granted to streams whose message is not complete
        self._waiting: deque[Granted] = deque()  # for that

    def grant(self, stream: Granted) -> None:
        """Let what a stream wants come, or line it up."""
        if self._waiting or (self._kept_bytes and self._kept_bytes + stream.wanted > MAX_KEPT_BYTES):
            self._waiting.append(stream)
        else:
            self._grant(stream)

    def _grant(self, stream: Granted) -> None:
        size, stream.wanted = stream.wanted, 0
        stream.keeps += size
        self._kept_bytes += size
        stream.granted(size)

    def kept_no_more(self, stream: Granted) -> None:
        """Its message is complete, or of no interest."""
        self._kept_bytes -= stream.keeps
        stream.keeps = stream.wanted = 0
        while self._waiting:
            first = self._waiting[0]
            if first.wanted and self._kept_bytes and self._kept_bytes + first.wanted > MAX_KEPT_BYTES:
                return
            self._waiting.popleft()
            if first.wanted and not first.is_over:
                self._grant(first)

    def clear(self) -> None:
        """Nobody waits any more."""
        self._waiting.clear()
