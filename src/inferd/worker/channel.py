"""The wire between gateway and worker: frames over an unnamed Unix socket.

The two ends are a ``socket.socketpair()`` made by the supervisor; the worker inherits its end by file
descriptor. There is no path and no port, so nobody else can open it: stronger than mode 0600, and
nothing is left behind in the file system. Across hosts the same frames travel over TCP.

A frame is a list of messages (``inferd.worker.messages``). A frame that is too large or that does not
decode closes the channel: after it nothing on the wire can be trusted.

``Channel`` is the gateway's end, an asyncio protocol. ``BlockingChannel`` is the worker's: its threads
block in ``recv`` and ``send``, so a gateway that reads slowly slows the step loop down instead of
filling memory. Neither knows what the messages mean.
"""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from inferd.worker.messages import (
    HEADER,
    MAX_FRAME_BYTES,
    FromWorker,
    Submit,
    ToWorker,
    encode_frame,
    from_worker_decoder,
    to_worker_decoder,
)

HIGH_WATER_BYTES = 4 * 1024 * 1024
MAX_UNSENT_BYTES = 1024 * 1024 * 1024
LARGE_BYTES = 1024 * 1024  # of requests, which a frame need not go beyond
_RECEIVE_BYTES = 256 * 1024

T = TypeVar("T")


class ChannelError(Exception):
    """What came over the wire cannot be trusted, or the peer does not take what is sent."""


class Frames(Generic[T]):
    """Cuts a stream of bytes into decoded frames."""

    __slots__ = ("_buffer", "_decoder")

    def __init__(self, decoder: msgspec.msgpack.Decoder[list[T]]) -> None:
        self._buffer = bytearray()
        self._decoder = decoder

    def feed(self, data: bytes) -> Iterator[list[T]]:
        """Every frame that ``data`` completes. Raises ChannelError."""
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= HEADER.size:
            (size,) = HEADER.unpack_from(buffer, at)
            if size > MAX_FRAME_BYTES:
                raise ChannelError(f"A frame claims {size} bytes; at most {MAX_FRAME_BYTES} are allowed.")
            start, end = at + HEADER.size, at + HEADER.size + size
            if end > len(buffer):
                break
            try:
                with memoryview(buffer) as whole, whole[start:end] as frame:
                    messages = self._decoder.decode(frame)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ChannelError(f"A frame of {size} bytes is not a list of messages: {error}") from None
            at = end
            yield messages
        del buffer[:at]

    @property
    def is_between_frames(self) -> bool:
        return not self._buffer


def _frames(messages: Sequence[ToWorker]) -> Iterator[bytes]:
    """The messages as few frames. Raises ChannelError for one message too large.

    Large requests have frames of their own: whoever reads holds a frame twice, and must be able to stop between two.
    """
    begin, num_bytes = 0, 0
    for at, message in enumerate(messages):
        num_bytes += message.request.num_bytes if isinstance(message, Submit) else 0
        if num_bytes > LARGE_BYTES:
            yield from _bounded(messages[begin : at + 1])
            begin, num_bytes = at + 1, 0
    if begin < len(messages):
        yield from _bounded(messages[begin:])


def _bounded(messages: Sequence[ToWorker]) -> Iterator[bytes]:
    frame = encode_frame(list(messages))
    if len(frame) - HEADER.size <= MAX_FRAME_BYTES:
        yield frame
    elif len(messages) == 1:
        raise ChannelError(f"A message of {len(frame)} bytes does not fit into a frame of {MAX_FRAME_BYTES}.")
    else:
        half = len(messages) // 2
        yield from _bounded(messages[:half])
        yield from _bounded(messages[half:])


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
        """Queue a message; dropped when the channel is closed, as its peer is gone anyway."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

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


class BlockingChannel:
    """The worker's end: any thread sends, one thread receives."""

    __slots__ = ("_lock", "frames", "socket")

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(True)
        self.socket = connected
        self.frames: Frames[ToWorker] = Frames(to_worker_decoder)
        self._lock = threading.Lock()

    def send(self, messages: list[FromWorker]) -> None:
        """Returns when the operating system has taken everything. Raises ChannelError or OSError."""
        self.write(self.frame(messages))

    def frame(self, messages: Sequence[FromWorker]) -> bytes:
        """The messages as they are written. Raises ChannelError."""
        frame = encode_frame(messages)
        if len(frame) - HEADER.size > MAX_FRAME_BYTES:
            raise ChannelError(f"A frame of {len(frame)} bytes is larger than {MAX_FRAME_BYTES}.")
        return frame

    def write(self, frames: bytes) -> None:
        """Like ``send``, of what ``frame`` made."""
        with self._lock:
            self.socket.sendall(frames)

    def __iter__(self) -> Iterator[list[ToWorker]]:
        """Frames until the peer closes. Raises ChannelError or OSError."""
        while data := self.socket.recv(_RECEIVE_BYTES):
            yield from self.frames.feed(data)

    def receive_until(self, taken_over: socket.socket) -> Iterator[list[ToWorker]]:
        """Likewise, or until ``taken_over`` can be read: ``socket`` and ``frames``, with not a byte lost, are then
        another thread's to receive with."""
        waiting = select.poll()  # descriptors may be beyond select's set
        for end in (self.socket, taken_over):
            waiting.register(end, select.POLLIN)
        while all(descriptor != taken_over.fileno() for descriptor, _ in waiting.poll()):
            data = self.socket.recv(_RECEIVE_BYTES)
            if not data:
                return
            yield from self.frames.feed(data)
