"""The body of a relayed answer that is streamed: an async generator, which mypyc does not compile."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from inferd.gateway.call import Call
from inferd.gateway.errors import failure_of
from inferd.gateway.generation.requests import error_frame
from inferd.router.stream import Stream
from inferd.types import Item, Relayed


async def relayed_frames(call: Call, stream: Stream, first: Relayed) -> AsyncGenerator[bytes, None]:
    """The pieces of a relayed answer from ``first`` on, and an error as the last event where it fails."""
    item: Item = first
    while True:
        if isinstance(item, Relayed) and item.data:
            yield item.data
        if item.end is not None:
            error = failure_of(item.end)
            if error is not None:
                yield error_frame(call, error)
            return
        item = await anext(stream)
