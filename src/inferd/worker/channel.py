"""The channel between gateway and worker: frames over an unnamed Unix socket.

The supervisor makes the two ends with ``socket.socketpair()``, and the worker inherits its end by file descriptor. The
socket has no path and no port, so no other process can open it, and nothing is left behind in the file system. To a
worker on a node the same frames travel over TLS (``nodes/``).

A frame is a list of messages (``inferd.worker.messages``). A frame that is too large or that does not decode closes the
channel, because nothing after it can be trusted.

``BlockingChannel`` is the worker's end. Its threads block in ``recv`` and ``send``, so a gateway that reads slowly
slows the step loop down instead of filling memory. The gateway's end is ``asynchronous.Channel``. It has a file of its
own, because asyncio would be a tenth of the memory of a small model's worker. Neither knows the meaning of a message.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from inferd.worker.messages import (
    HEADER,
    MAX_FRAME_BYTES,
    FromWorker,
    ToWorker,
    encode_frame,
    to_worker_decoder,
)

_RECEIVE_BYTES = 256 * 1024

T = TypeVar("T")


class ChannelError(Exception):
    """The bytes that were received cannot be trusted, or the peer does not read."""


class Frames(Generic[T]):
    """Cuts a stream of bytes into decoded frames."""

    __slots__ = ("_buffer", "_decoder", "_max_bytes")

    def __init__(self, decoder: msgspec.msgpack.Decoder[list[T]], max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._decoder = decoder
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[list[T]]:
        """Every frame that ``data`` completes. Raises ChannelError."""
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= HEADER.size:
            (size,) = HEADER.unpack_from(buffer, at)
            if size > self._max_bytes:
                raise ChannelError(f"A frame claims {size} bytes; at most {self._max_bytes} are allowed.")
            start, end = at + HEADER.size, at + HEADER.size + size
            if end > len(buffer):
                break
            try:
                with memoryview(buffer) as whole, whole[start:end] as frame:
                    messages = self._decoder.decode(frame)
            except (ValueError, RecursionError) as error:
                raise ChannelError(f"A frame of {size} bytes is not a list of messages: {error}") from None
            at = end
            yield messages
        del buffer[:at]

    @property
    def is_between_frames(self) -> bool:
        return not self._buffer


class BlockingChannel:
    """The worker's end: any thread sends, one thread receives."""

    __slots__ = ("_lock", "frames", "socket")

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(True)
        self.socket = connected
        self.frames: Frames[ToWorker] = Frames(to_worker_decoder)
        self._lock = threading.Lock()

    def send(self, messages: list[FromWorker]) -> None:
        """Write messages; returns when the operating system has all bytes. Raises ChannelError or OSError."""
        self.write(self.frame(messages))

    def frame(self, messages: Sequence[FromWorker]) -> bytearray:
        """The messages as they are written. Raises ChannelError."""
        frame = encode_frame(messages)
        if len(frame) - HEADER.size > MAX_FRAME_BYTES:
            raise ChannelError(f"A frame of {len(frame)} bytes is larger than {MAX_FRAME_BYTES}.")
        return frame

    def write(self, frames: bytes | bytearray) -> None:
        """Like ``send``, of what ``frame`` made."""
        with self._lock:
            self.socket.sendall(frames)

    def __iter__(self) -> Iterator[list[ToWorker]]:
        """Frames until the peer closes. Raises ChannelError or OSError."""
        while data := self.socket.recv(_RECEIVE_BYTES):
            yield from self.frames.feed(data)

    def receive_until(self, taken_over: socket.socket) -> Iterator[list[ToWorker]]:
        """Frames until the peer closes or ``taken_over`` can be read. Then another thread may go on receiving with
        ``socket`` and ``frames``, and no byte is lost."""
        waiting = select.poll()  # descriptors may be beyond select's set
        for end in (self.socket, taken_over):
            waiting.register(end, select.POLLIN)
        while all(descriptor != taken_over.fileno() for descriptor, _ in waiting.poll()):
            data = self.socket.recv(_RECEIVE_BYTES)
            if not data:
                return
            yield from self.frames.feed(data)
