"""Idempotency-Key: a repeated request gets the first request's answer, byte for byte.

Only complete, successful answers are repeated; a failed request is computed again. Knows headers and answers.
``IdempotencyStore`` decides which request is the first, and stores the answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from typing import Final

from inferd.gateway.admission import reserve
from inferd.gateway.call import EVENTS_HEADERS, STREAM_TYPES, Call, EventStream, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid
from inferd.http.exchange import Headers
from inferd.tenancy.idempotency import MAX_ANSWER_BYTES, MAX_KEY_CHARS, Claim, StoredAnswer
from inferd.types import TOLD

_STORED_HEADERS: Final = frozenset({b"inference-header-content-length", *TOLD})
_REPLAYED: Final[Headers] = ((b"idempotent-replayed", b"true"),)


def stored_headers(headers: Headers) -> Headers:
    """The headers that are stored with an answer: those that tell how to read it, or what became of its request."""
    return tuple([header for header in headers if header[0].lower() in _STORED_HEADERS])


def asks_for_repetition(context: Context, call: Call) -> bool:
    """Whether the request has an Idempotency-Key that this server honours."""
    return call.facts.names_key and context.idempotency is not None


async def repeated(context: Context, call: Call, identity: bytes, model: str | None) -> Response | None:
    """The stored answer of an earlier request with the same Idempotency-Key; None: this is the first request, and its
    answer will be stored. ``model``: whose quota the repetition counts; None: it costs none.

    Raises IdempotencyConflict for another body under the same key, and InvalidRequest for a malformed key.
    """
    assert context.idempotency is not None, "asked for where there is a store"
    key = (call.header(b"idempotency-key") or b"").decode("latin-1")
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        raise invalid(
            "idempotency-key", f"The header Idempotency-Key must be 1 to {MAX_KEY_CHARS} printable ASCII characters."
        )
    digest = hashlib.sha256(b"%b %b\n%b" % (call.method.encode(), call.route.encode(), identity)).digest()
    found = await context.idempotency.begin(call.principal.tenant, key, digest)
    if isinstance(found, StoredAnswer):
        if model is not None:
            reserve(context, call, model)
        streamed = EVENTS_HEADERS if found.content_type in STREAM_TYPES else ()
        return Response(found.status, found.body, found.content_type, (*found.headers, *_REPLAYED, *streamed))
    call.closers += (found.abandon,)  # has no effect after ``finish``
    call.recorders += (_Claimed(found),)
    return None


class _Claimed:
    """Stores the answer to the first request with a key."""

    __slots__ = ("_claim",)

    def __init__(self, claim: Claim) -> None:
        self._claim = claim

    async def record(self, response: Response) -> Response:
        """Store a success; a failed request is computed again."""
        if response.status == 200:
            await self._claim.finish(
                StoredAnswer(response.status, response.content_type, response.body, stored_headers(response.headers))
            )
        return response

    def record_events(self, events: EventStream) -> EventStream:
        recorded = _recorded(events, self._claim)
        return EventStream(recorded, events.headers, events.ending, events.content_type)


async def _recorded(events: EventStream, claim: Claim) -> AsyncGenerator[bytes, None]:
    """Frames as they come. The last one is sent after the answer was stored, so a client that has read the end gets the
    same answer again, even after a crash."""
    recorded: list[bytes] | None = []
    num_bytes = 0
    try:
        async for frame in events.frames:
            if recorded is not None:
                recorded.append(frame)
                num_bytes += len(frame)
                if num_bytes > MAX_ANSWER_BYTES:
                    recorded = None  # too large to be repeated; it is not held in memory either
                elif frame.endswith(events.ending):
                    headers = stored_headers(events.headers)
                    await claim.finish(StoredAnswer(200, events.content_type, b"".join(recorded), headers))
            yield frame
    finally:
        await events.frames.aclose()
