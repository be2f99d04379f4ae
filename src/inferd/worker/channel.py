"""The wire between gateway and worker: frames over an unnamed Unix socket.

The two ends are a ``socket.socketpair()`` made by the supervisor; the worker inherits its end by file
descriptor. There is no path and no port, so nobody else can open it: stronger than mode 0600, and
nothing is left behind in the file system. Across hosts the same frames travel over TCP.

A frame is a list of messages (``inferd.worker.messages``). A frame that is too large or that does not
decode closes the channel: after it nothing on the wire can be trusted.

``BlockingChannel`` is the worker's end: its threads block in ``recv`` and ``send``, so a gateway that reads slowly slows
the step loop down instead of filling memory. The gateway's is ``asynchronous.Channel``, in a file of its own: asyncio would be a
tenth of what a small model's worker takes. Neither knows what the messages mean.
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
