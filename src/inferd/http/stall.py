"""How long a client has read nothing of what was written for it."""

from __future__ import annotations

import asyncio

from inferd import clock


class WriteStall:
    """Measures how long a transport's full write buffer has made no progress.

    The owner calls ``begin`` when the transport pauses writing and ``end`` when it resumes.
    """

    __slots__ = ("_since", "_unsent_bytes", "is_active")

    def __init__(self) -> None:
        self.is_active = False
        self._since = 0.0  # when the buffer last became smaller, or was found full
        self._unsent_bytes = 0  # in the buffer at that time

    def begin(self, transport: asyncio.Transport) -> None:
        """The write buffer of ``transport`` is full."""
        self.is_active = True
        self._since = clock.now()
        self._unsent_bytes = transport.get_write_buffer_size()

    def end(self) -> None:
        """The write buffer has room again."""
        self.is_active = False

    def has_expired(self, transport: asyncio.Transport, now: float, limit_s: float) -> bool:
        """Whether the buffer of an active stall has not changed for ``limit_s`` seconds. To be called regularly."""
        unsent_bytes = transport.get_write_buffer_size()
        if unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._since = unsent_bytes, now
            return False
        return now - self._since > limit_s
