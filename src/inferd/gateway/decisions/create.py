"""POST /v1/decisions: questions about an input, answered with probabilities."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET

from inferd.errors import InternalError
from inferd.gateway.body.decode import json_body
from inferd.gateway.caching import CacheInputs
from inferd.gateway.call import Answer, Call, Response
from inferd.gateway.context import Context
from inferd.gateway.decisions.classified import ClassifierWork
from inferd.gateway.decisions.evidence import messages_of_input
from inferd.gateway.decisions.questions import Asked, asked_of, decision_body
from inferd.gateway.decisions.wire import DecisionRequest, decision_decoder
from inferd.gateway.errors import invalid
from inferd.gateway.generation.fields import decode_open_body, ignored_names
from inferd.gateway.generation.options import Options
from inferd.gateway.generation.requests import Generation, collect, ignored_header
from inferd.gateway.predictions import check_task
from inferd.gateway.stages import answer_of
from inferd.gateway.terms import Cost
from inferd.gateway.upstream import ModelStatus
from inferd.gateway.versions import model_for
from inferd.types import Chat, SamplingParams

MAX_KEY_CHARS: Final = 1024
_IGNORED: Final = ignored_names(DecisionRequest)
_NO_REASONING: Final = {"enable_thinking": False, "thinking": False}  # variables that templates know


async def create_decision(context: Context, call: Call, rest: str) -> Answer:
    """Answer questions. Raises InferdError for every failure."""
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    body, ignored = await decode_open_body(raw, decision_decoder)
    messages, left_out = messages_of_input(body.input)
    ignored += left_out
    asked = asked_of(body.questions)
    key = body.prompt_cache_key or ""
    if len(key) > MAX_KEY_CHARS:
        raise invalid(
            "prompt_cache_key", f"prompt_cache_key may have at most {MAX_KEY_CHARS} characters, not {len(key)}."
        )
    model = model_for(context, call, body.model)
    check_task(model, "generate", "classify")
    _check_local(model)
    call.model = model.name
    call.ignored = ignored
    inputs = _cache_inputs(model, body)
    info = model.info
    if info is not None and "generate" not in info.tasks:
        call.ignored = [*ignored, "questions[].instructions"]
        return await answer_of(context, call, ClassifierWork(model, raw, inputs, messages, asked))
    options = Options(answer_sets=tuple([one.answer_set() for one in asked]), cache_salt=key)
    chat = Chat(messages=messages, template_kwargs=_NO_REASONING)
    sampling = SamplingParams(max_tokens=0)
    generation = Generation(model, call.response_id("decision"), [chat], sampling, ("max_tokens",), options)
    return await answer_of(context, call, _DecisionWork(generation, raw, inputs, asked))


class _DecisionWork:
    """A request for decisions of a model that generates text, for the stages."""

    __slots__ = ("_asked", "_generation", "_inputs", "_raw")

    def __init__(self, generation: Generation, raw: bytes, inputs: CacheInputs, asked: list[Asked]) -> None:
        self._generation = generation
        self._raw = raw
        self._inputs = inputs
        self._asked = asked

    @property
    def model_name(self) -> str:
        return self._generation.model.name

    def identity(self) -> bytes:
        return self._raw

    def inputs(self, context: Context) -> CacheInputs | None:
        return self._inputs

    def prepare(self, context: Context, call: Call) -> Cost:
        return self._generation.prepare(call, self._raw)

    async def submit(self, context: Context, call: Call) -> Answer:
        (stream,) = await self._generation.submit(context, call)
        collected = await collect(call, stream, 1)
        if collected.prompt is None or collected.prompt.scores is None or collected.end is None:
            raise InternalError("The worker ended without the scores of the answers. This is a bug.")
        body = decision_body(self.model_name, self._asked, collected.prompt.scores, collected.end.usage)
        return Response(200, body, headers=ignored_header(call.ignored))


def _cache_inputs(model: ModelStatus, body: DecisionRequest) -> CacheInputs:
    fields = msgspec.structs.replace(body, model=None, prompt_cache_key=None, **dict.fromkeys(_IGNORED, UNSET))
    fingerprint = model.info.fingerprint if model.info is not None else None
    return CacheInputs(model.name, fingerprint, fields, b"", stream=False, is_random=False, timeout=None)


def _check_local(model: ModelStatus) -> None:
    """Check that a worker of this server can answer. Raises InvalidRequest."""
    if not model.has_local:
        raise invalid(
            "model",
            f"The model {model.name!r} runs on other servers, to which decisions are not relayed; name a model that "
            "runs on this server.",
            "unsupported_task",
        )
