"""The frames of a hand-over, and their checksum. Knows bytes; does not know sockets, blocks or sequences.

    sender      Offer     ->              the keys of a prompt's full blocks, before the first is computed
    receiver              <-  Grant       which of them it lacks and has reserved memory for, or Refusal
    sender      Blocks    ->              contents, as the prompt's chunks are computed
    sender      Done      ->              nothing more comes
    receiver              <-  Receipt     how many of the prompt's first blocks it has

A frame is its length (4 bytes, little-endian), a keyed BLAKE2b of 16 bytes, and a msgpack body. Only the replicas of
one model know the key. A frame with a wrong checksum counts as lost. Every frame names its hand-over, and every block
its place in the prompt, so frames may be lost, doubled, late, or in any order.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator
from typing import Final

import msgspec

HEADER: Final = struct.Struct("<I16s")
MAX_FRAME_BYTES: Final = 256 * 1024 * 1024
FRAME_BYTES: Final = 2 * 1024 * 1024
"""Bytes of blocks from which a frame takes no further one."""


class FrameError(Exception):
    """The bytes of a connection cannot be cut into frames."""


class Offer(msgspec.Struct, frozen=True, tag=True):
    hand_over: bytes  # random: names this hand-over in every frame
    request_id: str
    layout: str  # of the sender's blocks, and what decides their contents
    keys: list[bytes]  # of the prompt's full blocks, in order
    tenant: str
    weight: float


class Grant(msgspec.Struct, frozen=True, tag=True):
    """The blocks ``first`` to ``first + count`` are wanted; those before are in the receiver's cache."""

    hand_over: bytes
    first: int
    count: int


class Refusal(msgspec.Struct, frozen=True, tag=True):
    hand_over: bytes
    reason: str  # without a full stop


class Blocks(msgspec.Struct, frozen=True, tag=True):
    hand_over: bytes
    first: int  # place of the first of them in the prompt
    contents: list[bytes]


class Done(msgspec.Struct, frozen=True, tag=True):
    hand_over: bytes


class Receipt(msgspec.Struct, frozen=True, tag=True):
    hand_over: bytes
    num_blocks: int  # of the prompt's first blocks, without a gap


Frame = Offer | Grant | Refusal | Blocks | Done | Receipt

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame, key: bytes) -> bytes:
    """The frame as it is sent. ``key``: of the checksum, at most 64 bytes."""
    body = _encoder.encode(frame)
    return HEADER.pack(len(body), _checksum(body, key)) + body


def decode(body: bytes, checksum: bytes, key: bytes) -> Frame | None:
    """The frame of a body; None: it was changed on its way, or has no meaning."""
    if not hmac.compare_digest(_checksum(body, key), checksum):
        return None
    try:
        return _decoder.decode(body)
    except (ValueError, RecursionError):
        return None


class FrameReader:
    """Cuts a stream of bytes into frames."""

    __slots__ = ("_buffer", "_key")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame | None]:
        """Every frame that ``data`` completes; None stands for one that was changed. Raises FrameError."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            size, checksum = HEADER.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES:
                raise FrameError(f"a frame claims {size} bytes; at most {MAX_FRAME_BYTES} are allowed")
            end = HEADER.size + size
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[HEADER.size : end])
            del self._buffer[:end]
            yield decode(body, checksum, self._key)


def _checksum(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, key=key, digest_size=16).digest()
