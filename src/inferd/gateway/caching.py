"""Answers from the response cache. Equal requests at the same time are computed once.

Only deterministic requests (greedy, or with a seed) of models with a cache are looked up. Knows which requests these
are. The cache computes keys and stores answers (``inferd.cache``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final, Literal, NamedTuple

import msgspec

from inferd import clock
from inferd.cache.key import cache_key
from inferd.cache.port import CachedAnswer, ResponseCache
from inferd.errors import DeadlineExceeded
from inferd.events import CacheLooked
from inferd.gateway.admission import reserve, terms_of
from inferd.gateway.call import EVENTS_HEADERS, STREAM_TYPES, Call, EventStream, Response
from inferd.gateway.context import Context
from inferd.gateway.generation.requests import ignored_header
from inferd.gateway.idempotency import stored_headers
from inferd.http.exchange import Headers
from inferd.types import IGNORED_HEADER

MAX_WAITS: Final = 3  # waits for another request's answer, before a request computes its own
_HIT: Final[Headers] = ((b"x-inferd-cache", b"hit"),)
_MISS: Final[Headers] = ((b"x-inferd-cache", b"miss"),)


class CacheInputs(NamedTuple):
    """The values of a request from which its cache key is computed, and whether its answer can be cached."""

    model: str
    fingerprint: str | None  # of the weights; None: not known yet
    body: bytes | msgspec.Struct
    form: bytes  # options that change the frames of a streamed answer
    stream: bool
    is_random: bool  # sampled without a seed: a repetition may have another answer
    timeout: float | None  # seconds
    is_exact: bool = False  # the key has the body's bytes, not its fields

    @property
    def has_all_fields(self) -> bool:
        """Whether the key has the fields without effect too, so that its requests have the same ones."""
        return isinstance(self.body, bytes)


async def cached_answer(context: Context, call: Call, inputs: CacheInputs, model: str) -> Response | None:
    """The cached answer; None: there is none, and the answer to this call will be cached if it is a complete success.

    A hit computes no tokens, so it costs one request of the quota and no tokens. Raises DeadlineExceeded.
    """
    config = context.caching_of(model)
    assert context.cache is not None, "asked for where there is a cache"
    directives = {part.strip().lower() for part in (call.header(b"cache-control") or b"").split(b",")}
    if inputs.fingerprint is None or (inputs.is_random and not config.any_temperature) or b"no-store" in directives:
        return None
    key = cache_key(
        call.principal.tenant,
        model,
        inputs.fingerprint,
        f"{call.route} {inputs.form.decode()}",
        inputs.body,
        stream=inputs.stream,
        is_exact=inputs.is_exact,
    )
    lookup = _Lookup(context, call, context.cache, key, model, config.ttl_s, keeps_ignored=inputs.has_all_fields)
    if b"no-cache" not in directives:
        kept = await lookup.find(terms_of(call, priority=None, timeout=inputs.timeout).deadline_s)
        if kept is not None:
            own = () if inputs.has_all_fields else ignored_header(call.ignored)
            return _hit(context, call, model, kept, own)
    lookup.begin()
    call.recorders = (lookup, *call.recorders)
    return None


def _hit(context: Context, call: Call, model: str, kept: CachedAnswer, own: Headers) -> Response:
    """``own``: the headers of this request's answer, beside those that are stored with the body."""
    reserve(context, call, model)
    streamed = EVENTS_HEADERS if kept.content_type in STREAM_TYPES else ()
    return Response(200, kept.body, kept.content_type, (*kept.headers, *_HIT, *own, *streamed))


class _Lookup:
    """The look-up and the storing of one request's answer."""

    __slots__ = ("_cache", "_call", "_context", "_flight", "_keeps_ignored", "_key", "_model", "_ttl_s")

    def __init__(
        self,
        context: Context,
        call: Call,
        cache: ResponseCache,
        key: bytes,
        model: str,
        ttl_s: float,
        *,
        keeps_ignored: bool,
    ) -> None:
        """``keeps_ignored``: all requests of the key have the ignored fields of this one."""
        self._context = context
        self._call = call
        self._cache = cache
        self._key = key
        self._model = model
        self._ttl_s = ttl_s
        self._keeps_ignored = keeps_ignored
        self._flight: asyncio.Future[CachedAnswer | None] | None = None  # equal requests wait for it

    async def find(self, deadline_s: float | None) -> CachedAnswer | None:
        """The answer, if it is cached or an equal request is computing it. Raises DeadlineExceeded."""
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

    def begin(self) -> None:
        """Announce that the answer is being computed, so that equal requests wait for it."""
        if self._key not in self._context.flights:
            self._flight = asyncio.get_running_loop().create_future()
            self._context.flights[self._key] = self._flight
            self._call.closers += (self._end_flight,)

    async def record(self, response: Response) -> Response:
        if response.status == 200 and not self._call.rescued_from:
            await self._store(response.content_type, response.body, response.headers)
        return Response(response.status, response.body, response.content_type, (*response.headers, *_MISS))

    def record_events(self, events: EventStream) -> EventStream:
        recorded = self._recorded(events)
        return EventStream(recorded, (*events.headers, *_MISS), events.ending, events.content_type)

    async def _recorded(self, events: EventStream) -> AsyncGenerator[bytes, None]:
        frames, ending = events.frames, events.ending
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
                    elif frame.endswith(ending) and not self._call.rescued_from:
                        await self._store(events.content_type, b"".join(recorded), events.headers)
                yield frame
        finally:
            await frames.aclose()

    async def _store(self, content_type: bytes, body: bytes, headers: Headers) -> None:
        usage = self._call.usage_so_far
        kept = [header for header in stored_headers(headers) if self._keeps_ignored or header[0] != IGNORED_HEADER]
        answer = CachedAnswer(
            content_type,
            body,
            usage.prompt_tokens if usage is not None else 0,
            usage.completion_tokens if usage is not None else 0,
            tuple(kept),
        )
        self._end_flight(answer)
        if len(body) <= self._context.config.cache.max_entry_bytes:
            await self._cache.put(self._key, answer, self._ttl_s)
            self._emit_event("store", len(body))

    def _end_flight(self, answer: CachedAnswer | None = None) -> None:
        """Wake the requests that wait for this answer. Idempotent."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._context.flights.pop(self._key, None)
            flight.set_result(answer)

    def _emit_event(self, result: Literal["hit", "miss", "store"], num_bytes: int) -> None:
        self._context.emit(CacheLooked(model=self._model, result=result, bytes=num_bytes))
