"""The gateway's end of the channel to a worker, an asyncio protocol. Knows frames and messages, not their meaning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from inferd.worker.channel import ChannelError, Frames
from inferd.worker.messages import (
    HEADER,
    MAX_FRAME_BYTES,
    FromWorker,
    Submit,
    ToWorker,
    encode_frame,
    from_worker_decoder,
)

HIGH_WATER_BYTES = 4 * 1024 * 1024
MAX_UNSENT_BYTES = 1024 * 1024 * 1024
LARGE_BYTES = 1024 * 1024  # of requests after which a frame ends


class Channel(asyncio.Protocol):
    """The gateway's end. Messages sent in one turn of the event loop leave in one frame.

    ``on_messages`` gets each frame's messages; ``on_closed`` is called exactly once, with the error that
    broke the channel or None for a plain end; ``on_writable`` when a full channel has drained.
    """

    def __init__(
        self,
        on_messages: Callable[[list[FromWorker]], None],
        on_closed: Callable[[Exception | None], None],
        on_writable: Callable[[], None],
    ) -> None:
        self._on_messages = on_messages
        self._on_closed = on_closed
        self._on_writable = on_writable
        self._frames: Frames[FromWorker] = Frames(from_worker_decoder)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._outbox: list[ToWorker] = []
        self._error: Exception | None = None
        self.is_writable = True

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: ToWorker) -> None:
        """Queue a message. Dropped when the channel is closed, because the worker is gone."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

    def adopt(self, on_messages: Callable[[list[FromWorker]], None], on_writable: Callable[[], None]) -> None:
        """Have others called from now on."""
        self._on_messages, self._on_writable = on_messages, on_writable

    def close(self) -> None:
        """Close at once; what was not written is lost."""
        self._outbox.clear()
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        transport = self._transport
        if transport is None or not self._outbox:
            return  # not yet connected, or closed
        messages, self._outbox = self._outbox, []
        if transport.is_closing():
            return
        try:
            for frame in _frames(messages):
                transport.write(frame)
        except ChannelError as error:
            self._break(error)
            return
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._break(ChannelError(f"The worker left more than {MAX_UNSENT_BYTES} bytes unread."))

    def _break(self, error: Exception) -> None:
        self._error = error
        self.close()

    # -- asyncio.Protocol -------------------------------------------------------------------

    # asyncio promises only a BaseTransport; uvloop's inherits from no asyncio class at all.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._transport = transport
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            for messages in self._frames.feed(data):
                self._on_messages(messages)
        except ChannelError as error:
            self._break(error)

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        self._on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._error is None and exc is None and not self._frames.is_between_frames:
            exc = ChannelError("The channel ended in the middle of a frame.")
        self._on_closed(self._error or exc)


def _frames(messages: Sequence[ToWorker]) -> Iterator[bytearray]:
    """The messages as few frames. Raises ChannelError for one message too large, or one that cannot be written.

    Large requests have frames of their own: the reader holds a frame twice, and must be able to stop between two
    frames.
    """
    begin, num_bytes = 0, 0
    for at, message in enumerate(messages):
        num_bytes += message.request.num_bytes if isinstance(message, Submit) else 0
        if num_bytes > LARGE_BYTES:
            yield from _bounded(messages[begin : at + 1])
            begin, num_bytes = at + 1, 0
    if begin < len(messages):
        yield from _bounded(messages[begin:])


def _bounded(messages: Sequence[ToWorker]) -> Iterator[bytearray]:
    try:
        frame = encode_frame(list(messages))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        # All messages of this turn would be lost with it, and their requests would never end.
        raise ChannelError(f"A message cannot be written: {error}. This is a bug.") from error
    if len(frame) - HEADER.size <= MAX_FRAME_BYTES:
        yield frame
    elif len(messages) == 1:
        raise ChannelError(f"A message of {len(frame)} bytes does not fit into a frame of {MAX_FRAME_BYTES}.")
    else:
        half = len(messages) // 2
        yield from _bounded(messages[:half])
        yield from _bounded(messages[half:])
