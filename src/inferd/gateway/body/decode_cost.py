"""What it costs to decode a JSON body, which is counted before the body is decoded.

Interpreted in every form of inferd: a compiled loop holds the interpreter's lock until it ends, and large bodies are
counted on another thread than the event loop's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from inferd.config.units import bytes_text
from inferd.errors import InvalidRequest

PIECE_BYTES: Final = 4096
MAX_DECODE_COST: Final = 1 << 18  # the unit is decoding one number of a list; this many take about 10 ms
CHEAP_BYTES: Final = 4096  # whatever a body of at most so many bytes holds is decoded within some milliseconds

_PIECE_BYTES: Final = 256 * 1024  # counted in one call

# Most numbers are decoded within 0.1 us. A number near the ends of float64's range takes up to 10 us, and one of many
# digits up to 40 ns for each digit. An escape sequence takes up to 5 ns.
_EXTREME: Final = re.compile(rb"[eE][+-]?[0-9]{3}")
_EXTREME_WEIGHT: Final = 400  # a body that is decoded in the event loop may have some hundreds
_LONG: Final = re.compile(rb"[0-9.]{16,}")
_DIGITS_OF_A_UNIT: Final = 3  # of a long number
_ESCAPES_OF_A_UNIT: Final = 16
# A text that is not ASCII takes up to 2.4 ns for each byte, and as long again when it is written for a worker.
TEXT_BYTES_OF_A_UNIT: Final = 16
_IN_NUMBERS: Final = b"0123456789.eE+-"
_AS_ZEROS: Final = bytes.maketrans(b"123456789.+E", b"0" * 10 + b"-e")  # what is looked for is found quickly in it
_LONG_ZEROS: Final = b"0" * 16
_EXTREME_ZEROS: Final = b"e000", b"e-000"


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


def check_decode_cost(body: bytes, *, texts: bool) -> None:
    """Check that decoding the JSON costs at most ``MAX_DECODE_COST``. Raises InvalidRequest.

    ``texts``: whether the decoder makes objects of texts, or steps over them. The decoder holds the interpreter's lock
    until it is done, so a costly body would block all other threads.
    """
    if not _is_cheap(body, texts=texts) and decode_cost(body, texts=texts) > MAX_DECODE_COST:
        raise InvalidRequest(
            f"The request body has more values than are read: {MAX_DECODE_COST} numbers at most, of which a string "
            "counts as two, an object, a list and a key as five each, a number whose exponent has three digits as "
            f"{_EXTREME_WEIGHT}, a number of 16 or more digits as a third of its digits, {_ESCAPES_OF_A_UNIT} "
            f"escape sequences as one, and {TEXT_BYTES_OF_A_UNIT} bytes of text as one (so "
            f"{bytes_text(TEXT_BYTES_OF_A_UNIT * MAX_DECODE_COST)} of text at most); send fewer or shorter ones in a "
            "request, and tensors as binary data.",
            code="too_many_values",
        )


def decode_cost(body: bytes, *, texts: bool) -> int:
    """The cost of decoding ``body``, in numbers of a list. Counting stops above ``MAX_DECODE_COST``. ``texts``: as in
    ``check_decode_cost``."""
    cost = num_escapes = num_text_bytes = 0
    rest = b""  # a number that the next piece may go on with
    for piece in pieces(body):
        if texts:
            num_text_bytes += len(piece.raw) - sum(map(len, piece.outside))
        part = rest + b"".join(piece.outside)
        cost += len(piece.outside) + part.count(b",")
        cost += 4 * (part.count(b":") + part.count(b"[") + part.count(b"{"))
        num_escapes += piece.raw.count(b"\\")
        end = len(part.rstrip(_IN_NUMBERS))
        part, rest = (part[:end], part[end:]) if len(part) - end <= CHEAP_BYTES else (part, b"")
        cost += _numbers_cost(part)
        if cost + _texts_cost(num_escapes, num_text_bytes) > MAX_DECODE_COST:
            break
    return cost + _texts_cost(num_escapes, num_text_bytes) + _numbers_cost(rest)


def _texts_cost(num_escapes: int, num_bytes: int) -> int:
    """What texts cost beyond one each."""
    return num_escapes // _ESCAPES_OF_A_UNIT + num_bytes // TEXT_BYTES_OF_A_UNIT


def _numbers_cost(part: bytes) -> int:
    """What the numbers in a text outside strings cost beyond one each."""
    zeros = part.translate(_AS_ZEROS)
    cost = _EXTREME_WEIGHT * len(_EXTREME.findall(part)) if _has_extremes(zeros) else 0
    if _LONG_ZEROS in zeros:
        cost += sum(len(number) // _DIGITS_OF_A_UNIT for number in _LONG.findall(part))
    return cost


def _is_cheap(body: bytes, *, texts: bool) -> bool:
    """Whether decoding costs at most ``MAX_DECODE_COST`` whatever the values are. Quick to see of most bodies."""
    if len(body) <= MAX_DECODE_COST:
        zeros = body.translate(_AS_ZEROS)
        return not _has_extremes(zeros) and _LONG_ZEROS not in zeros
    most = len(body) // TEXT_BYTES_OF_A_UNIT if texts else 0
    for at in range(0, len(body), _PIECE_BYTES):
        piece = body[at : at + _PIECE_BYTES]
        zeros = piece.translate(_AS_ZEROS)
        weight = _EXTREME_WEIGHT if _has_extremes(zeros) else 4
        most += weight * (len(piece) - len(piece.translate(None, b',:[{"'))) + piece.count(b"\\") // _ESCAPES_OF_A_UNIT
        if _LONG_ZEROS in zeros:
            most += len(piece) // _DIGITS_OF_A_UNIT
        if most > MAX_DECODE_COST:
            return False
    return True


def _has_extremes(zeros: bytes) -> bool:
    return any(extreme in zeros for extreme in _EXTREME_ZEROS)
