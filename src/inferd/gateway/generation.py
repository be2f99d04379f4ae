"""Submits requests for generation to the router, and gathers their outputs, for all endpoints that generate text.

Knows the router's streams. Does not know the wire formats of answers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence

from inferd import clock
from inferd.errors import Cancelled, InferdError, InternalError, from_failure
from inferd.gateway.admission import cost_of, reserve, terms_of
from inferd.gateway.call import Call, is_request_id
from inferd.gateway.context import Context
from inferd.gateway.errors import error_body, invalid, shown
from inferd.gateway.openai.sampling import check_range
from inferd.gateway.openai.wire import GenerationFields, PromptTokensDetails, UsageBody
from inferd.gateway.upstream import ModelStatus, Stream
from inferd.http.asgi import Headers
from inferd.types import (
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
    Usage,
)

_TRACE = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def fingerprint_of(context: Context, model: ModelStatus) -> str | None:
    """The fingerprint of the model's weights and settings, from its current status if it was loading before. None: not
    known yet."""
    info = model.info
    if info is None:
        now = context.router.model(model.name)
        info = now.info if now is not None else None
    return info.fingerprint if info is not None else None


async def submit_all(
    context: Context,
    call: Call,
    body: GenerationFields,
    model: ModelStatus,
    response_id: str,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    explicit: tuple[str, ...],
    *,
    raw: bytes,
    return_prompt_ids: bool,
    may_relay: bool = True,
) -> list[Stream]:
    """Submit one request per prompt, after all of them were checked. The call owns the streams and closes them.

    A request with one prompt carries the client's body (``raw``), which a remote replica gets.

    Raises InvalidRequest, QuotaExceeded, and what the router raises.
    """
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= 1024:
        raise invalid("cache_salt", f"cache_salt must have 1 to 1024 characters, not {len(body.cache_salt)}.")
    truncate = _truncation(body)
    terms = terms_of(call, priority=body.priority, timeout=body.timeout)
    cost = cost_of(
        model,
        prompt_bytes=sum(_bytes_of(prompt, call) for prompt in prompts),
        prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts if isinstance(prompt, TokenPrompt)),
        num_prompts=len(prompts),
        width=sampling.width,
        max_tokens=sampling.max_tokens,
    )
    reserve(context, call, model.name, prompt_tokens=cost.max_prompt, max_tokens=cost.max_answer)
    relay = None
    if may_relay and model.has_remote and len(prompts) == 1:
        options = body.stream_options
        relay = Relay(
            path=call.route.removeprefix("/v1"),
            body=raw,
            stream=bool(body.stream),
            wants_usage=options is not None and options.include_usage is True,
            headers=forwarded_headers(call),
        )
    requests = [
        GenerateRequest(
            id=response_id if len(prompts) == 1 else f"{response_id}-{number}",
            model=model.name,
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
            sampling=sampling,
            explicit=explicit,
            cache_salt=body.cache_salt or "",
            truncate_prompt_tokens=truncate,
            stream=bool(body.stream),
            return_prompt_ids=return_prompt_ids,
            arrived_at=call.started_at,
        )
        for number, prompt in enumerate(prompts)
    ]
    if len(requests) > 1:  # without the check some prompts would be computed before another one is refused
        await context.router.check(requests)
    for request in requests:
        call.streams.append(context.router.submit(request, relay))
    return call.streams


def forwarded_headers(call: Call) -> Headers:
    """The headers that a remote server gets: the request's id, and its trace context if it has one."""
    headers: Headers = ((b"x-request-id", call.request_id.encode("ascii")),)
    trace = call.header(b"traceparent")
    return (*headers, (b"traceparent", trace)) if trace is not None and _TRACE.fullmatch(trace) else headers


def _bytes_of(prompt: Prompt, call: Call) -> int:
    """An upper bound of the bytes of a prompt's text. The JSON of a text is never shorter than the text."""
    if isinstance(prompt, TokenPrompt):
        return 0
    return len(prompt.text.encode()) if isinstance(prompt, TextPrompt) else call.request_bytes


def check_request_id(call: Call, body: GenerationFields) -> None:
    """Take the request's id from the body's ``request_id``, which vLLM's dialect allows, instead of from the header.
    Raises InvalidRequest."""
    if body.request_id is None:
        return
    if not is_request_id(body.request_id):
        raise invalid(
            "request_id",
            f"request_id must be 1 to 128 of the characters A-Z a-z 0-9 . _ : -, not {shown(body.request_id)}.",
        )
    call.given_request_id = call.request_id = body.request_id


def _truncation(body: GenerationFields) -> int | None:
    if body.truncation_side not in (None, "left"):
        raise invalid(
            "truncation_side",
            f"truncation_side must be 'left', not {shown(body.truncation_side)}.",
            "unsupported_parameter",
        )
    truncate = body.truncate_prompt_tokens
    if truncate is None:
        return None
    check_range("truncate_prompt_tokens", truncate)
    if truncate == 0:
        raise invalid(
            "truncate_prompt_tokens", "truncate_prompt_tokens must be at least 1, or -1 for the model's limit, not 0."
        )
    return truncate


def ignored_header(ignored: Sequence[str]) -> Headers:
    """The header that names the ignored fields of a request; empty: none was ignored."""
    return ((b"x-inferd-ignored-params", ",".join(ignored).encode("ascii")),) if ignored else ()


# -- gathering ---------------------------------------------------------------------------------


class Choice:
    """One choice of a collected answer."""

    __slots__ = ("finish_reason", "logprobs", "stop_reason", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        if delta.text:
            self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


class Collected:
    """One prompt's complete answer."""

    __slots__ = ("choices", "end", "prompt")

    def __init__(self, n: int) -> None:
        self.choices = [Choice() for _ in range(n)]
        self.prompt: PromptReport | None = None
        self.end: End | None = None


def failure_of(end: End) -> InferdError | None:
    """The error of a request that ended with ``end``; None: it was done. To raise it, use ``check_end``."""
    return None if _is_done(end) else _error_of(end)


def check_end(end: End) -> None:
    """Raise the error of a request that ended with ``end``, if it was not done.

    Raise with this function and not the result of ``failure_of``: a frame with the error in a variable makes a
    reference cycle of error, traceback and frame. The cycle keeps the request and its prompt in memory until the
    garbage collector runs.
    """
    if not _is_done(end):
        raise _error_of(end)


def _is_done(end: End) -> bool:
    return end.failure is None and end.outcome == "done"


def _error_of(end: End) -> InferdError:
    if end.failure is not None:
        return from_failure(end.failure)
    if end.outcome == "cancelled":
        return Cancelled("The request was cancelled by the server; try again.")
    return InternalError("The request failed; the log has the details.")


async def collect(call: Call, stream: Stream, n: int) -> Collected:
    """The whole answer of one stream. Raises the error of a failed request."""
    collected = Collected(n)
    async for output in stream:
        if not isinstance(output, Output):
            raise _unexpected_relay()
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
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        call.close_streams()
        await _stop(tasks)
        raise
    finally:
        tasks.clear()  # failed tasks hold their errors: see ``check_end``


async def _stop(tasks: Sequence[asyncio.Task[Collected]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def merge(call: Call, streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Output], None]:
    """Outputs of several streams as they come, each with its stream's number.

    At most one output per stream is held here, so a slow reader does not fill memory.
    """
    if len(streams) == 1:
        async for output in streams[0]:
            if not isinstance(output, Output):
                raise _unexpected_relay()
            if output.prompt is not None:
                call.note_prompt_tokens(output.prompt.num_tokens)
            yield 0, output
        return
    waiting = {asyncio.create_task(_next(stream)): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                number = waiting.pop(task)
                output_or_none = task.result()
                if output_or_none is not None:
                    waiting[asyncio.create_task(_next(streams[number]))] = number
                    if output_or_none.prompt is not None:
                        call.note_prompt_tokens(output_or_none.prompt.num_tokens)
                    yield number, output_or_none
    finally:
        for task in waiting:
            task.cancel()


async def _next(stream: Stream) -> Output | None:
    try:
        output = await anext(stream)
    except StopAsyncIteration:
        return None
    if not isinstance(output, Output):
        raise _unexpected_relay()
    return output


def _unexpected_relay() -> InternalError:
    return InternalError("A relayed answer came where outputs were expected. This is a bug.")


async def first_output(outputs: AsyncGenerator[tuple[int, Output], None], call: Call) -> tuple[int, Output]:
    """The first output and its stream's number, before any status is sent. Raises the error of a failed request, which
    then becomes an HTTP error."""
    try:
        number, output = await anext(outputs)
        if output.end is not None and not _is_done(output.end):
            check_end(output.end)
    except StopAsyncIteration:
        raise InternalError("The request ended without a result; try again.") from None
    except BaseException:
        await outputs.aclose()
        raise
    return number, output


def usage_body(usage: Usage) -> UsageBody:
    """A usage in OpenAI's form."""
    return UsageBody(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptTokensDetails(usage.cached_tokens),
    )


def error_frame(call: Call, error: InferdError) -> bytes:
    """The last event of a stream that failed after it had begun. Records the error in the call."""
    call.note_error(error)
    return b"data: " + error_body(error) + b"\n\n"


def created_at() -> int:
    """The current time in seconds since the epoch."""
    return int(clock.wall())
