"""Submits requests for generation to the router, and gathers their outputs, for all endpoints that generate text.

Knows the router's streams. Does not know the wire formats of answers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Final

from inferd import clock
from inferd.errors import InferdError, InternalError
from inferd.gateway.admission import cost_of, terms_of
from inferd.gateway.call import Call, trace_of, trace_state
from inferd.gateway.context import Context
from inferd.gateway.errors import check_end
from inferd.gateway.generation.options import Options
from inferd.gateway.rescue import router_for
from inferd.gateway.terms import Cost
from inferd.gateway.upstream import ModelStatus
from inferd.http.exchange import Headers
from inferd.router.stream import Stream, open_stream
from inferd.types import (
    IGNORED_HEADER,
    UNENFORCED_HEADER,
    WATERMARK_HEADER,
    AnswerSet,
    Delta,
    End,
    FinishReason,
    GenerateRequest,
    Output,
    Prompt,
    PromptReport,
    Relay,
    SamplingParams,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
)

MAX_IGNORED: Final = 32  # names of ignored fields in a header
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.\[\]-]")  # in a header's list of names


def fingerprint_of(context: Context, model: ModelStatus) -> str | None:
    """The fingerprint of the model's weights and settings, from its current status if it was loading before. None: not
    known yet."""
    info = model.info
    if info is None:
        now = context.router.model(model.name)
        info = now.info if now is not None else None
    return info.fingerprint if info is not None else None


class Generation:
    """A request for generation whose fields were checked. ``explicit``: the sampling fields that the request names."""

    __slots__ = (
        "_relay",
        "_requests",
        "explicit",
        "model",
        "options",
        "prompts",
        "response_id",
        "sampling",
    )

    def __init__(
        self,
        model: ModelStatus,
        response_id: str,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        explicit: tuple[str, ...],
        options: Options,
    ) -> None:
        self.model = model
        self.response_id = response_id
        self.prompts = prompts
        self.sampling = sampling
        self.explicit = explicit
        self.options = options
        self._requests: list[GenerateRequest] = []
        self._relay: Relay | None = None

    @property
    def may_be_relayed(self) -> bool:
        """Whether a remote server may get the client's body."""
        return self.options.may_relay and self.model.has_remote and len(self.prompts) == 1

    def prepare(self, call: Call, raw: bytes) -> Cost:
        """Make one request for each prompt. Raises InvalidRequest."""
        options, prompts = self.options, self.prompts
        terms = terms_of(call, priority=options.priority, timeout=options.timeout)
        cost = cost_of(
            self.model,
            prompt_bytes=sum((_bytes_of(prompt, call) for prompt in prompts), 0)
            + _bytes_of_answers(options.answer_sets),
            prompt_tokens=sum((len(prompt.token_ids) for prompt in prompts if isinstance(prompt, TokenPrompt)), 0),
            num_prompts=len(prompts) + len(options.answer_sets),
            width=self.sampling.width,
            max_tokens=self.sampling.max_tokens,
        )
        if self.may_be_relayed:
            self._relay = Relay(
                path=call.route.removeprefix("/v1"),
                body=raw,
                stream=options.stream,
                wants_usage=options.relays_usage,
                headers=forwarded_headers(call),
            )
        self._requests = [
            GenerateRequest(
                id=self.response_id if len(prompts) == 1 else f"{self.response_id}-{number}",
                model=self.model.name,
                priority=terms.priority,
                deadline_s=terms.deadline_s,
                first_byte_s=terms.first_byte_s,
                tenant=terms.tenant,
                weight=terms.weight,
                session=terms.session,
                region=terms.region,
                num_tokens=cost.expected // len(prompts),
                num_bytes=call.request_bytes // len(prompts),
                prompt=prompt,
                sampling=self.sampling,
                explicit=self.explicit,
                cache_salt=options.cache_salt,
                truncate_prompt_tokens=options.truncate_prompt_tokens,
                stream=options.stream,
                return_prompt_ids=options.return_prompt_ids,
                form=options.form,
                lowers_max_tokens=options.lowers_max_tokens,
                arrived_at=call.started_at,
                answer_sets=options.answer_sets,
            )
            for number, prompt in enumerate(prompts)
        ]
        return cost

    async def submit(self, context: Context, call: Call) -> list[Stream]:
        """Submit one request per prompt, after all of them were checked. The call cancels them when it ends.

        Raises what the router raises.
        """
        if len(self._requests) > 1:  # without the check some prompts would be computed before another one is refused
            await context.router.check(self._requests)
        streams: list[Stream] = []
        for request in self._requests:
            stream = open_stream(router_for(context.router, call), request, self._relay)
            call.requests.append(stream.request)
            streams.append(stream)
        return streams


def forwarded_headers(call: Call) -> Headers:
    """The headers that a remote server gets: the request's id, and its trace context if it has one.

    Where this server makes spans, the parent is the call's own span.
    """
    headers: Headers = ((b"x-request-id", call.request_id.encode("ascii")),)
    trace = trace_of(call)
    if not trace and call.sampler is not None:
        trace = call.sampler.untraced(call.unique)
    if trace:
        headers += ((b"traceparent", trace.encode("ascii")),)
        state = trace_state(call)
        if state:
            headers += ((b"tracestate", state.encode("ascii")),)
    return headers


def _bytes_of(prompt: Prompt, call: Call) -> int:
    """An upper bound of the bytes of a prompt's text. The JSON of a text is never shorter than the text."""
    if isinstance(prompt, TokenPrompt):
        return 0
    return len(prompt.text.encode()) if isinstance(prompt, TextPrompt) else call.request_bytes


def _bytes_of_answers(sets: Sequence[AnswerSet]) -> int:
    """The bytes of the answers to be scored, and of the messages before them."""
    return sum(
        (sum([len(message["content"]) for message in one.messages], 0) + sum(map(len, one.answers), 0) for one in sets),
        0,
    )


def ignored_header(ignored: Sequence[str]) -> Headers:
    """The header that names the ignored fields of a request; empty: none was ignored."""
    if not ignored:
        return ()
    return ((IGNORED_HEADER, _listed(ignored)),)


def report_headers(report: PromptReport | None) -> Headers:
    """The headers that name schemas of tools that do not bind an answer, and the scheme of its watermark; empty: all
    bind, and it has none."""
    if report is None:
        return ()
    named = ((UNENFORCED_HEADER, _listed(report.unenforced)),) if report.unenforced else ()
    return (*named, (WATERMARK_HEADER, report.watermark.encode())) if report.watermark else named


def _listed(names: Sequence[str]) -> bytes:
    once = list(dict.fromkeys(names))
    return ",".join(_UNSAFE.sub("?", name[:64]) for name in once[:MAX_IGNORED]).encode("ascii")


# -- gathering ---------------------------------------------------------------------------------


class CollectedCall:
    """One tool call of a collected answer."""

    __slots__ = ("arguments", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.arguments: list[str] = []  # parts of a JSON object


class CollectedText:
    """Text or reasoning of a collected answer, up to the next part of another kind."""

    __slots__ = ("is_reasoning", "pieces")

    def __init__(self, *, is_reasoning: bool) -> None:
        self.is_reasoning = is_reasoning
        self.pieces: list[str] = []


class Choice:
    """One choice of a collected answer. ``parts``: its text, reasoning and calls in the order of their generation."""

    __slots__ = ("calls", "finish_reason", "logprobs", "parts", "reasoning", "stop_reason", "texts", "token_ids")

    def __init__(self) -> None:
        self.parts: list[CollectedText | CollectedCall] = []
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[CollectedCall] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
            self._add_text(delta.reasoning, is_reasoning=True)
        if delta.text:
            self.texts.append(delta.text)
            self._add_text(delta.text, is_reasoning=False)
        for part in delta.calls:
            if part.name is not None:
                self.calls.append(CollectedCall(part.name))
                self.parts.append(self.calls[-1])
            self.calls[part.index].arguments.append(part.arguments)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason

    def _add_text(self, text: str, *, is_reasoning: bool) -> None:
        last = self.parts[-1] if self.parts else None
        if not isinstance(last, CollectedText) or last.is_reasoning != is_reasoning:
            last = CollectedText(is_reasoning=is_reasoning)
            self.parts.append(last)
        last.pieces.append(text)


class Collected:
    """One prompt's complete answer."""

    __slots__ = ("choices", "end", "prompt")

    def __init__(self, n: int) -> None:
        self.choices = [Choice() for _ in range(n)]
        self.prompt: PromptReport | None = None
        self.end: End | None = None


async def collect(call: Call, stream: Stream, n: int) -> Collected:
    """The whole answer of one stream. Raises the error of a failed request."""
    collected = Collected(n)
    async for output in stream:
        if not isinstance(output, Output):
            raise unexpected_relay()
        if output.prompt is not None:
            collected.prompt = output.prompt
            call.note_prompt_tokens(output.prompt.num_tokens)
        for delta in output.deltas:
            collected.choices[delta.index].add(delta)
        if output.end is not None:
            collected.end = output.end
    end = collected.end
    if end is None:
        raise InternalError("The request ended without a result; try again.")
    check_end(end)
    return collected


async def collect_all(call: Call, streams: Sequence[Stream], n: int) -> list[Collected]:
    """All prompts' answers; the first failure ends the others."""
    if len(streams) == 1:
        return [await collect(call, streams[0], n)]
    tasks = [asyncio.create_task(collect(call, stream, n)) for stream in streams]
    failure: BaseException | None = None
    try:
        return await asyncio.gather(*tasks)
    except BaseException as error:
        failure = error
    try:
        call.cancel_requests()
        await _stop(tasks)
        raise failure
    finally:
        tasks.clear()  # failed tasks hold their errors: see ``check_end``
        del failure


async def _stop(tasks: Sequence[asyncio.Task[Collected]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def unexpected_relay() -> InternalError:
    """The error of a relayed answer where a local replica's outputs were expected."""
    return InternalError("A relayed answer came where outputs were expected. This is a bug.")


def error_frame(call: Call, error: InferdError) -> bytes:
    """The last event of a stream that failed after it had begun. Records the error in the call."""
    call.note_error(error)
    return call.errors.event + call.errors.encode(error, call.request_id) + call.errors.event_end


def created_at() -> int:
    """The current time in seconds since the epoch."""
    return int(clock.wall())
