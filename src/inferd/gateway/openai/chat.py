"""POST /v1/chat/completions: a conversation in, a message or a stream of its pieces out."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from inferd.answer_form import AnswerForm
from inferd.errors import InferdError
from inferd.gateway.call import Answer, Call
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.answer import GenerateWork
from inferd.gateway.generation.requests import Collected, Generation, created_at, error_frame
from inferd.gateway.generation.writer import StreamForm, encode
from inferd.gateway.limits import check_range
from inferd.gateway.openai.chunks import STREAM_FORM, ChunkEnvelope, cache_fields, end_fields, usage_body
from inferd.gateway.openai.form import constraint_of
from inferd.gateway.openai.logprobs import chat_logprobs, prompt_logprobs
from inferd.gateway.openai.messages import chat_of
from inferd.gateway.openai.options import begin_generation, options_of
from inferd.gateway.openai.sampling import check_unsupported, sampling_of
from inferd.gateway.openai.tools import reasoning_budget_of, reasoning_kwargs, tool_use_of
from inferd.gateway.openai.wire import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    FunctionCallBody,
    FunctionCallDelta,
    ToolCallBody,
    ToolCallDelta,
    WireFinishReason,
)
from inferd.gateway.stages import answer_of
from inferd.gateway.upstream import ModelStatus
from inferd.types import CallDelta, Delta, FinishReason, Output, Usage


async def create_chat_completion(
    context: Context, call: Call, raw: bytes, body: ChatRequest, ignored: Sequence[str]
) -> Answer:
    """Answer a chat completion. ``raw`` is the body as the client sent it, ``ignored`` are its fields without effect.
    Raises InferdError for every failure before the first token."""
    check_unsupported(body)
    _check_chat(body)
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    if max_tokens is not None:
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        check_range("max_completion_tokens", max_tokens, field)
    sampling, explicit = sampling_of(body, max_tokens=max_tokens, logprobs=_logprobs(body))
    chat, left_out = chat_of(body, body.messages, default_special_tokens=False, template_kwargs=reasoning_kwargs(body))
    call.ignored = [*ignored, *left_out]
    model, response_id = begin_generation(context, call, body, "chatcmpl")
    reply = _Reply(body, model, response_id, sampling.n)
    options = options_of(body, form=_form(body), return_prompt_ids=bool(body.return_token_ids))
    generation = Generation(model, response_id, [chat], sampling, explicit, options)
    return await answer_of(context, call, GenerateWork(generation, raw, reply))


def _form(body: ChatRequest) -> AnswerForm:
    return AnswerForm(
        constraint=constraint_of(body),
        tools=tool_use_of(body),
        fit=bool(body.fit),
        reasoning_budget=reasoning_budget_of(body),
    )


def _check_chat(body: ChatRequest) -> None:
    if body.modalities is not None and any(kind != "text" for kind in body.modalities):
        raise invalid(
            "modalities", f"modalities may only be ['text'], not {shown(body.modalities)}.", "unsupported_parameter"
        )
    if body.function_call not in (None, "none", "auto"):
        raise invalid(
            "function_call", "function_call is not supported; use 'tools' and 'tool_choice'.", "unsupported_parameter"
        )
    if body.top_logprobs is not None:
        check_range("top_logprobs", body.top_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true; set it or leave top_logprobs out.")


def _logprobs(body: ChatRequest) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


def wire_finish_reason(reason: FinishReason | None, num_calls: int) -> WireFinishReason | None:
    """The finish reason in OpenAI's form; None: the choice has not ended, or it failed."""
    if reason == "stop":
        return "tool_calls" if num_calls else "stop"
    return "length" if reason == "length" else None


def _call_delta(part: CallDelta) -> ToolCallDelta:
    if part.name is None:
        return ToolCallDelta(part.index, UNSET, UNSET, FunctionCallDelta(arguments=part.arguments))
    return ToolCallDelta(part.index, _call_id(), "function", FunctionCallDelta(part.name, part.arguments))


def _call_id() -> str:
    return f"call_{os.urandom(12).hex()}"


class _Reply:
    """The form of a chat completion's answer, as its request asks for it."""

    __slots__ = (
        "as_ids",
        "body",
        "created",
        "fingerprint",
        "id",
        "ids",
        "model",
        "n",
        "options",
        "shows_reasoning",
        "top",
    )

    def __init__(self, body: ChatRequest, model: ModelStatus, response_id: str, n: int) -> None:
        self.body = body
        self.id = response_id
        self.n = n
        self.created = created_at()
        self.model = model.name
        self.fingerprint: str | None = None  # known when the model has answered
        self.ids = bool(body.return_token_ids)
        self.as_ids = bool(body.return_tokens_as_token_ids)
        self.top = _logprobs(body)
        self.shows_reasoning = body.include_reasoning is not False
        self.options = body.stream_options

    @property
    def stream_form(self) -> StreamForm:
        return STREAM_FORM

    def cache_fields(self) -> tuple[msgspec.Struct, bytes]:
        return cache_fields(self.body)

    def writer(self, call: Call) -> _ChatWriter:
        return _ChatWriter(self, call)

    def completion(self, call: Call, collected: Sequence[Collected]) -> bytes:
        (only,) = collected
        choices: list[ChatChoice] = []
        for index, choice in enumerate(only.choices):
            text, reasoning, calls = "".join(choice.texts), "".join(choice.reasoning), choice.calls
            choices.append(
                ChatChoice(
                    index,
                    AssistantMessage(
                        content=text if text or not calls else None,
                        tool_calls=[
                            ToolCallBody(_call_id(), FunctionCallBody(c.name, "".join(c.arguments))) for c in calls
                        ]
                        if calls
                        else UNSET,
                        reasoning_content=reasoning if reasoning and self.shows_reasoning else UNSET,
                        reasoning=reasoning if reasoning and self.shows_reasoning else UNSET,
                    ),
                    wire_finish_reason(choice.finish_reason, len(calls)),
                    None if self.top is None else chat_logprobs(choice.logprobs, as_ids=self.as_ids, top=self.top),
                    choice.stop_reason,
                    tuple(choice.token_ids) if self.ids else UNSET,
                )
            )
        call.finish_reasons = tuple(c.finish_reason for c in choices if c.finish_reason is not None)
        prompt = only.prompt
        return encode(
            ChatCompletion(
                id=self.id,
                created=self.created,
                model=self.model,
                choices=choices,
                usage=usage_body(call.usage_so_far or Usage()),
                system_fingerprint=self.fingerprint,
                prompt_logprobs=prompt_logprobs(prompt.logprobs)
                if prompt is not None and prompt.logprobs is not None
                else None,
                prompt_token_ids=prompt.token_ids
                if self.ids and prompt is not None and prompt.token_ids is not None
                else UNSET,
            )
        )


class _ChatWriter:
    """Frames of a streamed chat completion."""

    __slots__ = ("_begun", "_call", "_heads", "_num_calls", "_reply", "envelope")

    def __init__(self, reply: _Reply, call: Call) -> None:
        options = reply.options
        self.envelope = ChunkEnvelope(
            b"chat.completion.chunk",
            reply.id,
            reply.created,
            reply.model,
            reply.fingerprint,
            include_usage=bool(options and options.include_usage),
            continuous=bool(options and options.continuous_usage_stats),
        )
        self._reply = reply
        self._call = call
        self._begun = False
        self._heads = [self.envelope.head + b'{"index":%d,"delta":' % index for index in range(reply.n)]
        self._num_calls = [0] * reply.n

    def ending(self, usage: Usage | None) -> bytes:
        return self.envelope.ending(usage)

    def failed(self, error: InferdError) -> bytes:
        return error_frame(self._call, error)

    def write(self, number: int, output: Output) -> bytes:
        envelope = self.envelope
        envelope.note(number, output)
        frames: list[bytes] = []
        if not self._begun:
            self._begun = True
            frames += self._opening(output)
        for delta in output.deltas:
            is_plain = delta.finish_reason is None and delta.logprobs is None and not self._reply.ids
            if is_plain and not (delta.calls or delta.reasoning):
                if delta.text:
                    content = encode(delta.text)
                    frames.append(
                        b'%b{"content":%b},"logprobs":null,"finish_reason":null}%b'
                        % (self._heads[delta.index], content, envelope.tail)
                    )
            else:
                frames += self._full(delta)
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _opening(self, output: Output) -> list[bytes]:
        """One frame per choice with the role; the first also has the prompt's token ids, if the request wants them."""
        frames = [
            b'%b{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}%b' % (head, self.envelope.tail)
            for head in self._heads
        ]
        prompt = output.prompt
        if self._reply.ids and prompt is not None and prompt.token_ids is not None:
            ids = b'],"prompt_token_ids":' + encode(prompt.token_ids) + self.envelope.tail[1:]
            frames[0] = frames[0].removesuffix(self.envelope.tail) + ids
        return frames

    def _full(self, delta: Delta) -> list[bytes]:
        """Frames of a delta that has more than text: a tool call, probabilities, token ids, or the end."""
        self._num_calls[delta.index] += sum(part.name is not None for part in delta.calls)
        reason, stop_reason = end_fields(delta)
        if delta.finish_reason is not None and reason != b"null":
            finish = wire_finish_reason(delta.finish_reason, self._num_calls[delta.index])
            reason = encode(finish)
            if finish is not None:
                self._call.finish_reasons = (*self._call.finish_reasons, finish)
        body: dict[str, object] = {}
        if delta.reasoning and self._reply.shows_reasoning:
            body["reasoning_content"] = body["reasoning"] = delta.reasoning
        if delta.text:
            body["content"] = delta.text
        if delta.calls:
            body["tool_calls"] = [_call_delta(part) for part in delta.calls]
        reply = self._reply
        if not body and delta.finish_reason is None and not delta.logprobs and not (reply.ids and delta.token_ids):
            return []
        logprobs = b"null"
        if delta.logprobs and reply.top is not None:
            logprobs = encode(chat_logprobs(delta.logprobs, as_ids=reply.as_ids, top=reply.top))
        frame = b'%b%b,"logprobs":%b,"finish_reason":%b' % (self._heads[delta.index], encode(body), logprobs, reason)
        if delta.finish_reason is not None:
            frame += b',"stop_reason":' + stop_reason
        if reply.ids:
            frame += b',"token_ids":' + encode(delta.token_ids)
        return [frame + b"}" + self.envelope.tail]
