"""Relays requests for models with remote replicas alone: they are checked and admitted here, and computed remotely.

The fields that the gateway uses are decoded and checked. The remote server checks the rest, and gets the body unchanged
where that is possible. Most requests are relayed without a task: ``RelayForwarder.forward`` takes them from their
connection, and the answer is written from one connection to the other. A large or slow body, an Idempotency-Key, a
cached model or an early error take the general path (``relay_request``). Knows neither replicas nor connections to
remote servers.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Final

import msgspec

from inferd import clock
from inferd.config.versions import entry_named
from inferd.errors import InferdError, InternalError
from inferd.gateway.admission import Cost, Terms, authenticate, cost_of, may_use, reserve, terms_of
from inferd.gateway.call import Answer, Call, EventStream, Response, require_json
from inferd.gateway.context import Context
from inferd.gateway.decode import OFF_LOOP_BYTES, decode_body, may_repeat_keys
from inferd.gateway.errors import invalid
from inferd.gateway.generation import check_end, error_frame, failure_of, forwarded_headers
from inferd.gateway.openai.sampling import check_range
from inferd.gateway.origin import Origins
from inferd.gateway.relay_fields import (
    CHAT,
    NO_MODEL_INFO,
    TEXT,
    ChatFields,
    TextFields,
    chat_decoder,
    is_utf8,
    num_prompts_of,
    remote_models,
    text_decoder,
)
from inferd.gateway.repeated.heads import HeadCache
from inferd.gateway.repeated.relay import CachedRelayHead
from inferd.gateway.response_writer import NOSNIFF, CallHandler, ResponseWriter
from inferd.gateway.upstream import Item, ModelStatus, Stream
from inferd.http.exchange import Exchange
from inferd.tenancy.principal import Principal
from inferd.types import End, Relay, Relayed, Request

_TARGETS: Final = {b"/v1/chat/completions": CHAT, b"/v1/completions": TEXT}

_log = logging.getLogger("inferd.gateway")


def submit_completion(
    context: Context, call: Call, name: str, path: str, fields: ChatFields | TextFields, body: bytes
) -> Stream:
    """Check, admit and submit a chat or text completion for a model with remote replicas alone. Raises InvalidRequest,
    QuotaExceeded, and what the router raises."""
    if isinstance(fields, ChatFields):
        if not fields.messages:
            raise invalid("messages", "messages must not be empty; send at least one message.")
        max_tokens, num_prompts = fields.max_answer_tokens, 1
    else:
        max_tokens, num_prompts = fields.max_answer_tokens, num_prompts_of(fields.prompt)
    if max_tokens is not None:
        check_range("max_tokens", max_tokens)
    width = 1
    if fields.n is not None:
        check_range("n", fields.n)
        width = fields.n
    if fields.best_of is not None:
        check_range("best_of", fields.best_of)
        width = max(width, fields.best_of)
    stream = call.stream = bool(fields.stream)
    call.model = name
    terms = terms_of(call, priority=fields.priority, timeout=fields.timeout)
    cost = cost_of(
        NO_MODEL_INFO,
        prompt_bytes=len(body),
        prompt_tokens=0,
        num_prompts=num_prompts,
        width=width,
        max_tokens=max_tokens,
    )
    headers = forwarded_headers(call)
    relay = Relay(path=path, body=body, stream=stream, wants_usage=fields.wants_usage, headers=headers)
    return submit_relay(context, call, name, relay, terms, cost)


def submit_relay(context: Context, call: Call, name: str, relay: Relay, terms: Terms, cost: Cost) -> Stream:
    """Reserve a request's quota and put it into the queue of a model with remote replicas alone. Raises QuotaExceeded,
    and what the router raises."""
    reserve(context, call, name, prompt_tokens=cost.max_prompt, max_tokens=cost.max_answer)
    request = Request(
        id=call.response_id("relay"),
        model=name,
        priority=terms.priority,
        deadline_s=terms.deadline_s,
        first_byte_s=terms.first_byte_s,
        tenant=terms.tenant,
        weight=terms.weight,
        session=terms.session,
        region=terms.region,
        num_tokens=cost.expected,
        num_bytes=len(relay.body),
        arrived_at=call.started_at,
    )
    made = context.router.submit(request, relay)
    call.streams.append(made)
    return made


# -- the general path ----------------------------------------------------------------------------


def remote_model_of(context: Context, call: Call, body: bytes) -> str | None:
    """The name of the model that a body names, if that model has remote replicas alone; else None."""
    names = remote_models(context.config)
    if not names:
        return None
    name = _model_of(body)
    if name is None and len(context.config.models) == 1:
        (name,) = context.config.models
    if name is None:
        return None
    entry = entry_named(context.config.models, name) or name
    return entry if entry in names and may_use(context, call.principal, entry) else None


async def relay_request(context: Context, call: Call, name: str, path: str, body: bytes) -> Answer:
    """The answer to a completion for a model with remote replicas alone. Raises InferdError for every failure before
    the first byte."""
    fields: ChatFields | TextFields
    if path == CHAT:
        fields = await decode_body(body, chat_decoder)
    else:
        fields = await decode_body(body, text_decoder)
    stream = submit_completion(context, call, name, path, fields, body)
    return await _forwarded(call, stream, await anext(stream))


class _Named(msgspec.Struct, frozen=True):
    model: str | None = None


_named = msgspec.json.Decoder(_Named)


def _model_of(body: bytes) -> str | None:
    """The model that a body names. None: it names none, or it is not valid JSON."""
    try:
        return _named.decode(body).model
    except (ValueError, RecursionError):
        return None


async def relayed_answer(call: Call, model: ModelStatus, streams: list[Stream]) -> Answer | None:
    """The answer, if a remote server gives it. None: a local replica computes it, and ``streams`` still has all its
    items."""
    if not model.has_remote or len(streams) != 1:
        return None
    first = await anext(streams[0])
    if isinstance(first, Relayed):
        return await _forwarded(call, streams[0], first)
    streams[0] = PeekedStream(streams[0], first)
    return None


async def relayed_response(call: Call, stream: Stream) -> Answer:
    """The answer of a remote server to a submitted request. Raises the error of a request that failed before it."""
    return await _forwarded(call, stream, await anext(stream))


async def _forwarded(call: Call, stream: Stream, first: Item) -> Answer:
    """The relayed answer whose first item is ``first``. Raises the error of a request that failed before it."""
    head = first.head if isinstance(first, Relayed) else None
    if head is None:
        if first.end is not None:
            check_end(first.end)
        raise InternalError("The remote server's answer has no beginning.")
    assert isinstance(first, Relayed)
    if call.stream and head.status == 200:
        return EventStream(_frames(call, stream, first))
    pieces = [first.data]
    async for item in stream:
        if isinstance(item, Relayed):
            pieces.append(item.data)
    return Response(head.status, b"".join(pieces), head.content_type, (*head.headers, NOSNIFF))


async def _frames(call: Call, stream: Stream, first: Relayed) -> AsyncGenerator[bytes, None]:
    item: Item = first
    while True:
        if isinstance(item, Relayed) and item.data:
            yield item.data
        if item.end is not None:
            error = failure_of(item.end)
            if error is not None:
                yield error_frame(call, error)
            return
        item = await anext(stream)


class PeekedStream:
    """A stream whose first item was read and is returned again."""

    __slots__ = ("_first", "_stream", "attach", "close", "pause", "resume", "when_over")

    def __init__(self, stream: Stream, first: Item) -> None:
        self._stream = stream
        self._first: Item | None = first
        self.attach, self.close, self.pause, self.resume = stream.attach, stream.close, stream.pause, stream.resume
        self.when_over = stream.when_over

    @property
    def end(self) -> End | None:
        return self._stream.end

    def __aiter__(self) -> PeekedStream:
        return self

    async def __anext__(self) -> Item:
        first, self._first = self._first, None
        return first if first is not None else await anext(self._stream)


# -- without a task ------------------------------------------------------------------------------


class RelayForwarder:
    """Relays requests without a task. Is built anew for each configuration."""

    __slots__ = ("_context", "_handler", "_head_cache", "_max_body_bytes", "_names", "_origins", "_principal")

    def __init__(
        self,
        context: Context,
        origins: Origins,
        principal: Principal | None,
        handler: CallHandler,
        head_cache: HeadCache,
    ) -> None:
        self._context = context
        self._origins = origins
        self._principal = principal
        self._handler = handler
        self._head_cache = head_cache
        self._max_body_bytes = min(context.max_body_bytes, OFF_LOOP_BYTES)
        self._names = frozenset(
            name for name in remote_models(context.config) if not context.config.models[name].cache.enabled
        )

    def forward(self, exchange: Exchange) -> bool:
        """Relay a request for a completion, if it needs nothing special. False: the general path must serve it, and
        nothing was done."""
        path = _TARGETS.get(exchange.target)
        if path is None or not self._names or exchange.method != "POST":
            return False
        call = Call(exchange.scope(), exchange.receive, exchange.send, clock.now())
        if call.header(b"idempotency-key") is not None or call.header(b"prefer") is not None:
            return False
        if self._principal is not None:
            call.principal = self._principal
        else:
            try:
                authenticate(self._context.door, call, "infer")
                self._origins.check_host(call)
                call.common_headers = self._origins.check_origin(call, same_origin_only=False)
            except InferdError:
                return False  # the general path answers with this error
        body = exchange.whole_body()
        if len(body) > self._max_body_bytes or not (body.isascii() or is_utf8(body)):
            return False
        try:
            fields = chat_decoder.decode(body) if path == CHAT else text_decoder.decode(body)
        except (ValueError, RecursionError):
            return False
        name = fields.model
        if name not in self._names or may_repeat_keys(body):
            return False
        call.route = "/v1" + path
        call.request_bytes = len(body)
        writer = ResponseWriter(call, exchange, self._handler)
        try:
            require_json(call)
            if not call.principal.may_use(name):
                return False  # the general path answers that the model does not exist
            writer.stream = stream = submit_completion(self._context, call, name, path, fields, body)
        except InferdError as error:
            writer.refuse(error)
            return True
        except Exception:
            # A request boundary: a defect ends this request, and no other.
            _log.exception("request %s failed", call.request_id)
            writer.refuse(InternalError("The server met an internal error; the log has the details."))
            return True
        exchange.take_body()
        exchange.on_disconnect = writer.client_left
        exchange.on_writable = writer.set_writable
        stream.attach(writer)
        if self._head_cache.may_add(exchange):
            self._head_cache.add(exchange, call, CachedRelayHead(exchange, path))
        return True
