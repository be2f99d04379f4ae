"""POST /v1/completions: continues texts or token ids, or scores them (``echo`` with ``logprobs``)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from inferd.errors import InferdError
from inferd.gateway.call import Answer, Call
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid
from inferd.gateway.generation.answer import GenerateWork
from inferd.gateway.generation.requests import Choice, Collected, Generation, created_at, error_frame
from inferd.gateway.generation.writer import StreamForm, encode
from inferd.gateway.limits import check_range
from inferd.gateway.openai.chat import wire_finish_reason
from inferd.gateway.openai.chunks import STREAM_FORM, ChunkEnvelope, cache_fields, end_fields, usage_body
from inferd.gateway.openai.form import plain_form_of
from inferd.gateway.openai.logprobs import legacy_logprobs, prompt_logprobs
from inferd.gateway.openai.options import begin_generation, options_of
from inferd.gateway.openai.sampling import MAX_PROMPTS, MAX_SEQUENCES, check_unsupported, sampling_of
from inferd.gateway.openai.wire import Completion, CompletionChoice, CompletionRequest, LegacyLogprobs
from inferd.gateway.stages import answer_of
from inferd.gateway.upstream import ModelStatus
from inferd.types import (
    Delta,
    Output,
    PromptReport,
    SamplingParams,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
    Usage,
)

DEFAULT_MAX_TOKENS = 16

CompletionPrompt = TextPrompt | TokenPrompt


async def create_completion(
    context: Context, call: Call, raw: bytes, body: CompletionRequest, ignored: Sequence[str]
) -> Answer:
    """Answer a text completion. ``raw`` is the body as the client sent it, ``ignored`` are its fields without effect.
    Raises InferdError for every failure before the first token."""
    call.ignored = ignored
    check_unsupported(body)
    sampling, explicit = completion_sampling(body)
    prompts = prompts_of(body)
    if len(prompts) * sampling.width > MAX_SEQUENCES:
        raise invalid(
            "n",
            f"{len(prompts)} prompts with {sampling.width} candidates each are above the limit of {MAX_SEQUENCES}; "
            "send fewer.",
        )
    model, response_id = begin_generation(context, call, body, "cmpl")
    reply = _Reply(body, model, response_id, prompts, sampling)
    wants_ids = bool(body.return_token_ids or body.echo)
    options = options_of(body, form=plain_form_of(body), return_prompt_ids=wants_ids)
    generation = Generation(model, response_id, prompts, sampling, explicit, options)
    return await answer_of(context, call, GenerateWork(generation, raw, reply))


def completion_sampling(body: CompletionRequest) -> tuple[SamplingParams, tuple[str, ...]]:
    """The sampling parameters of a text completion, and the names of those that the client set. Raises
    InvalidRequest."""
    if body.logprobs is not None:
        check_range("logprobs", body.logprobs)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    check_range("max_tokens", max_tokens)
    if max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise invalid(
            "max_tokens", "max_tokens is 0, so nothing would be answered; set it to at least 1, or set echo to true."
        )
    sampling, explicit = sampling_of(body, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo and sampling.prompt_logprobs is None and (body.logprobs is not None or max_tokens == 0):
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=body.logprobs or 0)
    return sampling, explicit


def prompts_of(body: CompletionRequest) -> list[CompletionPrompt]:
    """One prompt per text or list of token ids."""
    special = body.add_special_tokens is not False
    prompt = body.prompt
    if isinstance(prompt, str):
        return [_text(prompt, "prompt", special)]
    if not prompt:
        raise invalid("prompt", "prompt is an empty list; send text, token ids, or a list of either.")
    kind = type(prompt[0])
    for position, item in enumerate(prompt):
        if type(item) is not kind:
            raise invalid(
                f"prompt[{position}]",
                f"prompt[{position}] differs in kind from prompt[0]; send all texts, all token ids or all lists of "
                "ids.",
            )
    if kind is int:
        return [_tokens([item for item in prompt if isinstance(item, int)], "prompt")]
    if len(prompt) > MAX_PROMPTS:
        raise invalid(
            "prompt", f"prompt may have at most {MAX_PROMPTS} entries, not {len(prompt)}; send several requests."
        )
    found: list[CompletionPrompt] = []
    for position, item in enumerate(prompt):
        if isinstance(item, str):
            found.append(_text(item, f"prompt[{position}]", special))
        elif isinstance(item, list):
            found.append(_tokens(item, f"prompt[{position}]"))
    return found


def _text(text: str, at: str, special: bool) -> TextPrompt:
    if not text:
        raise invalid(at, f"{at} is empty; send at least one character.")
    return TextPrompt(text=text, add_special_tokens=special)


def _tokens(ids: list[int], at: str) -> TokenPrompt:
    if not ids:
        raise invalid(at, f"{at} is empty; send at least one token id.")
    if min(ids) < 0 or max(ids) > 2**31 - 1:
        position = next(i for i, token_id in enumerate(ids) if not 0 <= token_id <= 2**31 - 1)
        check_range("token id", ids[position], f"{at}[{position}]")
    return TokenPrompt(token_ids=ids)


class _Reply:
    """The form of a text completion's answer, as its request asks for it."""

    __slots__ = (
        "as_ids",
        "body",
        "created",
        "echo",
        "fingerprint",
        "id",
        "ids",
        "model",
        "n",
        "prompts",
        "sampling",
        "top",
    )

    def __init__(
        self,
        body: CompletionRequest,
        model: ModelStatus,
        response_id: str,
        prompts: Sequence[CompletionPrompt],
        sampling: SamplingParams,
    ) -> None:
        self.body = body
        self.id = response_id
        self.prompts = prompts
        self.sampling = sampling
        self.n = sampling.n
        self.created = created_at()
        self.model = model.name
        self.fingerprint: str | None = None  # known when the model has answered
        self.echo = bool(body.echo)
        self.ids = bool(body.return_token_ids)
        self.as_ids = bool(body.return_tokens_as_token_ids)
        self.top = body.logprobs

    def echo_of(self, number: int, report: PromptReport | None) -> str:
        """The prompt's text, if the answer repeats it (``echo``), else an empty text. The text of token ids comes from
        the worker's report."""
        if not self.echo:
            return ""
        prompt = self.prompts[number]
        if isinstance(prompt, TextPrompt) and self.body.truncate_prompt_tokens is None:
            return prompt.text
        return (report.text or "") if report is not None else ""

    @property
    def stream_form(self) -> StreamForm:
        return STREAM_FORM

    def cache_fields(self) -> tuple[msgspec.Struct, bytes]:
        return cache_fields(self.body)

    def writer(self, call: Call) -> _CompletionWriter:
        return _CompletionWriter(self, call)

    def completion(self, call: Call, collected: Sequence[Collected]) -> bytes:
        choices: list[CompletionChoice] = []
        for number, one in enumerate(collected):
            echo = self.echo_of(number, one.prompt)
            for choice in one.choices:
                choices.append(self._choice(len(choices), choice, one.prompt, echo))
        call.finish_reasons = tuple(c.finish_reason for c in choices if c.finish_reason is not None)
        return encode(
            Completion(
                id=self.id,
                created=self.created,
                model=self.model,
                system_fingerprint=self.fingerprint,
                choices=choices,
                usage=usage_body(call.usage_so_far or Usage()),
            )
        )

    def _choice(self, index: int, choice: Choice, prompt: PromptReport | None, echo: str) -> CompletionChoice:
        finish = wire_finish_reason(choice.finish_reason, 0)
        if finish is None and self.sampling.max_tokens == 0:
            finish = "length"
        assert finish != "tool_calls"
        shown_prompt: object = UNSET
        if self.body.prompt_logprobs is not None and prompt is not None and prompt.logprobs is not None:
            shown_prompt = prompt_logprobs(prompt.logprobs)
        return CompletionChoice(
            index,
            echo + "".join(choice.texts),
            self._logprobs(choice, prompt, echo),
            finish,
            choice.stop_reason,
            tuple(choice.token_ids) if self.ids else UNSET,
            prompt.token_ids if self.ids and prompt is not None and prompt.token_ids is not None else UNSET,
            shown_prompt,  # type: ignore[arg-type]
        )

    def _logprobs(self, choice: Choice, prompt: PromptReport | None, echo: str) -> LegacyLogprobs | None:
        if self.top is None:
            return None
        items: list[TokenLogprob | None] = []
        if self.echo and prompt is not None and prompt.logprobs is not None:
            items += prompt.logprobs
        first = first_token_of(items, echo)
        generated = choice.logprobs if self.sampling.max_tokens != 0 else []
        shaped, _ = legacy_logprobs(
            [*items, *generated],
            first_token=first,
            as_ids=self.as_ids,
            top=self.top,
            text_offset=0 if items else len(echo),
        )
        return shaped


def first_token_of(items: Sequence[TokenLogprob | None], text: str) -> str:
    """The text of a prompt's first token, which has no probability and so no entry of its own."""
    rest = "".join(item.token for item in items if item is not None)
    if rest and text.endswith(rest):
        return text[: -len(rest)]
    return text if not rest else text[: max(0, len(text) - len(rest))]


class _CompletionWriter:
    """Frames of streamed completions. Choices are numbered through all prompts."""

    __slots__ = ("_begun", "_call", "_heads", "_offsets", "_reply", "envelope")

    def __init__(self, reply: _Reply, call: Call) -> None:
        options = reply.body.stream_options
        self.envelope = ChunkEnvelope(
            b"text_completion",
            reply.id,
            reply.created,
            reply.model,
            reply.fingerprint,
            include_usage=bool(options and options.include_usage),
            continuous=bool(options and options.continuous_usage_stats),
        )
        num_choices = reply.n * len(reply.prompts)
        self._reply = reply
        self._call = call
        self._begun = [False] * len(reply.prompts)
        self._offsets = [0] * num_choices
        self._heads = [self.envelope.head + b'{"index":%d,"text":' % index for index in range(num_choices)]

    def ending(self, usage: Usage | None) -> bytes:
        return self.envelope.ending(usage)

    def failed(self, error: InferdError) -> bytes:
        return error_frame(self._call, error)

    def write(self, number: int, output: Output) -> bytes:
        self.envelope.note(number, output)
        reply = self._reply
        frames: list[bytes] = []
        if not self._begun[number]:
            self._begun[number] = True
            frames += self._opening(number, output.prompt)
        for delta in output.deltas:
            index = number * reply.n + delta.index
            if delta.finish_reason is None and delta.logprobs is None and not reply.ids:
                if delta.text:
                    frames.append(
                        b'%b%b,"logprobs":null,"finish_reason":null}%b'
                        % (self._heads[index], encode(delta.text), self.envelope.tail)
                    )
            else:
                frames += self._full(index, delta)
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _opening(self, number: int, prompt: PromptReport | None) -> list[bytes]:
        """The echo and the prompt's token ids, once per choice, if the request wants them."""
        reply = self._reply
        echo = reply.echo_of(number, prompt)
        ids = prompt.token_ids if reply.ids and prompt is not None else None
        if not echo and ids is None:
            return []
        frames: list[bytes] = []
        for index in range(number * reply.n, (number + 1) * reply.n):
            logprobs = b"null"
            if reply.echo and reply.top is not None and prompt is not None and prompt.logprobs is not None:
                first = first_token_of(prompt.logprobs, echo)
                shaped, self._offsets[index] = legacy_logprobs(
                    prompt.logprobs, first_token=first, as_ids=reply.as_ids, top=reply.top, text_offset=0
                )
                logprobs = encode(shaped)
            else:
                self._offsets[index] = len(echo)
            frame = b'%b%b,"logprobs":%b,"finish_reason":null' % (self._heads[index], encode(echo), logprobs)
            if ids is not None:
                frame += b',"prompt_token_ids":' + encode(ids)
            frames.append(frame + b"}" + self.envelope.tail)
        return frames

    def _full(self, index: int, delta: Delta) -> list[bytes]:
        """The frame of a delta that has more than text: probabilities, token ids, or the end."""
        reply = self._reply
        reason, stop_reason = end_fields(delta)
        if (
            not delta.text
            and delta.finish_reason is None
            and not delta.logprobs
            and not (reply.ids and delta.token_ids)
        ):
            return []
        if delta.finish_reason in ("stop", "length"):
            self._call.finish_reasons = (*self._call.finish_reasons, delta.finish_reason)
        logprobs = b"null"
        if delta.logprobs and reply.top is not None and reply.sampling.max_tokens != 0:
            shaped, self._offsets[index] = legacy_logprobs(
                delta.logprobs, as_ids=reply.as_ids, top=reply.top, text_offset=self._offsets[index]
            )
            logprobs = encode(shaped)
        frame = b'%b%b,"logprobs":%b,"finish_reason":%b' % (self._heads[index], encode(delta.text), logprobs, reason)
        if delta.finish_reason is not None:
            frame += b',"stop_reason":' + stop_reason
        if reply.ids:
            frame += b',"token_ids":' + encode(delta.token_ids)
        return [frame + b"}" + self.envelope.tail]
