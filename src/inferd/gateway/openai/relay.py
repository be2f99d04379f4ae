"""Relays chat and text completions to the remote servers of models without local replicas.

Decodes and checks the fields that this server uses. The other fields are forwarded with their bytes, and the remote
server checks them. Does not know replicas or connections.
"""

from __future__ import annotations

import asyncio

import msgspec

from inferd.config.versions import entry_named
from inferd.gateway.admission import cost_elsewhere, may_use, terms_of
from inferd.gateway.body.decode import OFF_LOOP_BYTES, decode, decode_body
from inferd.gateway.body.document import check_document
from inferd.gateway.caching import CacheInputs
from inferd.gateway.call import PENDING, Answer, Call
from inferd.gateway.context import Context
from inferd.gateway.errors import invalid
from inferd.gateway.generation.relayed import forwarded
from inferd.gateway.generation.requests import forwarded_headers
from inferd.gateway.limits import check_range
from inferd.gateway.openai.relay_fields import (
    CHAT,
    ChatFields,
    TextFields,
    cached_decoder,
    chat_decoder,
    named_decoder,
    num_prompts_of,
    text_decoder,
)
from inferd.gateway.stages import answer_of
from inferd.gateway.terms import Cost, Terms
from inferd.router.stream import open_stream
from inferd.types import Relay, Request


def remote_model_of(context: Context, call: Call, body: bytes) -> str | None:
    """The model of the request, if it has remote replicas alone; else None."""
    return _target(context, call, _model_of(body)) if context.remote_models else None


def _target(context: Context, call: Call, name: str | None) -> str | None:
    models = context.config.models
    if name is None and len(models) == 1:
        (name,) = models
    if name is None:
        return None
    entry = entry_named(models, name) or name if "@" in name else name
    is_usable = entry in context.remote_models and (
        not call.principal.models or may_use(context, call.principal, entry)
    )
    return entry if is_usable else None


async def relay_request(context: Context, call: Call, path: str, body: bytes) -> Answer | None:
    """The answer of a model that has remote replicas alone; None: the request names another model.

    Raises InferdError for a failure before the first byte.
    """
    if not context.remote_models:
        return None
    decoder = chat_decoder if path == CHAT else text_decoder
    is_decoded = True
    is_large = len(body) > OFF_LOOP_BYTES
    try:
        fields: ChatFields | TextFields = (
            await asyncio.to_thread(decoder.decode, body) if is_large else decoder.decode(body)
        )
        name = _target(context, call, fields.model)
    except (ValueError, RecursionError):
        is_decoded = False
        name = remote_model_of(context, call, body)
    if name is None:
        return None
    if not is_decoded or is_large:
        await decode_body(body, decoder, texts=False)  # type: ignore[misc]  # its error names the wrong field
    else:
        check_document(body)
    num_prompts = width = 1
    if isinstance(fields, TextFields):
        num_prompts = num_prompts_of(fields.prompt)
    elif not fields.messages:
        raise invalid("messages", "messages must not be empty; send at least one message.")
    max_tokens = fields.max_answer_tokens
    if max_tokens is not None:
        check_range("max_tokens", max_tokens)
    if fields.n is not None:
        check_range("n", fields.n)
        width = fields.n
    if fields.best_of is not None:
        check_range("best_of", fields.best_of)
        width = max(width, fields.best_of)
    call.stream = stream = fields.stream is True
    call.model = name
    relay = Relay(
        path=path,
        body=body,
        stream=stream,
        wants_usage=fields.wants_usage,
        headers=forwarded_headers(call),
        unchanged_for="" if fields.has_own_fields else name,
        lacks_stream_options=fields.stream_options is msgspec.UNSET,
    )
    terms = terms_of(call, priority=fields.priority, timeout=fields.timeout)
    cost = cost_elsewhere(len(body), num_prompts, width, max_tokens)
    return await answer_of(context, call, RelayWork(name, relay, terms, cost))


class RelayWork:
    """A request for a model with remote replicas alone, for the stages."""

    __slots__ = ("_cost", "_is_random", "_relay", "_terms", "model_name")

    def __init__(
        self, model_name: str, relay: Relay, terms: Terms, cost: Cost, *, is_random: bool | None = None
    ) -> None:
        """``is_random``: whether the answer is sampled without a seed; None: the body decides."""
        self.model_name = model_name
        self._relay = relay
        self._terms = terms
        self._cost = cost
        self._is_random = is_random

    def identity(self) -> bytes:
        return self._relay.body

    def inputs(self, context: Context) -> CacheInputs:
        inputs = relay_cache_inputs(context, self.model_name, self._relay.body)
        return inputs if self._is_random is None else inputs._replace(is_random=self._is_random)

    def prepare(self, context: Context, call: Call) -> Cost:
        return self._cost

    async def submit(self, context: Context, call: Call) -> Answer:
        relay, terms = self._relay, self._terms
        request = Request(
            id=call.response_id("relay"),
            model=self.model_name,
            priority=terms.priority,
            deadline_s=terms.deadline_s,
            first_byte_s=terms.first_byte_s,
            tenant=terms.tenant,
            weight=terms.weight,
            session=terms.session,
            region=terms.region,
            num_tokens=self._cost.expected,
            num_bytes=len(relay.body),
            arrived_at=call.started_at,
        )
        if not (relay.stream and call.recorders):
            call.requests.append(context.router.submit(request, call, relay))
            return PENDING
        stream = open_stream(context.router, request, relay)  # its last frame is sent after the answer was stored
        call.requests.append(stream.request)
        return await forwarded(call, stream, await anext(stream))


def relay_cache_inputs(context: Context, name: str, body: bytes) -> CacheInputs:
    """The cache inputs of a request for a model with remote replicas alone: its servers' addresses replace the
    fingerprint. Raises InvalidRequest."""
    try:
        fields = cached_decoder.decode(body)
    except (ValueError, RecursionError):
        fields = decode(body, cached_decoder, texts=False)  # raises an InvalidRequest that names the field
    servers = [f"{remote.url} {remote.model}" for remote in context.config.models[name].upstreams]
    return CacheInputs(
        name,
        "remote " + ", ".join(servers),
        body,
        bytes(fields.stream_options),
        bool(fields.stream),
        fields.temperature != 0 and fields.seed is None,
        fields.timeout,
    )


def _model_of(body: bytes) -> str | None:
    """The model that a body names; None: it names none, or is no JSON object."""
    try:
        return named_decoder.decode(body).model
    except (ValueError, RecursionError):
        return None
