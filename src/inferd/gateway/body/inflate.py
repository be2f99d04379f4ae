"""Compressed bodies opened in pieces, up to the limit for bodies: a small one may decompress to any size.

Interpreted in every form of inferd, because it runs on another thread than the event loop's.
"""

from __future__ import annotations

import zlib
from typing import Final

from inferd.config.units import bytes_text
from inferd.errors import InvalidRequest
from inferd.gateway.body.joined import joined
from inferd.gateway.call import Encoding
from inferd.gateway.errors import BodyTooLarge

WBITS: Final[dict[Encoding, int]] = {"gzip": 31, "deflate": 15}
"""zlib's name of a form (``wbits``)."""

_TAKEN_BYTES: Final = 64 * 1024  # decompressed by one call, to at most
_GIVEN_BYTES: Final = 1024 * 1024


def decompress(body: bytes, encoding: Encoding, max_bytes: int) -> bytes:
    """The decompressed body. Raises InvalidRequest, and BodyTooLarge before it takes more than ``max_bytes``."""
    inflate = zlib.decompressobj(WBITS[encoding])
    parts: list[bytes] = []
    num_bytes = at = 0
    try:
        # In pieces on both sides: what one call gives, and what it leaves of what it got, is copied under the
        # interpreter's lock.
        while num_bytes <= max_bytes and at < len(body) and not inflate.eof:
            rest = body[at : at + _TAKEN_BYTES]
            at += len(rest)
            is_full = True
            while num_bytes <= max_bytes and not inflate.eof and (rest or is_full):
                part = inflate.decompress(rest, _GIVEN_BYTES)
                parts.append(part)
                num_bytes += len(part)
                rest, is_full = inflate.unconsumed_tail, len(part) == _GIVEN_BYTES
    except zlib.error as error:
        raise InvalidRequest(
            f"The body is not {encoding}, as Content-Encoding says ({error}); compress it again or leave the header "
            "out.",
            code="invalid_encoding",
        ) from None
    if num_bytes > max_bytes:
        raise BodyTooLarge(
            f"The request body is larger than {bytes_text(max_bytes)} when it is opened; send less, or raise "
            "server.max_body_bytes."
        )
    if not inflate.eof or inflate.unused_data or at < len(body):
        raise InvalidRequest(
            f"The {encoding} body {'has something behind its end' if inflate.eof else 'ends before it is complete'}; "
            "send one complete stream.",
            code="invalid_encoding",
        )
    return parts[0] if len(parts) == 1 else joined(parts, num_bytes)
