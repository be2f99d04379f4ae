"""POST /generate, /generate_stream and /: a text in, the text that follows it out."""

from __future__ import annotations

from inferd.errors import InvalidRequest
from inferd.gateway.admission import visible_models
from inferd.gateway.body.decode import json_body
from inferd.gateway.call import Answer, Call
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.answer import GenerateWork, model_of
from inferd.gateway.generation.fields import decode_open_body
from inferd.gateway.generation.options import Options
from inferd.gateway.generation.requests import Generation
from inferd.gateway.limits import check_range
from inferd.gateway.stages import answer_of
from inferd.gateway.tgi.answers import Reply
from inferd.gateway.tgi.form import check_supported, form_of, sampling_of
from inferd.gateway.tgi.wire import Parameters, TgiGenerateRequest, generate_decoder
from inferd.gateway.upstream import ModelStatus
from inferd.types import TextPrompt


async def generate(context: Context, call: Call, rest: str) -> Answer:
    """POST /generate: whole, or a stream where the body says so. Raises InferdError for every failure before the first
    token."""
    body, ignored, raw = await _read(context, call)
    return await _answer(context, call, body, ignored, raw, is_stream=bool(body.stream))


async def generate_compat(context: Context, call: Call, rest: str) -> Answer:
    """POST /, the route of older clients: a whole answer comes in a list. Raises as ``generate``."""
    body, ignored, raw = await _read(context, call)
    return await _answer(context, call, body, ignored, raw, is_stream=bool(body.stream), in_list=True)


async def generate_stream(context: Context, call: Call, rest: str) -> Answer:
    """POST /generate_stream. Raises as ``generate``."""
    body, ignored, raw = await _read(context, call)
    return await _answer(context, call, body, ignored, raw, is_stream=True)


async def _read(context: Context, call: Call) -> tuple[TgiGenerateRequest, list[str], bytes]:
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    body, ignored = await decode_open_body(raw, generate_decoder)
    return body, ignored, raw


async def _answer(
    context: Context,
    call: Call,
    body: TgiGenerateRequest,
    ignored: list[str],
    raw: bytes,
    *,
    is_stream: bool,
    in_list: bool = False,
) -> Answer:
    parameters = body.parameters or Parameters()
    check_supported(parameters, is_stream=is_stream)
    if not body.inputs:
        raise invalid("inputs", "inputs is empty; send at least one character.")
    if parameters.truncate is not None:
        check_range("truncate_prompt_tokens", parameters.truncate, "parameters.truncate")
    sampling, explicit = sampling_of(parameters, with_tokens=is_stream or bool(parameters.details))
    model = _asked_model(context, call, body.model, parameters.adapter_id)
    call.ignored, call.stream = ignored, is_stream
    options = Options(
        stream=is_stream,
        form=form_of(parameters),
        truncate_prompt_tokens=parameters.truncate,
        lowers_max_tokens=parameters.max_new_tokens is None,
        return_prompt_ids=bool(parameters.decoder_input_details),
    )
    prompt = TextPrompt(text=body.inputs)
    generation = Generation(model, f"tgi-{call.unique}", [prompt], sampling, explicit, options)
    return await answer_of(context, call, GenerateWork(generation, raw, Reply(body, model, in_list=in_list)))


def _asked_model(context: Context, call: Call, name: str | None, adapter_id: str | None) -> ModelStatus:
    """The adapter that ``parameters.adapter_id`` names, else the model of the body. Raises as ``written_by``, and
    InvalidRequest for an adapter of another model."""
    if not adapter_id:
        return written_by(context, call, name)
    adapter = written_by(context, call, adapter_id)
    if not adapter.parent:
        raise invalid(
            "parameters.adapter_id",
            f"parameters.adapter_id is {shown(adapter_id)}, which is a model and no adapter; name it in 'model'.",
        )
    if name not in (None, adapter.name, adapter.parent):
        raise invalid(
            "parameters.adapter_id",
            f"The adapter {adapter.name!r} belongs to {adapter.parent!r}, and 'model' is {shown(name)}; leave one of "
            "them out.",
        )
    return adapter


def writing_models(context: Context, call: Call) -> list[ModelStatus]:
    """The models that the client may use and that write texts, as far as is known."""
    return [s for s in visible_models(context, call.principal) if s.info is None or "generate" in s.info.tasks]


def written_by(context: Context, call: Call, name: str | None) -> ModelStatus:
    """The model that a request names, or the only one that writes texts. Raises ModelNotFound, InvalidRequest."""
    if name is None:
        able = writing_models(context, call)
        if len(able) != 1:
            names = ", ".join([status.name for status in able[:20]]) or "no model that writes texts"
            raise InvalidRequest(
                f"This server has several models, so the body needs the field 'model'; name one of: {names}."
                if able
                else f"This server has {names}.",
                param="model",
                code="missing_required_parameter",
            )
        name = able[0].name
    model = model_of(context, call, name, "")
    if not model.has_local:
        raise invalid(
            "model",
            f"The model {model.name!r} runs on servers that are asked in OpenAI's dialect; POST to /v1/completions.",
            "unsupported_task",
        )
    return model
