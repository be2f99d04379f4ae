"""POST /v1/chat/completions: a conversation in, a message or a stream of its pieces out."""

from __future__ import annotations

import os
from collections.abc import Sequence

from msgspec import UNSET

from inferd.gateway.answer import Work, answer_generation, begin_generation
from inferd.gateway.call import Answer, Call
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation import (
    Collected,
    created_at,
    usage_body,
)
from inferd.gateway.openai.logprobs import chat_logprobs, prompt_logprobs
from inferd.gateway.openai.messages import chat_of
from inferd.gateway.openai.sampling import check_range, check_unsupported, sampling_of
from inferd.gateway.openai.toolcalls import ParsedCall, ToolCallParser, parse_all
from inferd.gateway.openai.wire import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    FunctionCallBody,
    ToolCallBody,
    ToolCallDelta,
    WireFinishReason,
)
from inferd.gateway.sse import ChunkEnvelope, encode, end_fields
from inferd.gateway.upstream import ModelStatus
from inferd.types import Delta, FinishReason, Output, Usage


async def create_chat_completion(context: Context, call: Call, raw: bytes, body: ChatRequest) -> Answer:
    """Answer a chat completion. ``raw`` is the body as the client sent it. Raises InferdError for every failure before
    the first token."""
    call.ignored = check_unsupported(body)
    _check_chat(body)
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    if max_tokens is not None:
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        check_range("max_completion_tokens", max_tokens, field)
    sampling, explicit = sampling_of(body, max_tokens=max_tokens, logprobs=_logprobs(body))
    chat = chat_of(body, body.messages, default_special_tokens=False)
    model, response_id = begin_generation(context, call, body, "chatcmpl")
    reply = _Reply(body, model, response_id, sampling.n)
    work = Work(body, model, response_id, [chat], sampling, explicit, bool(body.return_token_ids))
    return await answer_generation(context, call, raw, work, reply)


def _check_chat(body: ChatRequest) -> None:
    if body.modalities is not None and any(kind != "text" for kind in body.modalities):
        raise invalid(
            "modalities", f"modalities may only be ['text'], not {shown(body.modalities)}.", "unsupported_parameter"
        )
    if body.function_call not in (None, "none", "auto"):
        raise invalid(
            "function_call", "function_call is not supported; use 'tools' and 'tool_choice'.", "unsupported_parameter"
        )
    if body.tool_choice not in (None, "none", "auto"):
        raise invalid(
            "tool_choice",
            f"tool_choice must be 'auto' or 'none', not {shown(body.tool_choice)}: a call cannot be forced here. Ask "
            "for it in the prompt.",
            "unsupported_parameter",
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


def _call_id() -> str:
    return f"call_{os.urandom(12).hex()}"


class _Reply:
    """The form of a chat completion's answer, as its request asks for it."""

    __slots__ = (
        "as_ids",
        "created",
        "fingerprint",
        "id",
        "ids",
        "model",
        "n",
        "only_one_call",
        "options",
        "parse_tools",
        "top",
    )

    def __init__(self, body: ChatRequest, model: ModelStatus, response_id: str, n: int) -> None:
        self.id = response_id
        self.n = n
        self.created = created_at()
        self.model = model.name
        self.fingerprint: str | None = None  # known when the model has answered
        self.parse_tools = bool(body.tools) and body.tool_choice != "none"
        self.only_one_call = body.parallel_tool_calls is False
        self.ids = bool(body.return_token_ids)
        self.as_ids = bool(body.return_tokens_as_token_ids)
        self.top = _logprobs(body)
        self.options = body.stream_options

    def writer(self, call: Call) -> _ChatWriter:
        return _ChatWriter(self, call)

    def completion(self, call: Call, collected: Sequence[Collected]) -> bytes:
        (only,) = collected
        choices: list[ChatChoice] = []
        for index, choice in enumerate(only.choices):
            text, calls = "".join(choice.texts), list[ParsedCall]()
            if self.parse_tools:
                text, calls = parse_all([text], only_one=self.only_one_call)
            choices.append(
                ChatChoice(
                    index,
                    AssistantMessage(
                        content=text if text or not calls else None,
                        tool_calls=[ToolCallBody(_call_id(), FunctionCallBody(c.name, c.arguments)) for c in calls]
                        if calls
                        else UNSET,
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

    __slots__ = ("_begun", "_call", "_heads", "_parsers", "_reply", "envelope")

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
        self._parsers = (
            [ToolCallParser(only_one=reply.only_one_call) for _ in range(reply.n)] if reply.parse_tools else None
        )

    def write(self, number: int, output: Output) -> bytes:
        envelope = self.envelope
        envelope.note(number, output)
        frames: list[bytes] = []
        if not self._begun:
            self._begun = True
            frames += self._opening(output)
        for delta in output.deltas:
            if delta.finish_reason is None and delta.logprobs is None and self._parsers is None and not self._reply.ids:
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
        text, calls, num_calls = delta.text, list[ParsedCall](), 0
        if self._parsers is not None:
            parser = self._parsers[delta.index]
            text, calls = parser.feed(text)
            if delta.finish_reason is not None:
                rest, more = parser.finish()
                text, calls = text + rest, calls + more
            num_calls = parser.num_calls
        reason, stop_reason = end_fields(delta)
        if delta.finish_reason is not None and reason != b"null":
            finish = wire_finish_reason(delta.finish_reason, num_calls)
            reason = encode(finish)
            if finish is not None:
                self._call.finish_reasons = (*self._call.finish_reasons, finish)
        body: dict[str, object] = {}
        if text:
            body["content"] = text
        if calls:
            first = num_calls - len(calls)
            body["tool_calls"] = [
                ToolCallDelta(first + i, _call_id(), FunctionCallBody(c.name, c.arguments)) for i, c in enumerate(calls)
            ]
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
