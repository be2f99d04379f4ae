"""The answer of a remote server to a request that a worker could have computed too."""

from __future__ import annotations

from inferd.errors import InternalError
from inferd.gateway.call import Answer, Call, EventStream, Response
from inferd.gateway.errors import check_end
from inferd.gateway.generation.relayed_frames import relayed_frames
from inferd.gateway.http_call import NOSNIFF
from inferd.router.stream import Stream
from inferd.types import Item, Relayed


async def relayed_answer(call: Call, stream: Stream) -> Answer | None:
    """The answer, if a remote server gives it; None: a worker does, and ``stream`` has all of its items."""
    first = await anext(stream)
    if isinstance(first, Relayed):
        return await forwarded(call, stream, first)
    stream.put_back(first)
    return None


async def forwarded(call: Call, stream: Stream, first: Item) -> Answer:
    """The relayed answer that begins with ``first``. Raises the error of a request that failed before it."""
    head = first.head if isinstance(first, Relayed) else None
    if head is None:
        if first.end is not None:
            check_end(first.end)
        raise InternalError("The remote server's answer has no beginning.")
    assert isinstance(first, Relayed)
    if call.stream and head.status == 200:
        return EventStream(relayed_frames(call, stream, first), head.headers)
    pieces = [first.data]
    async for item in stream:
        if isinstance(item, Relayed):
            pieces.append(item.data)
    return Response(head.status, b"".join(pieces), head.content_type, (*head.headers, NOSNIFF))
