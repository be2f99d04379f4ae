"""The events of a streamed response, compressed as they come, so that a client can read them again."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

_WINDOW_BITS: Final = 13  # events repeat the text of those just before them, so a small window is enough
_MEMORY: Final = 6
_PIECE: Final = 64 * 1024


class EventRecord:
    """Takes the frames of a stream in their order: the frame with the sequence number 0 first."""

    __slots__ = ("_compressor", "_parts")

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS, _MEMORY)
        self._parts: list[bytes] = []

    def add(self, frame: bytes) -> None:
        """Add one or more whole frames, each with the empty line behind it."""
        part = self._compressor.compress(frame)
        if part:
            self._parts.append(part)

    def finish(self) -> bytes:
        """The record. No frame can be added afterwards."""
        self._parts.append(self._compressor.flush())
        return b"".join(self._parts)


def frames_after(record: bytes, sequence_number: int) -> Iterator[bytes]:
    """The recorded frames behind the one with this sequence number; -1: all. At most a piece of them is in memory."""
    decompressor = zlib.decompressobj(_WINDOW_BITS)
    number, rest, left = 0, b"", record
    while left or not decompressor.eof:
        piece = decompressor.decompress(left, _PIECE)
        left = decompressor.unconsumed_tail
        if not piece and not left:
            return
        *frames, rest = (rest + piece).split(b"\n\n")
        for frame in frames:
            if number > sequence_number:
                yield frame + b"\n\n"
            number += 1
