"""POST /v1/messages: a conversation in, a message or a stream of its events out. POST /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import UNSET

from inferd.gateway.admission import reserve
from inferd.gateway.anthropic.blocks import STREAM_FORM, Ending, MessageWriter, content_of, usage_of
from inferd.gateway.anthropic.form import check_supported, form_of, sampling_of
from inferd.gateway.anthropic.models import requested_model
from inferd.gateway.anthropic.prompt import chat_of
from inferd.gateway.anthropic.tools import tool_use_of
from inferd.gateway.anthropic.wire import Hello, Message, MessagesRequest, TokenCount, count_decoder, messages_decoder
from inferd.gateway.body.decode import json_body
from inferd.gateway.call import Answer, Call, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid
from inferd.gateway.generation.answer import GenerateWork
from inferd.gateway.generation.fields import decode_open_body, ignored_names
from inferd.gateway.generation.options import Options
from inferd.gateway.generation.requests import Collected, Generation, ignored_header
from inferd.gateway.generation.writer import StreamForm, encode
from inferd.gateway.stages import answer_of
from inferd.gateway.upstream import ModelStatus
from inferd.types import Usage

_IGNORED: Final = ignored_names(MessagesRequest)


async def create_message(context: Context, call: Call, rest: str) -> Answer:
    """Answer a conversation. Raises InferdError for every failure before the first token."""
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    body, ignored = await decode_open_body(raw, messages_decoder)
    check_supported(body)
    chat, left_out = chat_of(body)
    sampling, explicit = sampling_of(body)
    form = form_of(body, chat)
    user = body.metadata.user_id if body.metadata is not None else None
    model, replaced = requested_model(context, call, body.model, user or "")
    _check_local(model)
    call.ignored = [*ignored, *left_out, *replaced]
    call.stream = bool(body.stream)
    options = Options(stream=call.stream, form=form, lowers_max_tokens=True)
    message_id = f"msg_{call.unique}"
    generation = Generation(model, message_id, [chat], sampling, explicit, options)
    return await answer_of(context, call, GenerateWork(generation, raw, _Reply(body, model, message_id)))


async def hello(context: Context, call: Call, rest: str) -> Answer:
    return Response(200, encode(Hello()))


async def count_tokens(context: Context, call: Call, rest: str) -> Answer:
    """The number of tokens of a prompt, as ``create_message`` computes it. Raises InvalidRequest, ModelNotFound,
    QuotaExceeded, Unavailable."""
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    body, ignored = await decode_open_body(raw, count_decoder)
    check_supported(body)
    chat, left_out = chat_of(body)
    tool_use_of(body)
    model, replaced = requested_model(context, call, body.model, "")
    _check_local(model)
    call.ignored = [*ignored, *left_out, *replaced]
    reserve(context, call, model.name)
    ids, _ = await context.router.tokenize(model.name, chat, tenant=call.principal.tenant)
    return Response(200, encode(TokenCount(len(ids))), headers=ignored_header(call.ignored))


def _check_local(model: ModelStatus) -> None:
    """Check that a worker of this server can answer. Raises InvalidRequest."""
    if not model.has_local:
        raise invalid(
            "model",
            f"The model {model.name!r} runs on servers that are asked in OpenAI's dialect; POST to "
            "/v1/chat/completions.",
            "unsupported_task",
        )


class _Reply:
    """The form of a message, as its request asks for it."""

    __slots__ = ("_body", "_id", "_model", "_shows_thinking", "fingerprint")

    def __init__(self, body: MessagesRequest, model: ModelStatus, message_id: str) -> None:
        self._body = body
        self._id = message_id
        self._model = model.name
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        self.fingerprint: str | None = None

    @property
    def stream_form(self) -> StreamForm:
        return STREAM_FORM

    def cache_fields(self) -> tuple[msgspec.Struct, bytes]:
        unused = dict.fromkeys(_IGNORED, UNSET)
        return msgspec.structs.replace(self._body, model=None, metadata=None, **unused), b""

    def writer(self, call: Call) -> MessageWriter:
        ending = Ending(self._body.max_tokens)
        return MessageWriter(call, self._id, self._model, ending, shows_thinking=self._shows_thinking)

    def completion(self, call: Call, collected: Sequence[Collected]) -> bytes:
        ((choice,),) = [one.choices for one in collected]
        usage = call.usage_so_far or Usage()
        ending = Ending(self._body.max_tokens)
        ending.has_calls = bool(choice.calls)
        if choice.finish_reason is not None:
            ending.take(choice.finish_reason, choice.stop_reason)
        end = ending.fields(usage)
        call.finish_reasons = (end.stop_reason,) if end.stop_reason is not None else ()
        return encode(
            Message(
                id=self._id,
                model=self._model,
                content=content_of(choice, shows_thinking=self._shows_thinking),
                stop_reason=end.stop_reason,
                stop_sequence=end.stop_sequence,
                usage=usage_of(usage),
            )
        )
