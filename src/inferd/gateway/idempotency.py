"""Idempotency-Key: a request that is sent again gets the first one's answer, byte for byte.

Knows headers and answers; who comes first and what is kept is ``IdempotencyStore``'s. Only complete,
successful answers are repeated: what failed is tried anew.
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
    """Those headers that are kept with an answer."""
    return tuple([header for header in headers if header[0].lower() in _STORED_HEADERS])


async def run_idempotent(
    context: Context, call: Call, raw: bytes, model: str, compute: Callable[[], Awaitable[Answer]]
) -> Answer:
    """What ``compute`` answers; where the request names an Idempotency-Key, computed once for all that
    name it. Raises IdempotencyConflict for another body under the same key."""
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
    call.closers.append(found.abandon)  # however the call ends; nothing when it was finished
    answer = await compute()
    if isinstance(answer, EventStream):
        return EventStream(_recorded(answer.frames, answer.ending, found), answer.headers, answer.ending)
    if answer.status == 200:
        await found.finish(
            StoredAnswer(answer.status, answer.content_type, answer.body, stored_headers(answer.headers))
        )
    return answer


async def _recorded(frames: AsyncGenerator[bytes, None], ending: bytes, claim: Claim) -> AsyncGenerator[bytes, None]:
    """Frames as they come. The last one waits until all are kept: a client that has seen the end is
    given the same again, even after a crash."""
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
