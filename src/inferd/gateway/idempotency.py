"""Idempotency-Key: a repeated request gets the first request's answer, byte for byte.

Only complete, successful answers are repeated; a failed request is computed again. Knows headers and answers.
``IdempotencyStore`` decides which request is the first, and stores the answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

from inferd.gateway.admission import reserve
from inferd.gateway.call import EVENTS_HEADERS, EVENTS_TYPE, Answer, Call, EventStream, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid
from inferd.http.asgi import Headers
from inferd.tenancy.idempotency import MAX_ANSWER_BYTES, MAX_KEY_CHARS, Claim, StoredAnswer

_STORED_HEADERS: Final = frozenset({b"inference-header-content-length"})
_REPLAYED: Final[Headers] = ((b"idempotent-replayed", b"true"),)


def stored_headers(headers: Headers) -> Headers:
    """The headers that are stored with an answer."""
    return tuple([header for header in headers if header[0].lower() in _STORED_HEADERS])


async def run_idempotent(
    context: Context, call: Call, raw: bytes, model: str, compute: Callable[[], Awaitable[Answer]]
) -> Answer:
    """The result of ``compute``, or the stored answer of an earlier request with the same Idempotency-Key.

    Raises IdempotencyConflict for another body under the same key, and InvalidRequest for a malformed key.
    """
    header = call.header(b"idempotency-key")
    if header is None or context.idempotency is None:
        return await compute()
    key = header.decode("latin-1")
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        raise invalid(
            "idempotency-key", f"The header Idempotency-Key must be 1 to {MAX_KEY_CHARS} printable ASCII characters."
        )
    digest = hashlib.sha256(b"%b %b\n%b" % (call.method.encode(), call.route.encode(), raw)).digest()
    found = await context.idempotency.begin(call.principal.tenant, key, digest)
    if isinstance(found, StoredAnswer):
        reserve(context, call, model)
        streamed = EVENTS_HEADERS if found.content_type == EVENTS_TYPE else ()
        return Response(found.status, found.body, found.content_type, (*found.headers, *_REPLAYED, *streamed))
    call.closers.append(found.abandon)  # has no effect after ``finish``
    answer = await compute()
    if isinstance(answer, EventStream):
        return EventStream(_recorded(answer.frames, answer.ending, found), answer.headers, answer.ending)
    if answer.status == 200:
        await found.finish(
            StoredAnswer(answer.status, answer.content_type, answer.body, stored_headers(answer.headers))
        )
    return answer


async def _recorded(frames: AsyncGenerator[bytes, None], ending: bytes, claim: Claim) -> AsyncGenerator[bytes, None]:
    """Frames as they come. The last one is sent after the answer was stored, so a client that has read the end gets the
    same answer again, even after a crash."""
    recorded: list[bytes] | None = []
    num_bytes = 0
    try:
        async for frame in frames:
            if recorded is not None:
                recorded.append(frame)
                num_bytes += len(frame)
                if num_bytes > MAX_ANSWER_BYTES:
                    recorded = None  # too large to be repeated; it is not held in memory either
                elif frame.endswith(ending):
                    await claim.finish(StoredAnswer(200, EVENTS_TYPE, b"".join(recorded)))
            yield frame
    finally:
        await frames.aclose()
