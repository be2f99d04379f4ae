"""The outputs of several streams as they come: async generators, which mypyc does not compile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from inferd.errors import InternalError
from inferd.gateway.call import Call
from inferd.gateway.errors import check_end, is_done
from inferd.gateway.generation.requests import unexpected_relay
from inferd.router.stream import Stream
from inferd.types import Output


async def merge(call: Call, streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Output], None]:
    """Outputs of several streams as they come, each with its stream's number.

    At most one output per stream is held here, so a slow reader does not fill memory.
    """
    if len(streams) == 1:
        async for output in streams[0]:
            if not isinstance(output, Output):
                raise unexpected_relay()
            if output.prompt is not None:
                call.note_prompt_tokens(output.prompt.num_tokens)
            yield 0, output
        return
    waiting = {asyncio.create_task(_next(stream)): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                number = waiting.pop(task)
                output_or_none = task.result()
                if output_or_none is not None:
                    waiting[asyncio.create_task(_next(streams[number]))] = number
                    if output_or_none.prompt is not None:
                        call.note_prompt_tokens(output_or_none.prompt.num_tokens)
                    yield number, output_or_none
    finally:
        for task in waiting:
            task.cancel()


async def _next(stream: Stream) -> Output | None:
    try:
        output = await anext(stream)
    except StopAsyncIteration:
        return None
    if not isinstance(output, Output):
        raise unexpected_relay()
    return output


async def first_output(outputs: AsyncGenerator[tuple[int, Output], None], call: Call) -> tuple[int, Output]:
    """The first output and its stream's number, before any status is sent. Raises the error of a failed request, which
    then becomes an HTTP error."""
    try:
        number, output = await anext(outputs)
        if output.end is not None and not is_done(output.end):
            check_end(output.end)
    except StopAsyncIteration:
        raise InternalError("The request ended without a result; try again.") from None
    except BaseException:
        await outputs.aclose()
        raise
    return number, output
