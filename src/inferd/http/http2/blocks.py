"""A connection's header blocks: put together from their frames, read, and remembered.

Clients send the same few blocks again and again, and a block means the same as long as HPACK's table does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from inferd.http.http2 import frames as f
from inferd.http.http2.frames import Fault
from inferd.http.http2.hpack import Decoder, Header, HpackError
from inferd.http.limits import MAX_HEADER_BYTES

_MAX_KNOWN: Final = 64  # header blocks of one connection that are remembered
_MAX_KNOWN_BYTES: Final = 1536
_MAX_PIECES: Final = 32  # frames that a header block may come in


class HeaderBlocks:
    """``known`` is what whole blocks mean; ``since`` is when the one that goes on in further frames began, or 0."""

    __slots__ = ("_decoder", "_num_pieces", "_open", "_stream", "_version", "_was_end", "known", "num_headers", "since")

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._version = 0  # of the decoder's table, under which blocks are known
        self._open: bytearray | None = None
        self._stream = 0
        self._was_end = False
        self._num_pieces = 0
        self.known: dict[bytes, object] = {}
        self.num_headers = 0  # of the block that was decoded last, whether they were too many or not
        self.since = 0.0

    def begin(self, number: int, piece: bytes, is_end: bool, now: float) -> None:
        """A block of the stream that goes on; ``is_end``: nothing comes behind it."""
        self._open = bytearray(piece)
        self._stream, self._was_end = number, is_end
        self.since = now
        self._num_pieces = 1

    def go_on(self, number: int, piece: bytes) -> None:
        """Raises Fault."""
        block = self._open
        if block is None or number != self._stream:
            raise Fault(f.PROTOCOL_ERROR, "CONTINUATION of no headers")
        block += piece
        self._num_pieces += 1
        if len(block) > MAX_HEADER_BYTES or self._num_pieces > _MAX_PIECES:
            raise Fault(f.ENHANCE_YOUR_CALM, "headers without end")

    def whole(self) -> tuple[bytes, bool]:
        """The block, which is complete, and whether nothing comes behind it."""
        assert self._open is not None
        block, self._open, self.since = bytes(self._open), None, 0.0
        return block, self._was_end

    def decode(self, block: bytes) -> Sequence[Header] | None:
        """Its headers; None: they were too large. Raises Fault."""
        decoder = self._decoder
        before = decoder.version
        try:
            headers = decoder.decode(block, MAX_HEADER_BYTES)
        except HpackError as error:
            raise Fault(f.COMPRESSION_ERROR, str(error)) from None
        self.num_headers = decoder.num_headers
        if decoder.version != before:
            self.known.clear()  # what stood for a header stands for another one now
            self._version = -1
        else:
            self._version = before
        return headers

    def remember(self, block: bytes, head: object) -> None:
        """What the block that was just decoded means, unless it changed the table."""
        if self._version == self._decoder.version and len(block) <= _MAX_KNOWN_BYTES:
            if len(self.known) >= _MAX_KNOWN:
                self.known.clear()
            self.known[block] = head
