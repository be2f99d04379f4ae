"""Answers a checked request for generation: from the idempotency store, from the cache, from a local model or from a
remote server.

Knows the order in which these are tried, and whole and streamed answers. The form of an answer is the endpoint's
(``Reply``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec import UNSET

from inferd.gateway.caching import CacheInputs, cache_inputs, get_or_compute
from inferd.gateway.call import Answer, Call, Response
from inferd.gateway.context import Context
from inferd.gateway.generation import (
    Collected,
    check_request_id,
    collect_all,
    fingerprint_of,
    ignored_header,
    submit_all,
)
from inferd.gateway.idempotency import run_idempotent
from inferd.gateway.openai.wire import GenerationFields
from inferd.gateway.predictions import check_task
from inferd.gateway.relay import relayed_answer
from inferd.gateway.sse import HEARTBEAT_S, DeltaWriter, stream_answer
from inferd.gateway.upstream import ModelStatus
from inferd.gateway.versions import model_for
from inferd.types import Prompt, SamplingParams


class Work(NamedTuple):
    """What a request asks a model to compute. ``explicit``: names of the sampling fields that the client set."""

    body: GenerationFields
    model: ModelStatus
    response_id: str
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    explicit: tuple[str, ...]
    return_prompt_ids: bool


class Reply(Protocol):
    """Writes one answer in the form of its endpoint."""

    fingerprint: str | None
    """The model's fingerprint. Set when the model has answered, because it is not known while the model loads."""

    def completion(self, call: Call, collected: Sequence[Collected]) -> bytes:
        """The body of a whole answer; ``collected`` has one entry per prompt."""
        ...

    def writer(self, call: Call) -> DeltaWriter: ...


def begin_generation(context: Context, call: Call, body: GenerationFields, prefix: str) -> tuple[ModelStatus, str]:
    """The model that the request names, and the id of its answer. Raises ModelNotFound, InvalidRequest."""
    user = body.user
    model = model_for(context, call, body.model, "" if user is UNSET else bytes(user).decode())
    check_task(model, "generate")
    call.model = model.name
    check_request_id(call, body)
    call.stream = bool(body.stream)
    return model, call.response_id(prefix)


async def answer_generation(context: Context, call: Call, raw: bytes, work: Work, reply: Reply) -> Answer:
    """Compute, repeat or relay the answer to ``work``.

    ``raw``: the body as the client sent it, which a remote server gets if it answers instead. Raises InferdError for
    every failure before the first token.
    """
    model = work.model
    headers = ignored_header(call.ignored)
    heartbeat_s = HEARTBEAT_S if model.replicas_ready == 0 else None

    def write() -> DeltaWriter:
        reply.fingerprint = fingerprint_of(context, model)
        return reply.writer(call)

    async def compute() -> Answer:
        streams = await submit_all(
            context,
            call,
            work.body,
            model,
            work.response_id,
            work.prompts,
            work.sampling,
            work.explicit,
            raw=raw,
            return_prompt_ids=work.return_prompt_ids,
        )
        relayed = await relayed_answer(call, model, streams)
        if relayed is not None:
            return relayed
        if call.stream:
            return await stream_answer(call, streams, write, headers, heartbeat_s=heartbeat_s)
        collected = await collect_all(call, streams, work.sampling.n)
        reply.fingerprint = fingerprint_of(context, model)
        return Response(200, reply.completion(call, collected), headers=headers)

    def inputs() -> CacheInputs:
        return cache_inputs(work.body, model, work.sampling)

    return await run_idempotent(
        context, call, raw, model.name, lambda: get_or_compute(context, call, inputs, model.name, compute)
    )
