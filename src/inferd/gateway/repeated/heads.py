"""The direct path through the gateway, for requests that begin like one before.

A client that keeps its connection writes the same head again and again, and what follows from a head alone (the
path, whose key it names, that nothing about it is special) is found once, by the general path, and remembered under its
bytes. Of a request with a familiar head only the body is looked at; where everything is as usual it goes straight
to where it is computed and its answer straight back (``inferd.router.direct_relay`` and ``errand``). Whatever is not as
usual is left to the general path, before anything has happened, or is turned into what the general path would have
made of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from inferd import clock
from inferd.errors import InferdError
from inferd.events import HttpServed
from inferd.gateway.admission import sdk_timeout, token_of
from inferd.gateway.call import Call, fresh_id
from inferd.gateway.context import Context
from inferd.gateway.errors import OPENAI_ERRORS, ErrorShape
from inferd.gateway.relay_fields import remote_models
from inferd.gateway.response_writer import CallHandler, ResponseWriter
from inferd.http.exchange import Exchange
from inferd.remote.head_pattern import is_exact, pattern_of
from inferd.tenancy.principal import Permit, Principal
from inferd.types import End

if TYPE_CHECKING:
    from inferd.http.connection import Connection
    from inferd.router.stream import Stream

MAX_HEADS: Final = 1024
"""Heads that are remembered."""

CLOSE_LINE: Final = b"connection: close\r\n"

_CACHEABLE_HEADERS: Final = frozenset(
    (
        *(b"host", b"user-agent", b"accept", b"accept-encoding", b"accept-language", b"connection"),
        *(b"content-type", b"content-length", b"authorization", b"x-api-key", b"inference-header-content-length"),
    )
)
_CACHEABLE_PREFIX: Final = b"x-stainless-"  # OpenAI's clients describe themselves


class CachedHead(ABC):
    """What a head stands for that the general path has read and found usual."""

    __slots__ = ("headers", "route", "sdk_timeout_s", "target", "token")

    def __init__(self, exchange: Exchange, route: str) -> None:
        self.target = exchange.target
        self.headers = exchange.headers  # their Content-Length is that of the first such request
        self.route = route
        self.sdk_timeout_s = sdk_timeout(dict(reversed(exchange.headers)).get)
        self.token: str | None = None

    @abstractmethod
    def serve(self, head_cache: HeadCache, client: Connection, body: bytes) -> bool:
        """Serve a request with this head; False: it is the general path's, and nothing has happened."""


class HeadCache:
    """Takes what it can. Made anew with each configuration."""

    __slots__ = ("_heads", "_max_body_bytes", "_principal", "context", "handler", "relayed_models")

    def __init__(self, context: Context, principal: Principal | None, handler: CallHandler) -> None:
        self.context = context
        self.handler = handler
        self._principal = principal
        self._max_body_bytes = context.max_body_bytes
        self._heads: dict[bytes, CachedHead] = {}
        self.relayed_models = frozenset(  # of models behind remote servers alone
            name for name in remote_models(context.config) if not context.config.models[name].cache.enabled
        )

    def may_add(self, exchange: Exchange) -> bool:
        """Whether the head came in one piece, is usual, and is not remembered yet."""
        head = exchange.raw_head
        if not head or pattern_of(head, len(head))[0] in self._heads:
            return False
        names = [name for name, _ in exchange.headers]
        for name in names:
            if name not in _CACHEABLE_HEADERS and not name.startswith(_CACHEABLE_PREFIX):
                return False
        return exchange.keep_alive and len(set(names)) == len(names) and is_exact(head)

    def add(self, exchange: Exchange, call: Call, cached_head: CachedHead) -> None:
        """Remember a head that ``may_add`` allows, of a request that the general path has admitted."""
        if call.common_headers:
            return  # a page's request: what it is told depends on its origin
        if len(self._heads) >= MAX_HEADS:
            self._heads.clear()
        if self._principal is None:
            cached_head.token = token_of(call)
        pattern, _ = pattern_of(exchange.raw_head, len(exchange.raw_head))
        self._heads[pattern] = cached_head

    def serve(self, client: Connection, data: bytes) -> bool:
        """Serve what was read from a client with nothing under way; False: it is the general path's."""
        end = data.find(b"\r\n\r\n")
        pattern, digits = pattern_of(data, end)
        cached_head = self._heads.get(pattern)
        if cached_head is None or not digits.isdigit() or client.is_stopping:
            return False
        length = int(digits)
        if length != len(data) - end - 4 or length > self._max_body_bytes:
            return False
        return cached_head.serve(self, client, data[end + 4 :])

    def principal_of(self, cached_head: CachedHead) -> Principal | None:
        """The principal of a request, if nothing about it is special. The body is read after the principal is cached_head."""
        principal = self._principal
        if principal is None:
            try:
                principal = self.context.door.authenticate(cached_head.token)
            except InferdError:
                return None
        if principal.region or "infer" not in principal.scopes:
            return None
        return principal


class DirectExchange(ABC):
    """The client's side of a request on the direct path: in an object's slots, which its class names."""

    if not TYPE_CHECKING:  # a checker would have the names here
        __slots__ = ()

    is_body_complete = True
    errors: ErrorShape = OPENAI_ERRORS  # of the dialect

    body: bytes
    client: Connection
    is_disconnected: bool
    is_started: bool
    keep_alive: bool
    cached_head: CachedHead
    head_cache: HeadCache
    permit: Permit | None
    principal: Principal
    response_bytes: int
    started_at: float
    unique: str

    @abstractmethod
    def disconnected(self) -> None: ...
    @abstractmethod
    def writable_changed(self, is_writable: bool) -> None: ...

    def begin(
        self,
        head_cache: HeadCache,
        client: Connection,
        cached_head: CachedHead,
        body: bytes,
        principal: Principal,
        now: float,
    ) -> None:
        self.head_cache = head_cache
        self.client = client
        self.cached_head = cached_head
        self.body = body
        self.principal = principal
        self.started_at = now
        self.unique = fresh_id()
        self.permit = None
        self.is_disconnected = self.is_started = False
        self.keep_alive = True
        self.response_bytes = 0

    def quota_lines(self) -> bytes:
        """The lines that tell what is left of the quotas."""
        assert self.permit is not None, "it was admitted"
        headers = self.permit.headers()
        return b"".join([b"%b: %b\r\n" % header for header in headers]) if headers else b""

    def finish(self, model: str, end: End, *, is_stream: bool = False) -> None:
        """All is said and well: on to the client's next request, settle and tell."""
        self.is_started = True
        self.client.exchange_over(self)
        self.settle(model, end, is_stream=is_stream)

    def settle(self, model: str, end: End, *, is_stream: bool = False) -> None:
        """It is answered: what that cost, and that it was so."""
        permit = self.permit
        assert permit is not None, "it was admitted"
        permit.settle(end.usage, "done")
        principal = self.principal
        self.head_cache.context.emit(
            HttpServed(
                request_id=self.unique,
                method="POST",
                route=self.cached_head.route,
                status=200,
                duration_s=clock.now() - self.started_at,
                request_bytes=len(self.body),
                response_bytes=self.response_bytes,
                model=model,
                tenant=principal.tenant,
                key_id=principal.key_id,
                stream=is_stream,
                outcome="done",
                usage=end.usage,
                timings=end.timings,
            )
        )

    # -- the general path -------------------------------------------------------------------

    def refuse(self, error: InferdError, model: str) -> None:
        """It is not even sent."""
        exchange, call = self.as_call(model)
        ResponseWriter(call, exchange, self.head_cache.handler).refuse(error)

    def attach_stream(self, stream: Stream, model: str, *, is_stream: bool = False) -> None:
        """From now on ``stream`` says what happens."""
        exchange, call = self.as_call(model)
        call.stream = is_stream
        writer = ResponseWriter(call, exchange, self.head_cache.handler)
        writer.stream = stream
        call.streams.append(stream)
        if self.is_started:
            call.status = 200
            call.response_bytes = self.response_bytes
            exchange.continue_chunked()
            writer.mark_begun()
        exchange.on_disconnect = writer.client_left
        exchange.on_writable = writer.set_writable
        stream.attach(writer)
        if self.is_disconnected:
            exchange.disconnected()
        elif not self.client.is_writable:
            stream.pause()

    def as_call(self, model: str) -> tuple[Exchange, Call]:
        cached_head, client = self.cached_head, self.client
        exchange = Exchange(client, "POST", cached_head.target, cached_head.headers, "1.1", keep_alive=self.keep_alive)
        exchange.end_body()
        exchange.take_body()
        if not self.is_disconnected:
            client.serve(exchange)
        call = Call(exchange.scope(), exchange.receive, exchange.send, self.started_at)
        call.unique = call.request_id = self.unique
        call.principal = self.principal
        call.permit = self.permit
        call.route = cached_head.route
        call.request_bytes = len(self.body)
        call.model = model
        call.errors = self.errors
        return exchange, call
