"""Stores a response before the last part of its answer is sent."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from inferd.eager import in_task
from inferd.errors import InferdError
from inferd.gateway.call import DONE, Call
from inferd.gateway.context import Context
from inferd.gateway.generation.writer import encode
from inferd.gateway.responses.output import OutputWriter, Shape
from inferd.gateway.responses.state import conversation_id
from inferd.gateway.responses.wire import ResponseObject, ResponsesRequest
from inferd.stored.port import ResponseStore, StoredResponse
from inferd.stored.record import EventRecord


class Storing:
    """Stores one response, or appends its items to a conversation where the response itself is not stored."""

    __slots__ = (
        "_begun_at",
        "_context",
        "_conversation",
        "_input_items",
        "_is_background",
        "_previous",
        "_store",
        "_tenant",
    )

    def __init__(
        self,
        context: Context,
        call: Call,
        store: ResponseStore | None,
        body: ResponsesRequest,
        input_items: bytes,
        begun_at: float,
    ) -> None:
        self._begun_at = begun_at  # orders the responses of a tenant, within a second too
        self._is_background = bool(body.background)
        self._context = context
        self._tenant = call.principal.tenant
        self._store = store
        self._previous = body.previous_response_id or ""
        self._conversation = conversation_id(body) or ""
        self._input_items = input_items

    async def keep(self, response: ResponseObject, body: bytes, events: bytes = b"") -> None:
        """Store a response that is over. Raises InferdError."""
        await in_task()
        if self._store is not None:
            await self._store.put(self.stored(response, body, events))
        elif self._conversation and self._context.stored is not None and response.status != "failed":
            items = msgspec.json.decode(self._input_items, type=list[msgspec.Raw])
            output = [encode(item) for item in response.output]
            await self._context.stored.append(
                self._tenant, self._conversation, [*(bytes(item) for item in items), *output]
            )

    def stored(self, response: ResponseObject, body: bytes, events: bytes = b"") -> StoredResponse:
        """A response as it is stored."""
        return StoredResponse(
            id=response.id,
            tenant=self._tenant,
            created_at=self._begun_at,
            status=response.status,
            body=body,
            input_items=self._input_items,
            previous=self._previous,
            conversation=self._conversation,
            background=self._is_background,
            events=events,
        )

    async def kept_frames(
        self,
        frames: AsyncGenerator[bytes, None],
        shape: Shape,
        writers: Sequence[OutputWriter],
        is_interrupted: Callable[[InferdError], bool],
    ) -> AsyncGenerator[bytes, None]:
        """The frames of a stream. The response is stored before its last frame leaves; where that fails, the last frame
        says so. A background response is also stored when it begins. ``writers``: the writer of the frames, once there
        is one; ``is_interrupted``: whether a failed background response is not over, because it begins again. Raises
        InferdError where a background response must not be computed."""
        record = EventRecord()
        is_begun = not self._is_background
        async with contextlib.aclosing(frames):
            async for frame in frames:
                if writers:
                    if not is_begun:
                        is_begun = True
                        await self.keep(shape.unfinished, encode(shape.unfinished))
                    record.add(frame.removesuffix(DONE))
                    response = writers[0].response
                    if response is not None:
                        failure = writers[0].failure
                        if failure is not None and self._is_background and is_interrupted(failure):
                            return
                        try:
                            await self.keep(response, encode(response), record.finish())
                        except InferdError as error:
                            if response.status != "failed":
                                frame = writers[0].instead(frame, error)
                yield frame
