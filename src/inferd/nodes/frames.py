"""A connection of messages as an asyncio protocol: frames in, frames out. Both sides use it."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

import msgspec

from inferd.worker.channel import ChannelError, Frames
from inferd.worker.messages import MAX_FRAME_BYTES

M = TypeVar("M")


class Connection(asyncio.Protocol, Generic[M]):
    """Cuts what it receives into messages. A subclass has ``handle`` and ``closed``, which is called exactly once."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[list[M]], max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._frames: Frames[M] = Frames(decoder, max_bytes)
        self._error: Exception | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self.transport: asyncio.Transport | None = None

    def handle(self, message: M) -> None:
        """A message arrived."""
        raise NotImplementedError

    def closed(self, error: Exception | None) -> None:
        """The connection ended. ``error``: what broke it; None: it was closed."""
        raise NotImplementedError

    def connected(self) -> None:
        """The connection is open, and its TLS handshake is done."""

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write, where the connection is open."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    async def drained(self) -> None:
        """Wait until the other end has read enough. Returns also when the connection ended."""
        await self._may_write.wait()

    def finish(self) -> None:
        """Close after what was written is sent."""
        if self.transport is not None:
            self.transport.close()

    def abort(self, error: Exception | None = None) -> None:
        """Close at once."""
        self._error = self._error or error
        if self.transport is not None:
            self.transport.abort()

    @property
    def is_between_frames(self) -> bool:
        return self._frames.is_between_frames

    # -- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.connected()

    def data_received(self, data: bytes) -> None:
        try:
            for messages in self._frames.feed(data):
                for message in messages:
                    self.handle(message)
        except ChannelError as error:
            self.abort(error)

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._may_write.set()
        self.closed(self._error or exc)
