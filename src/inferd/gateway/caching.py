"""Answers that were computed before: looked up, kept, and computed once for all who ask at the same time.

Only requests whose answer is decided by what they ask (greedy, or with a seed) of models that say so.
Knows which requests these are; what a key is made of and where answers lie is the cache's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET

from inferd import clock
from inferd.cache.key import cache_key
from inferd.cache.port import CachedAnswer, ResponseCache
from inferd.errors import DeadlineExceeded
from inferd.events import CacheLooked
from inferd.gateway.admission import reserve, terms_of
from inferd.gateway.call import DONE, EVENTS_HEADERS, EVENTS_TYPE, Answer, Call, EventStream, Response
from inferd.gateway.context import Context
from inferd.gateway.decode import decode
from inferd.gateway.generation import ignored_header
from inferd.gateway.idempotency import stored_headers
from inferd.gateway.openai.wire import IGNORED, GenerationFields
from inferd.gateway.upstream import ModelStatus
from inferd.http.asgi import Headers
from inferd.types import SamplingParams

MAX_WAITS: Final = 3  # for others' computing, before a request computes for itself
_HIT: Final[Headers] = ((b"x-inferd-cache", b"hit"),)
_MISS: Final[Headers] = ((b"x-inferd-cache", b"miss"),)

Compute = Callable[[], Awaitable[Answer]]


class CacheInputs(NamedTuple):
    """What decides an answer, and whether it is decided at all."""

    model: str
    fingerprint: str | None  # of the weights; None: not known yet
    body: bytes | msgspec.Struct
    form: bytes  # of a streamed answer: which frames there are
    stream: bool
    is_random: bool  # at random: asked again, it may be another
    timeout: float | None
    is_exact: bool = False  # the body is not looked into


def cache_inputs(body: GenerationFields, model: ModelStatus, sampling: SamplingParams) -> CacheInputs:
    """Requests that differ in what does not change the answer ask the same. A temperature that is not
    given is the model's choice, which may be to draw."""
    neutral = dict.fromkeys(IGNORED[type(body)], UNSET)
    streamed = bool(body.stream) and body.stream_options is not None
    return CacheInputs(
        model.name,
        model.info.fingerprint if model.info is not None else None,
        msgspec.structs.replace(body, model=None, request_id=None, **neutral),
        msgspec.json.encode(body.stream_options) if streamed else b"",
        bool(body.stream),
        sampling.temperature != 0 and sampling.seed is None,
        body.timeout,
    )


class _RelayedFields(msgspec.Struct, frozen=True):
    stream: bool | None = None
    stream_options: msgspec.Raw = msgspec.Raw()
    temperature: float | None = None
    seed: int | None = None
    timeout: float | None = None


_relayed: Final = msgspec.json.Decoder(_RelayedFields)


def relay_cache_inputs(context: Context, name: str, body: bytes) -> CacheInputs:
    """Likewise for a model that runs elsewhere: its servers stand for its weights. Raises InvalidRequest."""
    fields = decode(body, _relayed)
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


async def get_or_compute(
    context: Context, call: Call, read_inputs: Callable[[], CacheInputs], model: str, compute: Compute
) -> Answer:
    """A kept answer, or what ``compute`` answers, which is then kept. A hit computes no tokens, and so
    costs one request of the quota and none of its tokens."""
    config = context.caching_of(model)
    if context.cache is None or not config.enabled:
        return await compute()
    inputs = read_inputs()
    directives = {part.strip().lower() for part in (call.header(b"cache-control") or b"").split(b",")}
    if inputs.fingerprint is None or (inputs.is_random and not config.any_temperature) or b"no-store" in directives:
        return await compute()
    key = cache_key(
        call.principal.tenant,
        model,
        inputs.fingerprint,
        f"{call.route} {inputs.form.decode()}",
        inputs.body,
        stream=inputs.stream,
        is_exact=inputs.is_exact,
    )
    lookup = _Lookup(context, call, context.cache, key, model, config.ttl_s)
    if b"no-cache" not in directives:
        kept = await lookup.find(terms_of(call, priority=None, timeout=inputs.timeout).deadline_s)
        if kept is not None:
            return _hit(context, call, model, kept)
    return await lookup.compute(compute)


def _hit(context: Context, call: Call, model: str, kept: CachedAnswer) -> Response:
    reserve(context, call, model)
    streamed = EVENTS_HEADERS if kept.content_type == EVENTS_TYPE else ()
    return Response(200, kept.body, kept.content_type, (*kept.headers, *_HIT, *ignored_header(call.ignored), *streamed))


class _Lookup:
    """One request's dealings with the cache."""

    __slots__ = ("_cache", "_call", "_context", "_flight", "_key", "_model", "_ttl_s")

    def __init__(
        self, context: Context, call: Call, cache: ResponseCache, key: bytes, model: str, ttl_s: float
    ) -> None:
        self._context = context
        self._call = call
        self._cache = cache
        self._key = key
        self._model = model
        self._ttl_s = ttl_s
        self._flight: asyncio.Future[CachedAnswer | None] | None = None  # who asks the same waits for it

    async def find(self, deadline_s: float | None) -> CachedAnswer | None:
        """The answer, if there is one or somebody is computing it. Raises DeadlineExceeded."""
        for _ in range(MAX_WAITS):
            kept = await self._cache.get(self._key)
            if kept is None:
                flight = self._context.flights.get(self._key)
                if flight is None:
                    break
                kept = await self._wait(flight, deadline_s)
            if kept is not None:
                self._emit_event("hit", len(kept.body))
                return kept
        self._emit_event("miss", 0)
        return None

    async def _wait(self, flight: asyncio.Future[CachedAnswer | None], deadline_s: float | None) -> CachedAnswer | None:
        left_s = None if deadline_s is None else deadline_s - (clock.now() - self._call.started_at)
        done, _ = await asyncio.wait((flight,), timeout=left_s)
        if not done:
            raise DeadlineExceeded("The deadline passed while the same request of another client was computed.")
        return flight.result()

    async def compute(self, compute: Compute) -> Answer:
        """Compute, and keep what comes of it."""
        if self._key not in self._context.flights:
            self._flight = asyncio.get_running_loop().create_future()
            self._context.flights[self._key] = self._flight
            self._call.closers.append(self._end_flight)
        answer = await compute()
        if isinstance(answer, EventStream):
            return EventStream(self._recorded(answer.frames), (*answer.headers, *_MISS))
        if answer.status == 200:
            await self._store(answer.content_type, answer.body, stored_headers(answer.headers))
        return Response(answer.status, answer.body, answer.content_type, (*answer.headers, *_MISS))

    async def _recorded(self, frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        recorded: list[bytes] | None = []
        num_bytes = 0
        limit = self._context.config.cache.max_entry_bytes
        try:
            async for frame in frames:
                if recorded is not None:
                    recorded.append(frame)
                    num_bytes += len(frame)
                    if num_bytes > limit:
                        recorded = None
                        self._end_flight()
                    elif frame.endswith(DONE):
                        await self._store(EVENTS_TYPE, b"".join(recorded))
                yield frame
        finally:
            await frames.aclose()

    async def _store(self, content_type: bytes, body: bytes, headers: Headers = ()) -> None:
        usage = self._call.usage_so_far
        answer = CachedAnswer(
            content_type,
            body,
            usage.prompt_tokens if usage is not None else 0,
            usage.completion_tokens if usage is not None else 0,
            headers,
        )
        self._end_flight(answer)
        if len(body) <= self._context.config.cache.max_entry_bytes:
            await self._cache.put(self._key, answer, self._ttl_s)
            self._emit_event("store", len(body))

    def _end_flight(self, answer: CachedAnswer | None = None) -> None:
        """Nobody waits any longer. Idempotent."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._context.flights.pop(self._key, None)
            flight.set_result(answer)

    def _emit_event(self, result: Literal["hit", "miss", "store"], num_bytes: int) -> None:
        self._context.emit(CacheLooked(model=self._model, result=result, bytes=num_bytes))
