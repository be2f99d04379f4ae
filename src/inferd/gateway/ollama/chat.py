"""POST /api/chat and POST /api/generate: a conversation or a prompt in, an answer or a stream of its lines out."""

from __future__ import annotations

import msgspec

from inferd.gateway.admission import reserve
from inferd.gateway.body.decode import json_body
from inferd.gateway.call import LINES_TYPE, Answer, Call, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid
from inferd.gateway.generation.answer import GenerateWork, model_of
from inferd.gateway.generation.fields import decode_open_body
from inferd.gateway.generation.options import Options
from inferd.gateway.generation.requests import Generation, ignored_header
from inferd.gateway.ollama.answers import Reply
from inferd.gateway.ollama.form import form_of, sampling_of
from inferd.gateway.ollama.names import found_by
from inferd.gateway.ollama.prompt import chat_of, prompt_of
from inferd.gateway.ollama.wire import OllamaChatRequest, OllamaGenerateRequest, chat_decoder, generate_decoder
from inferd.gateway.stages import answer_of
from inferd.gateway.upstream import ModelStatus
from inferd.types import TextPrompt

_Body = OllamaChatRequest | OllamaGenerateRequest


async def create_chat(context: Context, call: Call, rest: str) -> Answer:
    """Answer a conversation. Raises InferdError for every failure before the first token."""
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    body, ignored = await decode_open_body(raw, chat_decoder)
    sampling, explicit = sampling_of(body)
    form = form_of(body)
    if not body.messages:
        return await _loaded(context, call, body, ignored)
    chat, tools, left_out = chat_of(body)
    form = msgspec.structs.replace(form, tools=tools)
    model = _begun(context, call, body, [*ignored, *left_out])
    options = Options(stream=call.stream, form=form, lowers_max_tokens=True)
    generation = Generation(model, f"ollama-{call.unique}", [chat], sampling, explicit, options)
    return await answer_of(context, call, GenerateWork(generation, raw, Reply(body, model)))


async def create_text(context: Context, call: Call, rest: str) -> Answer:
    """Answer a prompt. Raises InferdError for every failure before the first token."""
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    body, ignored = await decode_open_body(raw, generate_decoder)
    prompt = prompt_of(body)
    sampling, explicit = sampling_of(body)
    form = form_of(body)
    if not body.prompt:
        return await _loaded(context, call, body, ignored)
    model = _begun(context, call, body, ignored)
    options = Options(stream=call.stream, form=form, lowers_max_tokens=True)
    generation = Generation(model, f"ollama-{call.unique}", [prompt], sampling, explicit, options)
    return await answer_of(context, call, GenerateWork(generation, raw, Reply(body, model)))


def _begun(
    context: Context, call: Call, body: OllamaChatRequest | OllamaGenerateRequest, ignored: list[str]
) -> ModelStatus:
    model = found_by(lambda name: model_of(context, call, name, ""), body.model)
    if not model.has_local:
        raise invalid(
            "model",
            f"The model {model.name!r} runs on servers that are asked in OpenAI's dialect; POST to "
            "/v1/chat/completions.",
            "unsupported_task",
        )
    call.ignored = ignored
    call.stream = body.stream is not False
    return model


async def _loaded(
    context: Context, call: Call, body: OllamaChatRequest | OllamaGenerateRequest, ignored: list[str]
) -> Response:
    """The answer to a request without a prompt, which loads the model: given when the model can answer."""
    model = _begun(context, call, body, ignored)
    reserve(context, call, model.name)
    await context.router.tokenize(model.name, TextPrompt(text="load"), tenant=call.principal.tenant)
    line = Reply(body, model).loaded()
    headers = ignored_header(call.ignored)
    return Response(200, line + b"\n", LINES_TYPE, headers) if call.stream else Response(200, line, headers=headers)
