"""Server-sent events of a streamed answer: framing, and the order in which things are said.

Every frame is ``data: {json}`` and an empty line. The parts that are the same in all frames of a
choice are encoded once; per token only the text is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Final, Protocol

import msgspec

from inferd.errors import InferdError, InternalError
from inferd.gateway.generation import error_frame, failure_of, note_end, usage_body
from inferd.gateway.http import Call
from inferd.types import Delta, Output, Usage

DONE: Final = b"data: [DONE]\n\n"
_NO_USAGE: Final = b"]}\n\n"
_NULL_USAGE: Final = b'],"usage":null}\n\n'

encode: Final = msgspec.json.Encoder().encode

Outputs = AsyncGenerator[tuple[int, Output], None]


class Envelope:
    """What surrounds every choice: ids, model, and the usage that comes with it."""

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
        """Count along, for clients that want usage with every frame."""
        if not self._continuous:
            return
        if output.prompt is not None:
            self._prompt_tokens[number] = output.prompt.num_tokens
        self._completion_tokens += sum(len(delta.token_ids) for delta in output.deltas)
        usage = Usage(sum(self._prompt_tokens.values()), self._completion_tokens)
        self.tail = b'],"usage":%b}\n\n' % encode(usage_body(usage))

    def ending(self, usage: Usage | None) -> bytes:
        """The frames after the last choice has ended."""
        if not self._include_usage:
            return DONE
        return self.head + b'],"usage":%b}\n\n' % encode(usage_body(usage or Usage())) + DONE


class DeltaWriter(Protocol):
    """Turns outputs into frames; one kind per API."""

    def write(self, number: int, output: Output) -> bytes:
        """The frames for one output, possibly none."""
        ...


def endings(delta: Delta) -> tuple[bytes, bytes]:
    """``finish_reason`` and ``stop_reason`` as JSON. A failed choice shows none: an error follows."""
    if delta.finish_reason is None or delta.finish_reason in ("error", "cancelled"):
        return b"null", b"null"
    return encode(delta.finish_reason), encode(delta.stop_reason)


async def events(
    call: Call,
    outputs: Outputs,
    first: tuple[int, Output],
    num_streams: int,
    writer: DeltaWriter,
    ending: Callable[[Usage | None], bytes],
) -> AsyncGenerator[bytes, None]:
    """Frames until every stream has ended, or one error frame and nothing more."""
    try:
        number, output = first
        num_open = num_streams
        while True:
            frames = writer.write(number, output)
            end = output.end
            if end is not None:
                note_end(call, end)
                error = failure_of(end)
                if error is not None:
                    yield frames + error_frame(call, error)
                    return
                num_open -= 1
                if num_open == 0:
                    yield frames + ending(call.usage)
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
