"""Checks JSON for defects that the decoder accepts in fields that it skips.

A key that appears twice (parsers disagree on which one counts), and what no later reader could decode: invalid UTF-8,
numbers beyond float64, and lists and objects within each other without end.

Interpreted in every form of inferd, and in many calls for a large body: a compiled function, and each call of the
decoder, holds the interpreter's lock until it ends.
"""

from __future__ import annotations

import codecs
import json
import math
from typing import Any, Final

import msgspec

from inferd.errors import InvalidRequest, is_bad_utf8
from inferd.gateway.body.decode_cost import PIECE_BYTES, pieces
from inferd.gateway.errors import invalid, printable
from inferd.predict.codecs.duplicates import DuplicateKey, refuse_duplicates

MAX_DEPTH: Final = 256
"""Levels of lists and objects. Every reader and writer behind the door recurses, and gets through more than twice as
many."""

_ENCODED_BYTES: Final = 64 * 1024  # a larger document is not encoded again: that takes long for a large text
_LONGEST_ESCAPE: Final = 6
_CONTINUATION: Final = bytes(range(0x80, 0xC0))  # of a character in UTF-8

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def check_document(body: bytes) -> None:
    """Check valid JSON as a whole. Raises InvalidRequest where an object has a key twice, a string is not UTF-8, a
    number cannot be held, or there are too many levels of lists and objects."""
    num_colons = None
    try:
        if len(body) > _ENCODED_BYTES:
            body, num_colons = shortened(body)
        if is_certain(body, num_colons):
            return
        value = json.loads(body.decode("utf-8"), object_pairs_hook=refuse_duplicates, parse_float=_finite)
    except DuplicateKey as error:
        name = printable(str(error))
        raise invalid(name, f"The key {name!r} appears twice in one object; send it once.", "duplicate_key") from None
    except (ValueError, RecursionError) as error:
        raise no_json(error) from None
    if is_too_deep(value):
        raise InvalidRequest(
            f"The request body has more than {MAX_DEPTH} levels of lists and objects within each other; flatten it.",
            code="invalid_json",
        )


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise InvalidRequest(
            f"The request body has the number {printable(number)}, which is beyond 1.8e308; send a smaller one.",
            code="invalid_json",
        )
    return value


def shortened(body: bytes) -> tuple[bytes, int]:
    """Valid JSON without what stands between the first and the last bytes of long texts, and the number of its keys.

    A decoder holds the interpreter's lock while it makes an object of a text, so the middle of a text is looked at in
    pieces, and dropped. Raises InvalidRequest for a key so long that its middle was dropped, and UnicodeDecodeError.
    """
    kept: list[bytes] = []
    num_colons = 0
    is_cut = may_end_escaped = False  # the string before was shortened; the piece before may end within an escape
    for piece in pieces(body):
        raw = piece.raw
        has_escape = b"\\" in raw
        if piece.is_inside and not piece.outside and not has_escape and not may_end_escaped:
            inner = raw.lstrip(_CONTINUATION)  # the rest of a character that the piece before begins
            decoder = codecs.getincrementaldecoder("utf-8")()
            decoder.decode(inner)
            kept += raw[: len(raw) - len(inner)], decoder.getstate()[0]
            is_cut = True
            continue
        kept.append(raw)
        may_end_escaped = has_escape and b"\\" in raw[-_LONGEST_ESCAPE:]
        num_colons += sum([part.count(b":") for part in piece.outside])
        if is_cut and (rest := b"".join(piece.outside).lstrip()):
            if rest.startswith(b":"):
                raise InvalidRequest(
                    f"The request body has a key of more than {PIECE_BYTES} bytes; send a shorter one.",
                    code="invalid_json",
                )
            is_cut = False
    return b"".join(kept), num_colons


def is_certain(body: bytes, num_colons: int | None = None) -> bool:
    """True only for JSON that ``check_document`` accepts. Takes less than half of its time.

    The document is decoded, which drops keys that come twice, and encoded again. Every key has one colon; colons inside
    strings are copied, or dropped with their string. So an equal number of colons means that no key was dropped, unless
    an escape sequence stands for a colon. In a large document, keys are counted and compared with ``num_colons``, the
    colons outside strings.
    """
    if (
        num_colons is None and b"\\" in body and b"\\u003" in body
    ):  # a search for one byte is ten times as fast where there is none
        return False  # the escape sequence of a colon, or of a character next to it
    try:
        value = _decode(body)
        if num_colons is not None:
            return _num_keys(value) == num_colons
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH and is_too_deep(value):
            return False
        again = _encode(value)
    except (ValueError, RecursionError):
        return False
    # Most clients write compact JSON, which is encoded to the same bytes.
    return again == body or again.count(b":") == body.count(b":")


def is_too_deep(value: Any) -> bool:
    """Whether decoded JSON has more than ``MAX_DEPTH`` levels of lists and objects."""
    return _num_keys(value) is None


def _num_keys(value: Any) -> int | None:
    """The keys of all objects in decoded JSON; None: it has more than ``MAX_DEPTH`` levels."""
    num_keys = 0
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return num_keys
        num_keys += sum(len(one) for one in level if isinstance(one, dict))
        parts = [one if isinstance(one, list) else one.values() for one in level]
        level = [one for part in parts for one in part if isinstance(one, list | dict)]
    return None if level else num_keys


def no_json(error: Exception) -> InvalidRequest:
    """The error for bytes that a decoder refused."""
    if is_bad_utf8(error):
        return InvalidRequest("The request body is not valid UTF-8; encode the JSON as UTF-8.", code="invalid_utf8")
    if isinstance(error, RecursionError):
        return InvalidRequest("The request body is nested too deeply; flatten it.", code="invalid_json")
    return InvalidRequest(
        f"The request body is not valid JSON ({printable(str(error), 200)}); send one JSON object.",
        code="invalid_json",
    )
