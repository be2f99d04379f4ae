"""What it costs to decode a JSON body, which is counted before the body is decoded.

Interpreted in every form of inferd: a compiled loop holds the interpreter's lock until it ends, and large bodies are
counted on another thread than the event loop's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from inferd.errors import InvalidRequest

PIECE_BYTES: Final = 4096
MAX_DECODE_COST: Final = 1 << 18  # the unit is decoding one number of a list; this many take about 30 ms
MAX_DEPTH: Final = 256
"""Levels of lists and objects. Every reader and writer behind the door recurses, and gets through more than twice as
many."""

_PIECE_BYTES: Final = 256 * 1024  # counted in one call


class Piece(NamedTuple):
    """A part of a document, of about ``PIECE_BYTES``."""

    raw: bytes  # does not end within an escape sequence
    is_inside: bool  # the piece begins within a string
    outside: list[bytes]  # the parts outside strings


def pieces(body: bytes) -> Iterator[Piece]:
    """The pieces of a document, in order."""
    at, is_inside = 0, False
    while at < len(body):
        raw = body[at : at + PIECE_BYTES]
        if (len(raw) - len(raw.rstrip(b"\\"))) % 2:
            raw = body[at : at + PIECE_BYTES + 1]
        plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b'\\"' in raw else raw
        parts = plain.split(b'"')
        yield Piece(raw, is_inside, parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
        at += len(raw)


def check_decode_cost(body: bytes) -> None:
    """Check that decoding the JSON costs at most ``MAX_DECODE_COST``. Raises InvalidRequest.

    The decoder holds the interpreter's lock until it is done, so a costly body would block all other threads.
    """
    num_marks = 0
    for at in range(0, len(body), _PIECE_BYTES):
        piece = body[at : at + _PIECE_BYTES]
        num_marks += len(piece) - len(piece.translate(None, b',:[{"'))
        if 4 * num_marks > MAX_DECODE_COST:
            break
    else:
        return
    if _weight(body) > MAX_DECODE_COST:
        raise InvalidRequest(
            f"The request body has more values than are read: {MAX_DECODE_COST} numbers at most, of which a string "
            "counts as two, and an object, a list and a key as five each; send fewer in a request, and tensors as "
            "binary data.",
            code="too_many_values",
        )


def is_too_deep(value: Any) -> bool:
    """Whether decoded JSON has more than ``MAX_DEPTH`` levels of lists and objects."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        parts = [one if isinstance(one, list) else one.values() for one in level if isinstance(one, list | dict)]
        if not parts:
            return False
        level = [one for part in parts for one in part]
    return True


def _weight(body: bytes) -> int:
    """The cost of decoding ``body``, in numbers of a list. Counting stops above ``MAX_DECODE_COST``."""
    weight = 0
    for piece in pieces(body):
        part = b"".join(piece.outside)
        weight += len(piece.outside) + part.count(b",")
        weight += 4 * (part.count(b":") + part.count(b"[") + part.count(b"{"))
        if weight > MAX_DECODE_COST:
            break
    return weight
