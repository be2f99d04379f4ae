"""The header blocks of one connection: joined from their frames, decoded, and cached.

Clients repeat the same few blocks. A block has the same meaning as long as HPACK's dynamic table does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from inferd.http.http2 import frames as f
from inferd.http.http2.frames import Fault
from inferd.http.http2.hpack import Decoder, Header, HpackError
from inferd.http.limits import MAX_HEADER_BYTES

_MAX_KNOWN: Final = 64  # header blocks in a connection's cache
_MAX_KNOWN_BYTES: Final = 1536  # of a block that is cached
_MAX_PIECES: Final = 32  # frames of one header block


class HeaderBlocks:
    """Joins and decodes header blocks.

    ``known`` maps cached blocks to their meanings. ``since`` is when the block began that continues in further frames;
    0: there is none.
    """

    __slots__ = ("_decoder", "_num_pieces", "_open", "_stream", "_version", "_was_end", "known", "num_headers", "since")

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._version = 0  # of the decoder's table for which ``known`` is valid
        self._open: bytearray | None = None
        self._stream = 0
        self._was_end = False
        self._num_pieces = 0
        self.known: dict[bytes, object] = {}
        self.num_headers = 0  # fields of the block that was decoded last, even where they exceeded the limit
        self.since = 0.0

    def begin(self, number: int, piece: bytes, is_end: bool, now: float) -> None:
        """Begin a block of the stream ``number`` that continues in further frames; ``is_end``: it ends the stream."""
        self._open = bytearray(piece)
        self._stream, self._was_end = number, is_end
        self.since = now
        self._num_pieces = 1

    def append(self, number: int, piece: bytes) -> None:
        """Add the payload of a CONTINUATION frame. Raises Fault (RFC 9113, section 6.10)."""
        block = self._open
        if block is None or number != self._stream:
            raise Fault(f.PROTOCOL_ERROR, "CONTINUATION of no headers")
        block += piece
        self._num_pieces += 1
        if len(block) > MAX_HEADER_BYTES or self._num_pieces > _MAX_PIECES:
            raise Fault(f.ENHANCE_YOUR_CALM, "headers without end")

    def whole(self) -> tuple[bytes, bool]:
        """The complete block, and whether it ends the stream."""
        assert self._open is not None
        block, self._open, self.since = bytes(self._open), None, 0.0
        return block, self._was_end

    def decode(self, block: bytes) -> Sequence[Header] | None:
        """The fields of a block; None: they exceed the limits. Raises Fault."""
        decoder = self._decoder
        before = decoder.version
        try:
            headers = decoder.decode(block, MAX_HEADER_BYTES)
        except HpackError as error:
            raise Fault(f.COMPRESSION_ERROR, str(error)) from None
        self.num_headers = decoder.num_headers
        if decoder.version != before:
            self.known.clear()  # an index of the table may mean another field now
            self._version = -1
        else:
            self._version = before
        return headers

    def remember(self, block: bytes, head: object) -> None:
        """Cache the meaning of the block that was decoded last, unless decoding changed the table."""
        if self._version == self._decoder.version and len(block) <= _MAX_KNOWN_BYTES:
            if len(self.known) >= _MAX_KNOWN:
                self.known.clear()
            self.known[block] = head
