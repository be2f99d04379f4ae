"""POST generate and generate_stream: continue a text; the answer is whole or server-sent events.

Source: Triton's generate extension. ``parameters`` are the fields of /v1/completions. Does not know tensors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

import msgspec

from inferd.errors import InferdError, InternalError, InvalidRequest
from inferd.gateway.call import Answer, Call, EventStream, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import failure_of, invalid
from inferd.gateway.generation.fields import decode_open_body
from inferd.gateway.generation.outputs import first_output, merge
from inferd.gateway.generation.requests import Generation, collect, error_frame, ignored_header
from inferd.gateway.generation.writer import encode
from inferd.gateway.kserve.parameters import predict_fields_of
from inferd.gateway.kserve.served import Served
from inferd.gateway.openai.completions import completion_sampling, prompts_of
from inferd.gateway.openai.form import plain_form_of
from inferd.gateway.openai.options import options_of
from inferd.gateway.openai.sampling import check_unsupported
from inferd.gateway.openai.wire import completion_decoder
from inferd.gateway.terms import Cost
from inferd.observe.payloads.texts import JsonTexts
from inferd.router.stream import Stream
from inferd.types import Delta, FinishReason, Output

_OWN: Final = ("stream", "exclude_input_in_output", "model", "prompt", "request_id")  # not passed to /v1/completions
_ENDING: Final = b"}}\n\n"  # the end of the frame with ``details``; a frame with a text alone ends with one brace


class TextRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v2/models/{model}/generate"""

    text_input: str
    id: str | None = None
    parameters: dict[str, msgspec.Raw] | None = None
    stream: bool | None = None
    max_tokens: int | None = None


class TextDetails(msgspec.Struct, frozen=True):
    finish_reason: str | None


class TextAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A text, or a piece of one; the last piece of a stream has ``details``."""

    model_name: str
    model_version: str
    text_output: str
    id: str | None = None
    details: TextDetails | None = None


GENERATE_TEXTS: Final = JsonTexts("text_output")
text_decoder: Final = msgspec.json.Decoder(TextRequest)
_any: Final = msgspec.json.Decoder()


class TextWork:
    """A request for a text, for the stages. ``answer`` makes the answer from the stream of its outputs."""

    __slots__ = ("_answer", "_generation", "_identity", "model_name")

    def __init__(
        self, generation: Generation, identity: bytes, answer: Callable[[Call, Stream], Awaitable[Answer]]
    ) -> None:
        self.model_name = generation.model.name
        self._generation = generation
        self._identity = identity
        self._answer = answer

    def identity(self) -> bytes:
        return self._identity

    def inputs(self, context: Context) -> None:
        """Answers in this form are not cached."""

    def prepare(self, context: Context, call: Call) -> Cost:
        return self._generation.prepare(call, b"")

    async def submit(self, context: Context, call: Call) -> Answer:
        [stream] = await self._generation.submit(context, call)
        return await self._answer(call, stream)


async def whole_text(call: Call, stream: Stream) -> tuple[str, FinishReason | None]:
    """The whole text of a stream, and why it ended. Raises the error of a failed request."""
    choice = (await collect(call, stream, 1)).choices[0]
    call.finish_reasons = (choice.finish_reason,) if choice.finish_reason is not None else ()
    return "".join(choice.texts), choice.finish_reason


async def text_work(call: Call, served: Served, body: TextRequest, raw: bytes, *, is_stream: bool) -> TextWork:
    """Check a request for a text. ``raw``: its body. Raises InvalidRequest."""
    options = _options(body)
    if not is_stream and (body.stream or options.get("stream")):
        raise invalid("stream", "stream is true; POST to generate_stream for a stream.")
    call.stream = is_stream
    generation = await generation_of(call, served, body, options, is_stream=is_stream)
    identity = f"{served.status.name} {served.requested_version}\n".encode() + raw
    before = body.text_input if options.get("exclude_input_in_output") is False else ""

    async def streamed(call: Call, stream: Stream) -> Answer:
        outputs = merge(call, [stream])
        _, first = await first_output(outputs, call)
        return EventStream(_frames(call, served, body, outputs, first), ignored_header(call.ignored), _ENDING)

    async def whole(call: Call, stream: Stream) -> Answer:
        text, reason = await whole_text(call, stream)
        answer = _answer(served, body, before + text, TextDetails(reason))
        return Response(200, encode(answer), headers=ignored_header(call.ignored))

    return TextWork(generation, identity, streamed if is_stream else whole)


async def _frames(
    call: Call,
    served: Served,
    body: TextRequest,
    outputs: AsyncGenerator[tuple[int, Output], None],
    output: Output,
) -> AsyncGenerator[bytes, None]:
    try:
        while True:
            error = None
            if output.end is not None:
                error = failure_of(output.end)
            frames = [_event(call, served, body, delta) for delta in output.deltas]
            if error is not None:
                frames.append(error_frame(call, error))
            if any(frames):
                yield b"".join(frames)
            if output.end is not None:
                return
            _, output = await anext(outputs)
    except InferdError as error:
        yield error_frame(call, error)
    except StopAsyncIteration:
        yield error_frame(call, InternalError("The answer ended before it was complete; try again."))
    finally:
        await outputs.aclose()


def _event(call: Call, served: Served, body: TextRequest, delta: Delta) -> bytes:
    details = None
    if delta.finish_reason in ("stop", "length"):
        details = TextDetails(delta.finish_reason)
        call.finish_reasons = (delta.finish_reason,)
    if not delta.text and details is None:
        return b""
    return b"data: %b\n\n" % encode(_answer(served, body, delta.text, details))


def _answer(served: Served, body: TextRequest, text: str, details: TextDetails | None) -> TextAnswer:
    return TextAnswer(
        model_name=served.name, model_version=served.version, text_output=text, id=body.id, details=details
    )


def _options(body: TextRequest) -> dict[str, object]:
    """The request's parameters as values. Raises InvalidRequest."""
    try:
        options: dict[str, object] = {name: _any.decode(raw) for name, raw in (body.parameters or {}).items()}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"parameters is not valid JSON ({error}).", param="parameters") from None
    if body.max_tokens is not None:
        options.setdefault("max_tokens", body.max_tokens)
    return options


async def generation_of(
    call: Call, served: Served, body: TextRequest, options: dict[str, object], *, is_stream: bool
) -> Generation:
    """The generation for a text and its parameters. Raises InvalidRequest."""
    model = served.status
    if model.info is not None and model.info.kind != "generate":
        raise invalid(
            "model",
            f"The model {served.name!r} writes no text; it can {', '.join(model.info.tasks)}. POST its tensors to "
            "infer.",
            "unsupported_task",
        )
    if not model.has_local:
        raise invalid(
            "model", f"The model {served.name!r} runs on servers that speak OpenAI's protocol; POST to /v1/completions."
        )
    given = {name: value for name, value in options.items() if name not in _OWN}
    priority, timeout = given.pop("priority", None), given.pop("timeout", None)
    # Converted from Triton's units; other values than numbers are refused.
    terms = predict_fields_of("", b"", {"priority": priority, "timeout": timeout})
    if terms.priority is not None:
        given["priority"] = terms.priority
    if terms.timeout is not None:
        given["timeout"] = terms.timeout
    given |= {"model": model.name, "prompt": body.text_input, "stream": is_stream}
    raw = encode(given)
    fields, ignored = await decode_open_body(raw, completion_decoder)
    call.ignored = [f"parameters.{name}" for name in ignored]
    call.model = model.name
    check_unsupported(fields)
    sampling, explicit = completion_sampling(fields)
    if sampling.width != 1:
        raise invalid("parameters.n", "parameters.n and best_of must be 1 here: there is one text_output.")
    return Generation(
        model,
        call.response_id("generate"),
        prompts_of(fields),
        sampling,
        explicit,
        options_of(fields, form=plain_form_of(fields), may_relay=False),
    )
