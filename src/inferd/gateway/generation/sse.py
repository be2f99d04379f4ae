"""Server-sent events of a streamed answer: their order, and the errors and heartbeats among them.

The async generators are here, because mypyc does not compile them; each dialect writes its frames (``AnswerWriter``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

from inferd.errors import InferdError, InternalError
from inferd.gateway.call import Call, EventStream
from inferd.gateway.errors import failure_of
from inferd.gateway.generation.outputs import first_output, merge
from inferd.gateway.generation.requests import report_headers
from inferd.gateway.generation.writer import AnswerWriter, StreamForm
from inferd.http.exchange import Headers
from inferd.router.stream import Stream
from inferd.types import Output

HEARTBEAT_S: Final = 10.0

Outputs = AsyncGenerator[tuple[int, Output], None]


async def stream_answer(
    call: Call,
    streams: Sequence[Stream],
    write: Callable[[], AnswerWriter],
    form: StreamForm,
    headers: Headers,
    *,
    is_loading: bool,
) -> EventStream:
    """The streamed answer. A failure before the first output is raised, so it becomes an HTTP error.

    With ``is_loading``, for a model that is loading, the answer begins after ``HEARTBEAT_S`` even without an output.
    It then sends the dialect's heartbeat every ``HEARTBEAT_S``, so that proxies and clients keep waiting, and a failure
    becomes an error event. ``write`` is called after the first output, or after the failure in its place.
    """
    outputs = merge(call, streams)

    def begun(first: tuple[int, Output]) -> EventStream:
        all_headers = (*headers, *report_headers(first[1].prompt))
        return EventStream(frames(first), all_headers, form.ending, form.content_type)

    def frames(first: tuple[int, Output]) -> AsyncGenerator[bytes, None]:
        return events(call, outputs, first, len(streams), write())

    if not is_loading and not form.always_beats:
        return begun(await first_output(outputs, call))
    first = asyncio.ensure_future(first_output(outputs, call))
    call.closers += (lambda: _discard(first),)
    await asyncio.wait((first,), timeout=HEARTBEAT_S)
    if first.done():
        return begun(first.result())
    beating = _with_heartbeats(first, frames, write, form.heartbeat)
    return EventStream(beating, headers, form.ending, form.content_type)


def _discard(task: asyncio.Future[tuple[int, Output]]) -> None:
    """Cancel the task, or mark its exception as retrieved if it has ended."""
    if not task.cancel() and not task.cancelled():
        task.exception()


async def _with_heartbeats(
    first: asyncio.Future[tuple[int, Output]],
    frames: Callable[[tuple[int, Output]], AsyncGenerator[bytes, None]],
    write: Callable[[], AnswerWriter],
    heartbeat: bytes,
) -> AsyncGenerator[bytes, None]:
    while not first.done():
        yield heartbeat
        await asyncio.wait((first,), timeout=HEARTBEAT_S)
    try:
        output = first.result()
    except InferdError as error:
        yield write().failed(error)
        return
    async with contextlib.aclosing(frames(output)) as rest:
        async for frame in rest:
            yield frame


async def events(
    call: Call, outputs: Outputs, first: tuple[int, Output], num_streams: int, writer: AnswerWriter
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
                    yield frames + writer.failed(error)
                    return
                num_open -= 1
                if num_open == 0:
                    yield frames + writer.ending(call.usage_so_far)
                    return
            if frames:
                yield frames
            number, output = await anext(outputs)
    except InferdError as error:
        yield writer.failed(error)
    except StopAsyncIteration:
        yield writer.failed(InternalError("The answer ended before it was complete; try again."))
    finally:
        await outputs.aclose()
