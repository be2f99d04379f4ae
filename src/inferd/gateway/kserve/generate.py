"""POST generate and generate_stream: continue a text; the answer is whole or server-sent events.

Source: Triton's generate extension. ``parameters`` are the fields of /v1/completions. Does not know tensors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

import msgspec

from inferd.errors import InferdError, InternalError, InvalidRequest
from inferd.gateway.call import Answer, Call, EventStream, Response
from inferd.gateway.context import Context
from inferd.gateway.decode import decode_body
from inferd.gateway.errors import error_text, invalid
from inferd.gateway.generation import (
    collect,
    failure_of,
    first_output,
    ignored_header,
    merge,
    submit_all,
)
from inferd.gateway.kserve.models import Served, predict_fields_of
from inferd.gateway.openai.completions import completion_sampling, prompts_of
from inferd.gateway.openai.sampling import check_unsupported
from inferd.gateway.openai.wire import completion_decoder
from inferd.gateway.sse import encode
from inferd.gateway.upstream import Stream
from inferd.types import Delta, Output

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


text_decoder: Final = msgspec.json.Decoder(TextRequest)
_any: Final = msgspec.json.Decoder()


async def generate(context: Context, call: Call, served: Served, body: TextRequest) -> Answer:
    """The answer with the whole text. Raises InferdError for every failure."""
    options = _options(body)
    if body.stream or options.get("stream"):
        raise invalid("stream", "stream is true; POST to generate_stream for a stream.")
    stream = await submit_text(context, call, served, body, options, is_stream=False)
    collected = await collect(call, stream, 1)
    choice = collected.choices[0]
    call.finish_reasons = (choice.finish_reason,) if choice.finish_reason is not None else ()
    text = "".join(choice.texts)
    if options.get("exclude_input_in_output") is False:
        text = body.text_input + text
    answer = _answer(served, body, text, TextDetails(choice.finish_reason))
    return Response(200, encode(answer), headers=ignored_header(call.ignored))


async def generate_stream(context: Context, call: Call, served: Served, body: TextRequest) -> Answer:
    """The answer as a stream of pieces. Raises InferdError for every failure before the first piece."""
    call.stream = True
    stream = await submit_text(context, call, served, body, _options(body), is_stream=True)
    outputs = merge(call, [stream])
    first = await first_output(outputs, call)
    return EventStream(_frames(call, served, body, outputs, first[1]), ignored_header(call.ignored), _ENDING)


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
                frames.append(_error_event(call, error))
            if any(frames):
                yield b"".join(frames)
            if output.end is not None:
                return
            _, output = await anext(outputs)
    except InferdError as error:
        yield _error_event(call, error)
    except StopAsyncIteration:
        yield _error_event(call, InternalError("The answer ended before it was complete; try again."))
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


def _error_event(call: Call, error: InferdError) -> bytes:
    call.note_error(error)
    return b"data: %b\n\n" % error_text(error)


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


async def submit_text(
    context: Context, call: Call, served: Served, body: TextRequest, options: dict[str, object], *, is_stream: bool
) -> Stream:
    """Submit the continuation of a text to a local model. ``options``: the request's parameters as values. Raises
    InvalidRequest, QuotaExceeded, and what the router raises."""
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
    terms = predict_fields_of("", b"", {"priority": priority, "timeout": timeout})  # type: ignore[dict-item]
    if terms.priority is not None:
        given["priority"] = terms.priority
    if terms.timeout is not None:
        given["timeout"] = terms.timeout
    given |= {"model": model.name, "prompt": body.text_input, "stream": is_stream}
    raw = encode(given)
    fields = await decode_body(raw, completion_decoder)
    call.model = model.name
    call.ignored = check_unsupported(fields)
    sampling, explicit = completion_sampling(fields)
    if sampling.width != 1:
        raise invalid("parameters.n", "parameters.n and best_of must be 1 here: there is one text_output.")
    [stream] = await submit_all(
        context,
        call,
        fields,
        model,
        call.response_id("generate"),
        prompts_of(fields),
        sampling,
        explicit,
        raw=raw,
        return_prompt_ids=False,
        may_relay=False,
    )
    return stream
