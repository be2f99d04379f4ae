"""Server-sent events of a streamed answer: the frames and their order.

Every frame is ``data: {json}`` and an empty line. The parts that are equal in all frames of a choice are encoded once;
for each token only the text is encoded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final, Protocol

import msgspec

from inferd.errors import InferdError, InternalError
from inferd.gateway.call import DONE, Call, EventStream
from inferd.gateway.generation import error_frame, failure_of, first_output, merge, usage_body
from inferd.gateway.upstream import Stream
from inferd.http.asgi import Headers
from inferd.types import Delta, Output, Usage

HEARTBEAT: Final = b": the model is loading\n\n"
HEARTBEAT_S: Final = 10.0
_NO_USAGE: Final = b"]}\n\n"
_NULL_USAGE: Final = b'],"usage":null}\n\n'

encode: Final = msgspec.json.Encoder().encode

Outputs = AsyncGenerator[tuple[int, Output], None]


class ChunkEnvelope:
    """The parts of a chunk around its choices: id, model and usage."""

    __slots__ = ("_completion_tokens", "_continuous", "_include_usage", "_prompt_tokens", "head", "tail")

    def __init__(
        self,
        kind: bytes,
        response_id: str,
        created: int,
        model: str,
        fingerprint: str | None,
        *,
        include_usage: bool,
        continuous: bool,
    ) -> None:
        self.head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"system_fingerprint":%b,"choices":[' % (
            encode(response_id),
            kind,
            created,
            encode(model),
            encode(fingerprint),
        )
        self._include_usage = include_usage
        self._continuous = continuous
        self._prompt_tokens: dict[int, int] = {}
        self._completion_tokens = 0
        self.tail = _NULL_USAGE if include_usage else _NO_USAGE

    def note(self, number: int, output: Output) -> None:
        """Count the tokens of an output, for clients that want the usage in every frame."""
        if not self._continuous:
            return
        if output.prompt is not None:
            self._prompt_tokens[number] = output.prompt.num_tokens
        self._completion_tokens += sum(len(delta.token_ids) for delta in output.deltas)
        usage = Usage(sum(self._prompt_tokens.values()), self._completion_tokens)
        self.tail = b'],"usage":%b}\n\n' % encode(usage_body(usage))

    def ending(self, usage: Usage | None) -> bytes:
        """The frames after the end of the last choice."""
        if not self._include_usage:
            return DONE
        return self.head + b'],"usage":%b}\n\n' % encode(usage_body(usage or Usage())) + DONE


class DeltaWriter(Protocol):
    """Turns outputs into frames. Each API has its own."""

    @property
    def envelope(self) -> ChunkEnvelope: ...
    def write(self, number: int, output: Output) -> bytes:
        """The frames for one output, possibly none."""
        ...


def end_fields(delta: Delta) -> tuple[bytes, bytes]:
    """``finish_reason`` and ``stop_reason`` as JSON. Both are null for a failed choice, which an error event
    follows."""
    if delta.finish_reason is None or delta.finish_reason in ("error", "cancelled"):
        return b"null", b"null"
    return encode(delta.finish_reason), encode(delta.stop_reason)


async def stream_answer(
    call: Call,
    streams: Sequence[Stream],
    write: Callable[[], DeltaWriter],
    headers: Headers,
    *,
    heartbeat_s: float | None,
) -> EventStream:
    """The streamed answer. A failure before the first output is raised, so it becomes an HTTP error.

    With ``heartbeat_s``, for a model that is loading, the answer begins after that many seconds even without an output.
    It then sends a comment every ``heartbeat_s`` seconds, so that proxies and clients keep waiting, and a failure
    becomes an error event. ``write`` is called after the first output.
    """
    outputs = merge(call, streams)

    def frames(first: tuple[int, Output]) -> AsyncGenerator[bytes, None]:
        return events(call, outputs, first, len(streams), write())

    if heartbeat_s is None:
        return EventStream(frames(await first_output(outputs, call)), headers)
    first = asyncio.ensure_future(first_output(outputs, call))
    call.closers.append(lambda: _discard(first))
    await asyncio.wait((first,), timeout=heartbeat_s)
    if first.done():
        return EventStream(frames(first.result()), headers)
    return EventStream(_with_heartbeats(call, first, frames, heartbeat_s), headers)


def _discard(task: asyncio.Future[tuple[int, Output]]) -> None:
    """Cancel the task, or mark its exception as retrieved if it has ended."""
    if not task.cancel() and not task.cancelled():
        task.exception()


async def _with_heartbeats(
    call: Call,
    first: asyncio.Future[tuple[int, Output]],
    frames: Callable[[tuple[int, Output]], AsyncGenerator[bytes, None]],
    heartbeat_s: float,
) -> AsyncGenerator[bytes, None]:
    while not first.done():
        yield HEARTBEAT
        await asyncio.wait((first,), timeout=heartbeat_s)
    try:
        output = first.result()
    except InferdError as error:
        yield error_frame(call, error)
        return
    async with contextlib.aclosing(frames(output)) as rest:
        async for frame in rest:
            yield frame


async def events(
    call: Call, outputs: Outputs, first: tuple[int, Output], num_streams: int, writer: DeltaWriter
) -> AsyncGenerator[bytes, None]:
    """Frames until every stream has ended, or one error frame and nothing more."""
    try:
        number, output = first
        num_open = num_streams
        while True:
            frames = writer.write(number, output)
            end = output.end
            if end is not None:
                error = failure_of(end)
                if error is not None:
                    yield frames + error_frame(call, error)
                    return
                num_open -= 1
                if num_open == 0:
                    yield frames + writer.envelope.ending(call.usage_so_far)
                    return
            if frames:
                yield frames
            number, output = await anext(outputs)
    except InferdError as error:
        yield error_frame(call, error)
    except StopAsyncIteration:
        yield error_frame(call, InternalError("The answer ended before it was complete; try again."))
    finally:
        await outputs.aclose()
