"""Compressed bodies of requests and answers: gzip and deflate (RFC 1952, RFC 1950)."""

from __future__ import annotations

import asyncio
import zlib
from typing import Final

from inferd.gateway.body.inflate import WBITS, decompress
from inferd.gateway.call import Call, Encoding, Response
from inferd.gateway.errors import UnsupportedMediaType, printable

MIN_BYTES: Final = 1024  # a smaller answer is sent uncompressed
OFF_LOOP_BYTES: Final = 1024  # a larger compressed body is decompressed on another thread
OFF_LOOP_ANSWER_BYTES: Final = 64 * 1024
_LEVEL: Final = 1


def encoding_of(call: Call) -> Encoding | None:
    """How the request's body is compressed; None: it is not. Raises UnsupportedMediaType."""
    header = call.header(b"content-encoding")
    if header is None:
        return None
    name = header.strip().lower()
    if name in (b"", b"identity"):
        return None
    if name == b"gzip":
        return "gzip"
    if name == b"deflate":
        return "deflate"
    shown = printable(name.decode("latin-1"))
    raise UnsupportedMediaType(
        f"Content-Encoding {shown!r} is not supported; send gzip, deflate or an uncompressed body."
    )


async def decompressed(body: bytes, encoding: Encoding | None, max_bytes: int) -> bytes:
    """The decompressed body. Raises InvalidRequest, and BodyTooLarge before it takes more than ``max_bytes``."""
    if encoding is None:
        return body
    if len(body) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(decompress, body, encoding, max_bytes)
    return decompress(body, encoding, max_bytes)


def wanted_encoding(call: Call) -> Encoding | None:
    """The encoding of an answer that the client accepts, preferably gzip. None: neither."""
    header = call.header(b"accept-encoding")
    if header is None:
        return None
    accepted = set()
    for part in header.lower().split(b","):
        name, _, quality = part.partition(b";")
        if quality.replace(b" ", b"") not in (b"q=0", b"q=0.0", b"q=0.00", b"q=0.000"):
            accepted.add(name.strip())
    return "gzip" if b"gzip" in accepted else "deflate" if b"deflate" in accepted else None


async def compressed(response: Response, encoding: Encoding) -> Response:
    """The answer, compressed if the client accepts that and the answer has at least ``MIN_BYTES``."""
    body = response.body
    if len(body) < MIN_BYTES:
        return response
    if len(body) > OFF_LOOP_ANSWER_BYTES:
        body = await asyncio.to_thread(compress, body, encoding)
    else:
        body = compress(body, encoding)
    headers = (*response.headers, (b"content-encoding", encoding.encode("ascii")), (b"vary", b"accept-encoding"))
    return Response(response.status, body, response.content_type, headers)


def compress(body: bytes, encoding: Encoding) -> bytes:
    """The compressed body, on the calling thread."""
    deflate = zlib.compressobj(_LEVEL, wbits=WBITS[encoding])
    return deflate.compress(body) + deflate.flush()
