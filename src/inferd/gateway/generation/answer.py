"""Answers a checked chat or text completion, whole or streamed.

The form of an answer is the endpoint's (``Reply``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from inferd.gateway.caching import CacheInputs
from inferd.gateway.call import Answer, Call, Response
from inferd.gateway.context import Context
from inferd.gateway.generation.relayed import relayed_answer
from inferd.gateway.generation.requests import (
    Collected,
    Generation,
    collect_all,
    fingerprint_of,
    ignored_header,
    report_headers,
)
from inferd.gateway.generation.sse import stream_answer
from inferd.gateway.generation.writer import AnswerWriter, StreamForm
from inferd.gateway.predictions import check_task
from inferd.gateway.terms import Cost
from inferd.gateway.upstream import ModelStatus
from inferd.gateway.versions import model_for


class Reply(Protocol):
    """Writes one answer in the form of its endpoint."""

    fingerprint: str | None
    """The model's fingerprint. Set when the model has answered, because it is not known while the model loads."""

    @property
    def stream_form(self) -> StreamForm: ...
    def cache_fields(self) -> tuple[msgspec.Struct, bytes]:
        """The fields of the request that determine its answer, and those that change the frames of a stream."""
        ...

    def completion(self, call: Call, collected: Sequence[Collected]) -> bytes:
        """The body of a whole answer; ``collected`` has one entry per prompt."""
        ...

    def writer(self, call: Call) -> AnswerWriter: ...


def model_of(context: Context, call: Call, name: str | None, user: str) -> ModelStatus:
    """The model that a request names, or the version of it that serves ``user``. Raises ModelNotFound,
    InvalidRequest."""
    model = model_for(context, call, name, user)
    check_task(model, "generate")
    call.model = model.name
    return model


class GenerateWork:
    """A request for a completion, for the stages. ``raw`` is the client's body, which a remote replica gets."""

    __slots__ = ("_generation", "_raw", "_reply")

    def __init__(self, generation: Generation, raw: bytes, reply: Reply) -> None:
        self._generation = generation
        self._raw = raw
        self._reply = reply

    @property
    def model_name(self) -> str:
        return self._generation.model.name

    def identity(self) -> bytes:
        return self._raw

    def inputs(self, context: Context) -> CacheInputs:
        generation = self._generation
        model, sampling, options = generation.model, generation.sampling, generation.options
        fields, form = self._reply.cache_fields()
        # A request without a temperature counts as random, because the model's default may be to sample.
        is_random = sampling.temperature != 0 and sampling.seed is None
        fingerprint = model.info.fingerprint if model.info is not None else None
        # A field without effect here may have one at a remote server.
        body: bytes | msgspec.Struct = self._raw if generation.may_be_relayed else fields
        return CacheInputs(model.name, fingerprint, body, form, options.stream, is_random, options.timeout)

    def prepare(self, context: Context, call: Call) -> Cost:
        return self._generation.prepare(call, self._raw)

    async def submit(self, context: Context, call: Call) -> Answer:
        generation, reply = self._generation, self._reply
        model = generation.model
        is_loading = model.replicas_ready == 0
        streams = await generation.submit(context, call)
        if model.has_remote and len(streams) == 1:
            relayed = await relayed_answer(call, streams[0])
            if relayed is not None:
                return relayed
        headers = ignored_header(call.ignored)

        def write() -> AnswerWriter:
            reply.fingerprint = fingerprint_of(context, model)
            return reply.writer(call)

        if call.stream:
            return await stream_answer(call, streams, write, reply.stream_form, headers, is_loading=is_loading)
        collected = await collect_all(call, streams, generation.sampling.n)
        reply.fingerprint = fingerprint_of(context, model)
        headers = (*headers, *report_headers(collected[0].prompt))
        return Response(200, reply.completion(call, collected), headers=headers)
