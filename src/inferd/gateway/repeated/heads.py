"""The cache of request heads, and the client's side of requests on the direct path.

A client that keeps its connection sends the same head with every request. The general path checks a head once: its
route, its key, and that no header needs special handling. The result is cached under the bytes of the head. Of a
request with a cached head only the body is read, and the request is sent to a replica without a queue
(``inferd.router.direct_relay`` and ``direct_prediction``). A request that needs more is left to the general path before
it has any effect, or is converted into the objects of the general path.
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
"""Heads in one cache."""

CLOSE_LINE: Final = b"connection: close\r\n"

_CACHEABLE_HEADERS: Final = frozenset(
    (
        *(b"host", b"user-agent", b"accept", b"accept-encoding", b"accept-language", b"connection"),
        *(b"content-type", b"content-length", b"authorization", b"x-api-key", b"inference-header-content-length"),
    )
)
_CACHEABLE_PREFIX: Final = b"x-stainless-"  # OpenAI's clients describe their version and system


class CachedHead(ABC):
    """The result of the general path for a head. A subclass serves the requests of one kind of route."""

    __slots__ = ("headers", "route", "sdk_timeout_s", "target", "token")

    def __init__(self, exchange: Exchange, route: str) -> None:
        self.target = exchange.target
        self.headers = exchange.headers  # with the Content-Length of the first such request
        self.route = route
        self.sdk_timeout_s = sdk_timeout(dict(reversed(exchange.headers)).get)
        self.token: str | None = None

    @abstractmethod
    def serve(self, head_cache: HeadCache, client: Connection, body: bytes) -> bool:
        """Serve a request with this head; False: the general path has to serve it, and there was no effect."""


class HeadCache:
    """The cached heads, and the requests that begin with one of them. Made anew with each configuration."""

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
        """Whether a head can be cached: it arrived in one piece, has only common headers, and is not cached yet."""
        head = exchange.raw_head
        if not head or pattern_of(head, len(head))[0] in self._heads:
            return False
        names = [name for name, _ in exchange.headers]
        for name in names:
            if name not in _CACHEABLE_HEADERS and not name.startswith(_CACHEABLE_PREFIX):
                return False
        return exchange.keep_alive and len(set(names)) == len(names) and is_exact(head)

    def add(self, exchange: Exchange, call: Call, cached_head: CachedHead) -> None:
        """Cache a head that ``may_add`` allows, of a request that the general path has admitted."""
        if call.common_headers:
            return  # a request of a web page: the answer's headers depend on its origin
        if len(self._heads) >= MAX_HEADS:
            self._heads.clear()
        if self._principal is None:
            cached_head.token = token_of(call)
        pattern, _ = pattern_of(exchange.raw_head, len(exchange.raw_head))
        self._heads[pattern] = cached_head

    def serve(self, client: Connection, data: bytes) -> bool:
        """Serve a request that was read from an idle connection; False: the general path has to serve it.

        ``data`` is everything that was read. Only a complete request, and nothing behind it, is served.
        """
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
        """The principal of a request; None: the general path has to check the key, the scope or the region.

        The caller reads the body after this, so that a request without a valid key costs no decoding.
        """
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
    """The client's side of a request on the direct path. The class of the object declares the slots."""

    if not TYPE_CHECKING:  # type checkers want the attributes below in the slots
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
        """Set the attributes of a request that arrives at ``now``, in place of a constructor."""
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
        """The header lines with the rest of the quotas; empty where the request has none."""
        assert self.permit is not None, "it was admitted"
        headers = self.permit.headers()
        return b"".join([b"%b: %b\r\n" % header for header in headers]) if headers else b""

    def finish(self, model: str, end: End, *, is_stream: bool = False) -> None:
        """The answer was written: free the connection for the next request, settle the quotas and emit the event."""
        self.is_started = True
        self.client.exchange_over(self)
        self.settle(model, end, is_stream=is_stream)

    def settle(self, model: str, end: End, *, is_stream: bool = False) -> None:
        """Settle the quotas of an answered request and emit its ``HttpServed``."""
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
        """Answer with an error, before the request is sent to a replica."""
        exchange, call = self.as_call(model)
        ResponseWriter(call, exchange, self.head_cache.handler).refuse(error)

    def attach_stream(self, stream: Stream, model: str, *, is_stream: bool = False) -> None:
        """Continue on the general path: the rest of the answer comes from ``stream``."""
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
        """The exchange and the call with which the general path would serve this request."""
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
