"""POST /v1/responses: items in, a response or a stream of its events out. POST /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import UNSET

from inferd import clock
from inferd.errors import InferdError, InvalidRequest
from inferd.gateway.admission import reserve
from inferd.gateway.body.decode import json_body
from inferd.gateway.caching import CacheInputs
from inferd.gateway.call import Answer, Call, EventStream, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import check_end, invalid
from inferd.gateway.generation.fields import decode_open_body, ignored_names
from inferd.gateway.generation.items import NO_COMPACTION, Placed, messages_of
from inferd.gateway.generation.options import Options
from inferd.gateway.generation.outputs import first_output, merge
from inferd.gateway.generation.requests import Generation, ignored_header, report_headers
from inferd.gateway.generation.sse import stream_answer
from inferd.gateway.generation.stand_in import requested_model
from inferd.gateway.generation.writer import encode
from inferd.gateway.responses.form import (
    check_fields,
    check_prompt_fields,
    form_of,
    reasoning_arguments,
    reasoning_echo,
    sampling_of,
    text_echo,
    wants_encrypted,
    wants_logprobs,
)
from inferd.gateway.responses.models import FOREIGN
from inferd.gateway.responses.output import STREAM_FORM, OutputWriter, Shape, first_frames
from inferd.gateway.responses.state import conversation_id, new_items, past_items, store_of, stored_input
from inferd.gateway.responses.storing import Storing
from inferd.gateway.responses.tools import Tools, add_tools
from inferd.gateway.responses.truncation import fitting
from inferd.gateway.responses.wire import (
    ConversationRef,
    InputTokens,
    PromptFields,
    ResponseObject,
    ResponsesRequest,
    ToolChoice,
    input_tokens_decoder,
    responses_decoder,
    sent_choice_decoder,
)
from inferd.gateway.runs import Run, Runs, follow
from inferd.gateway.stages import answer_of
from inferd.gateway.terms import Cost
from inferd.gateway.upstream import ModelStatus
from inferd.http.exchange import Headers
from inferd.router.stream import Stream
from inferd.stored.port import response_id
from inferd.types import Chat

_IGNORED: Final = ignored_names(ResponsesRequest)


async def create_response(context: Context, call: Call, rest: str) -> Answer:
    """Answer a conversation. Raises InferdError for every failure before the first token."""
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    body, ignored = await decode_open_body(raw, responses_decoder)
    ignored += check_fields(body)
    runs = context.runs
    run = runs.run_of(call) if runs is not None else None
    tools = Tools(body.tools)
    sampling, explicit = sampling_of(body)
    model, replaced = requested_model(context, call, body.model, body.user or "", FOREIGN)
    _check_local(model)
    store = store_of(context, body)
    past = await past_items(context, call, body)
    if run is not None:
        past = past[: run.num_past]
    items = await new_items(context, call, body, past)
    add_tools(tools, [*past, *items])
    form = form_of(body, tools, fit=bool(body.fit))
    chat, left_out = _chat_of(body, [*past, *items], tools)
    if body.truncation == "auto":
        chat = await fitting(context, call, model, chat, body.max_output_tokens)
    call.ignored = list(dict.fromkeys([*ignored, *left_out, *tools.left_out, *replaced]))
    if run is not None and sampling.seed is None:
        sampling, explicit = msgspec.structs.replace(sampling, seed=run.seed), (*explicit, "seed")
    call.stream = bool(body.stream) or run is not None
    options = Options(stream=call.stream, form=form, lowers_max_tokens=True)
    begun_at = clock.wall() if run is None else run.created_at
    shape = Shape(
        _unfinished(raw, body, model, tools, run, int(begun_at), is_stored=store is not None),
        tools.by_name,
        top=(body.top_logprobs or 0) if wants_logprobs(body) else None,
        keeps_encrypted=wants_encrypted(body),
    )
    storing = None
    if store is not None or conversation_id(body):
        storing = Storing(context, call, store, body, stored_input(raw, items, shape.id), begun_at)
    if body.background and run is None:
        assert runs is not None, "there is a store"
        assert storing is not None, "a background response is stored"
        shape.note_model(model.info)
        return await _queued(runs, call, raw, shape, storing, len(past))
    generation = Generation(model, shape.id, [chat], sampling, explicit, options)
    return await answer_of(context, call, _ResponseWork(generation, raw, body, shape, storing, run))


async def _queued(runs: Runs, call: Call, raw: bytes, shape: Shape, storing: Storing, num_past: int) -> Answer:
    """Begin a background response; the answer is its beginning, or its events as they come. Raises InferdError."""
    queued = msgspec.structs.replace(shape.unfinished, status="queued")
    body = encode(queued)
    run = await runs.begin(call, raw, storing.stored(queued, body), first_frames(shape.unfinished), num_past)
    headers = ignored_header(call.ignored)
    if call.stream:
        return EventStream(follow(run, -1), headers, STREAM_FORM.ending)
    return Response(200, body, headers=headers)


async def count_input_tokens(context: Context, call: Call, rest: str) -> Answer:
    """The number of tokens of a prompt, as ``create_response`` computes it. Raises InvalidRequest, ModelNotFound,
    StoredNotFound, QuotaExceeded, Unavailable."""
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    body, ignored = await decode_open_body(raw, input_tokens_decoder)
    ignored += check_prompt_fields(body)
    tools = Tools(body.tools)
    model, replaced = requested_model(context, call, body.model, "", FOREIGN)
    _check_local(model)
    past = await past_items(context, call, body)
    items = [*past, *await new_items(context, call, body, past)]
    add_tools(tools, items)
    form_of(body, tools)
    chat, left_out = _chat_of(body, items, tools)
    call.ignored = list(dict.fromkeys([*ignored, *left_out, *tools.left_out, *replaced]))
    reserve(context, call, model.name)
    if body.truncation == "auto":
        chat = await fitting(context, call, model, chat, None)
    ids, _ = await context.router.tokenize(model.name, chat, tenant=call.principal.tenant)
    return Response(200, encode(InputTokens(len(ids))), headers=ignored_header(call.ignored))


async def refuse_compaction(context: Context, call: Call, rest: str) -> Answer:
    """Raises InvalidRequest: clients of OpenAI know the route, and learn what to do instead."""
    raise InvalidRequest(NO_COMPACTION, code="unsupported_endpoint")


def _chat_of(body: PromptFields, items: Sequence[Placed], tools: Tools) -> tuple[Chat, list[str]]:
    messages, left_out = messages_of(body.instructions, items)
    arguments = reasoning_arguments(body.reasoning)
    return Chat(messages=messages, tools=tools.rendered or None, template_kwargs=arguments, at="input"), left_out


def _check_local(model: ModelStatus) -> None:
    """Check that a worker of this server can answer. Raises InvalidRequest."""
    if not model.has_local:
        raise invalid(
            "model",
            f"The model {model.name!r} runs on servers that are asked in OpenAI's older dialect; POST to "
            "/v1/chat/completions.",
            "unsupported_task",
        )


def _unfinished(
    raw: bytes,
    body: ResponsesRequest,
    model: ModelStatus,
    tools: Tools,
    run: Run | None,
    created_at: int,
    *,
    is_stored: bool,
) -> ResponseObject:
    """The response before its first item, with the fields of its request."""
    conversation = conversation_id(body)
    chosen = (
        sent_choice_decoder.decode(raw).tool_choice if isinstance(body.tool_choice, ToolChoice) else body.tool_choice
    )
    return ResponseObject(
        id=response_id() if run is None else run.id,
        created_at=created_at,
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        conversation=None if conversation is None else ConversationRef(conversation),
        previous_response_id=body.previous_response_id,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=model.name,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=reasoning_echo(body.reasoning),
        safety_identifier=body.safety_identifier,
        store=is_stored,
        temperature=body.temperature,
        text=text_echo(body.text),
        tool_choice="auto" if chosen is None else chosen,
        tools=tools.echo,
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        truncation=body.truncation or "disabled",
        user=body.user,
        metadata=body.metadata or {},
    )


class _ResponseWork:
    """A request for a response, for the stages."""

    __slots__ = ("_body", "_generation", "_raw", "_run", "_shape", "_storing")

    def __init__(
        self,
        generation: Generation,
        raw: bytes,
        body: ResponsesRequest,
        shape: Shape,
        storing: Storing | None,
        run: Run | None,
    ) -> None:
        self._run = run  # None: a client waits for the answer
        self._storing = storing  # None: nothing is stored
        self._generation = generation
        self._raw = raw
        self._body = body
        self._shape = shape

    @property
    def model_name(self) -> str:
        return self._generation.model.name

    def identity(self) -> bytes:
        return self._raw

    def inputs(self, context: Context) -> CacheInputs | None:
        if self._storing is not None or self._body.previous_response_id:
            return None  # each stored response has an id of its own
        model, sampling = self._generation.model, self._generation.sampling
        unused = dict.fromkeys(_IGNORED, UNSET)
        fields = msgspec.structs.replace(self._body, model=None, stream_options=None, **unused)
        fingerprint = model.info.fingerprint if model.info is not None else None
        is_random = sampling.temperature != 0
        return CacheInputs(model.name, fingerprint, fields, b"", bool(self._body.stream), is_random, None)

    def prepare(self, context: Context, call: Call) -> Cost:
        return self._generation.prepare(call, self._raw)

    async def submit(self, context: Context, call: Call) -> Answer:
        is_loading = self._generation.model.replicas_ready == 0
        streams = await self._generation.submit(context, call)
        headers = ignored_header(call.ignored)
        if call.stream:
            writers: list[OutputWriter] = []

            def write() -> OutputWriter:
                writers.append(self._writer(context, call))
                return writers[0]

            answer = await stream_answer(call, streams, write, STREAM_FORM, headers, is_loading=is_loading)
            if self._storing is not None:
                run, runs = self._run, context.runs

                def is_interrupted(error: InferdError) -> bool:
                    return run is not None and runs is not None and runs.interrupt(run, error)

                answer.frames = self._storing.kept_frames(answer.frames, self._shape, writers, is_interrupted)
            return answer
        writer, unenforced = await self._collected(context, call, streams)
        response = writer.whole(call.usage_so_far)
        body = encode(response)
        if self._storing is not None:
            await self._storing.keep(response, body)
        return Response(200, body, headers=(*headers, *unenforced))

    async def _collected(self, context: Context, call: Call, streams: list[Stream]) -> tuple[OutputWriter, Headers]:
        """The writer that has got all outputs, and what names schemas that do not bind the answer. Raises the error of
        a failed request."""
        outputs = merge(call, streams)
        number, output = await first_output(outputs, call)
        unenforced = report_headers(output.prompt)
        writer = self._writer(context, call)
        try:
            while output.end is None:
                writer.write(number, output)
                number, output = await anext(outputs)
            check_end(output.end)
            writer.write(number, output)
        finally:
            await outputs.aclose()
        return writer, unenforced

    def _writer(self, context: Context, call: Call) -> OutputWriter:
        model = context.router.model(self.model_name)
        self._shape.note_model(model.info if model is not None else None)
        return OutputWriter(call, self._shape, streams=call.stream)
