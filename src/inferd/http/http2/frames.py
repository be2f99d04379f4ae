"""HTTP/2 frames (RFC 9113, sections 4, 6 and 7): numbers of types, flags, settings and errors, and writing."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

HEAD: Final = Struct(">HBBBL")
"""The head of a frame: its length (two bytes, then one), kind, flags and stream."""

HEAD_BYTES: Final = HEAD.size
MAX_FRAME: Final = 16384  # payload bytes that this server accepts: the least that the RFC allows
MAX_WINDOW: Final = (1 << 31) - 1
FIRST_WINDOW: Final = 65535  # of a stream and of a connection until it is changed (RFC 9113, section 6.9.2)

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

ACK: Final = 1  # of SETTINGS and PING
END_STREAM: Final = 1
END_HEADERS: Final = 4
PADDED: Final = 8
WITH_PRIORITY: Final = 32

NO_ERROR: Final = 0
PROTOCOL_ERROR: Final = 1
INTERNAL_ERROR: Final = 2
FLOW_CONTROL_ERROR: Final = 3
STREAM_CLOSED: Final = 5
FRAME_SIZE_ERROR: Final = 6
REFUSED_STREAM: Final = 7
CANCEL: Final = 8
COMPRESSION_ERROR: Final = 9
ENHANCE_YOUR_CALM: Final = 11

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

_SETTING: Final = Struct(">HL")
SETTINGS_ACK: Final = HEAD.pack(0, 0, SETTINGS, ACK, 0)


class Fault(Exception):
    """A connection error (RFC 9113, section 5.4.1). GOAWAY carries ``code`` and ``why``, and the connection closes."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code
        self.why = why


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Any frame. ``payload`` must fit into one frame of the peer."""
    size = len(payload)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def headers(stream: int, block: bytes, max_frame: int, *, is_end: bool) -> bytes:
    """A header block: HEADERS, and as many frames CONTINUATION as ``max_frame`` bytes of payload require."""
    flags = END_STREAM if is_end else 0
    if len(block) <= max_frame:
        return frame(HEADERS, flags | END_HEADERS, stream, block)
    pieces = [block[at : at + max_frame] for at in range(0, len(block), max_frame)]
    first, *between, last = pieces
    return b"".join(
        (
            frame(HEADERS, flags, stream, first),
            *(frame(CONTINUATION, 0, stream, piece) for piece in between),
            frame(CONTINUATION, END_HEADERS, stream, last),
        )
    )


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """SETTINGS with identifiers and values."""
    return frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(*value) for value in values]))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """The identifiers and values of a SETTINGS payload. Raises Fault."""
    if len(payload) % _SETTING.size:
        raise Fault(FRAME_SIZE_ERROR, "SETTINGS of a size that is no multiple of 6")
    return list(_SETTING.iter_unpack(payload))


def window_update(stream: int, size: int) -> bytes:
    """WINDOW_UPDATE: the peer may send ``size`` bytes more on ``stream``; 0: on the connection."""
    return frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4, "big"))


def reset(stream: int, code: int) -> bytes:
    """RST_STREAM with an error code."""
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def goaway(last_stream: int, code: int, why: str = "") -> bytes:
    """GOAWAY: no stream after ``last_stream`` is served. ``why`` is debug data in ASCII."""
    return frame(
        GOAWAY, 0, 0, last_stream.to_bytes(4, "big") + code.to_bytes(4, "big") + why.encode("ascii", "replace")
    )
