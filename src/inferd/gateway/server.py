"""The ASGI application that serves all HTTP routes.

Every request gets an answer, a request id and one HttpServed event. Exceptions become error bodies in this module
and nowhere else.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable

from inferd import clock
from inferd.cache.port import ResponseCache
from inferd.config import Config, ServerConfig
from inferd.errors import InferdError, InternalError
from inferd.events import Emit
from inferd.gateway.admin.openapi import openapi_document
from inferd.gateway.admission import authenticate
from inferd.gateway.background import Background, prefers_async, refuse_stream
from inferd.gateway.call import (
    Answer,
    Call,
    ClientLeft,
    EventStream,
    Response,
    Switched,
    read_body,
    require_json,
    send_events,
    send_response,
    served_event,
)
from inferd.gateway.context import Context, no_tally
from inferd.gateway.control import ControlActions
from inferd.gateway.errors import (
    KSERVE_ERRORS,
    MethodNotAllowed,
    RouteNotFound,
    error_headers,
    kind_of,
    printable,
)
from inferd.gateway.generation import error_frame
from inferd.gateway.kserve import rest as v2
from inferd.gateway.origin import Origins
from inferd.gateway.relay import RelayForwarder
from inferd.gateway.repeated.heads import HeadCache
from inferd.gateway.repeated.infer import CachedInferHead
from inferd.gateway.response_writer import ResponseWriter
from inferd.gateway.route import Match, RouteTable
from inferd.gateway.routes import ROUTES
from inferd.gateway.upstream import Upstream
from inferd.http.asgi import Receive, Scope, Send
from inferd.http.connection import Connection
from inferd.http.exchange import Exchange
from inferd.observe.statistics import ModelTally
from inferd.tenancy.idempotency import IdempotencyStore
from inferd.tenancy.principal import Door, OpenDoor, Principal
from inferd.tenancy.principal import Scope as KeyScope

_log = logging.getLogger("inferd.gateway")


class Gateway:
    """The ASGI application. Its only state between requests is the ``Context`` and what is derived from it.

    ``principal``: the principal of every request, for the control socket, which web pages cannot reach. None: each
    request is authenticated.
    """

    __slots__ = ("_context", "_forwarder", "_head_cache", "_origins", "_principal", "_scope_of_metrics", "_table")

    def __init__(self, context: Context, principal: Principal | None) -> None:
        self._principal = principal
        self._table = RouteTable(ROUTES)
        self._use(context)

    def configure(self, config: Config) -> None:
        """Use another configuration from the next request on."""
        self._use(self._context._replace(config=config))

    def _use(self, context: Context) -> None:
        self._context = context
        self._origins = Origins(context.config.server)
        self._scope_of_metrics: KeyScope = "public" if context.config.server.public_metrics else "metrics"
        self._head_cache = HeadCache(context, self._principal, self)
        self._forwarder = RelayForwarder(context, self._origins, self._principal, self, self._head_cache)

    @property
    def context(self) -> Context:
        """The current context. A reload replaces it."""
        return self._context

    def forward(self, exchange: Exchange) -> bool:
        """Serve a whole request without a task, if it is of a kind that can be (``Relays``)."""
        if self._forwarder.forward(exchange):
            return True
        if exchange.target.startswith(b"/v2/models/") and self._head_cache.may_add(exchange):
            self._learn(exchange)
        return False

    def refuse(self, exchange: Exchange, error: InferdError) -> None:
        """Answer a request with ``error`` before it was dispatched: its body cannot be read to the end."""
        call = Call(exchange.scope(), exchange.receive, exchange.send, clock.now())
        match = self._table.find(call.path)
        if match is not None:
            call.route, call.errors = match.pattern, match.errors
        ResponseWriter(call, exchange, self).refuse(error)

    def _learn(self, exchange: Exchange) -> None:
        """Cache the head if the next infer request with it may take the direct path. The checks of the general path
        are made here, once for each head."""
        call = Call(exchange.scope(), exchange.receive, exchange.send, clock.now())
        match = self._table.find(call.path)
        if match is None or call.method != "POST" or not match.pattern.endswith("/infer") or b"?" in exchange.target:
            return
        call.route = match.pattern
        try:
            if self._principal is None:
                authenticate(self._context.door, call, "infer")
                self._origins.check_host(call)
                call.common_headers = self._origins.check_origin(call, same_origin_only=False)
            else:
                call.principal = self._principal
            v2.check_media(call, is_binary=v2.header_length(call) >= 0)
            served = v2.served_of(self._context, call, match.rest)
            if self._context.cache is not None and self._context.caching_of(served.status.name).enabled:
                return  # its answers may be there already
            self._head_cache.add(exchange, call, CachedInferHead(exchange, call, served))
        except InferdError:
            return  # the general path reports the error

    def serve_direct(self, client: Connection, data: bytes) -> bool:
        """Serve what has just been read, if it is a complete request with a cached head (``HeadCache``)."""
        return self._head_cache.serve(client, data)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"The gateway serves HTTP, not {scope['type']}.")
        call = Call(scope, receive, send, clock.now())
        try:
            await self._serve(call)
        except ClientLeft:
            call.client_left = True
        except asyncio.CancelledError:
            if not call.client_left:
                raise
            task = asyncio.current_task()
            assert task is not None, "only a task can be cancelled"
            task.uncancel()
        finally:
            self.close(call)

    def close(self, call: Call) -> None:
        """End a call. Its HttpServed event is emitted when all its streams have ended and its usage is known."""
        call.finish(self._emit_served)

    def _emit_served(self, call: Call) -> None:
        self._context.emit(served_event(call, clock.now()))

    async def _serve(self, call: Call) -> None:
        begun = False
        try:
            answer = await self._answer(call)
            if isinstance(answer, EventStream):
                begun = True
                await send_events(call, answer)
            elif isinstance(answer, Switched):
                call.status = 101
            else:
                await send_response(call, answer)
        except InferdError as error:
            await send_response(call, self.error_response(call, error))
        except ClientLeft:
            raise
        except Exception:
            # The request boundary: a defect ends this request, and no other.
            _log.exception("request %s failed", call.request_id)
            defect = InternalError("The server met an internal error; the log has the details.")
            if begun:
                await call.send({"type": "http.response.body", "body": error_frame(call, defect), "more_body": False})
            elif call.status == 0:
                await send_response(call, self.error_response(call, defect))

    async def _answer(self, call: Call) -> Answer | Switched:
        if call.method == "OPTIONS" and call.path == "*":
            return Response(204, headers=((b"allow", b"GET, HEAD, POST, DELETE, OPTIONS"),))
        match = self._table.find(call.path)
        if match is None:
            if call.path.startswith("/v2/"):
                call.errors = KSERVE_ERRORS
            raise RouteNotFound(f"There is nothing at {printable(call.path, 200)!r}; /docs lists what there is.")
        call.route = match.pattern
        call.errors = match.errors
        route = match.by_method.get("GET" if call.method == "HEAD" else call.method)
        scope = self._scope_of_metrics if match.pattern == "/metrics" else match.scope if route is None else route.scope
        if self._principal is not None:
            call.principal = self._principal
        elif scope != "public":
            if call.method == "OPTIONS" and scope != "admin":
                self._origins.check_host(call)
                headers = self._origins.preflight(call, match.allow)
                if headers is not None:
                    return Response(204, headers=headers)
            call.common_headers = self._origins.cors_headers(call, same_origin_only=scope == "admin")
            authenticate(self._context.door, call, scope)
            self._origins.check_host(call)
            self._origins.check_origin(call, same_origin_only=scope == "admin")
        if call.method == "OPTIONS":
            return Response(204, headers=((b"allow", match.allow.encode("ascii")),))
        if route is None:
            raise _not_allowed(call, match)
        if route.method == "POST" and route.scope == "infer" and prefers_async(call):
            return await self._begin_async(call)
        return await route.endpoint(self._context, call, match.rest)

    async def _begin_async(self, call: Call) -> Response:
        """Answer with the handle of a background request, which repeats this request without a waiting client."""
        require_json(call)
        body = await read_body(call, self._context.max_body_bytes, self._context.body_timeout_s)
        refuse_stream(body)
        return self._context.background.start(self, call, body)

    def error_response(self, call: Call, error: InferdError) -> Response:
        call.note_error(error)
        status = kind_of(error).status
        headers = error_headers(error)
        if status == 503 and self._context.router.draining:
            headers = (*headers, (b"connection", b"close"))
        return Response(status, call.errors.encode(error), headers=headers)


def _not_allowed(call: Call, match: Match) -> MethodNotAllowed:
    return MethodNotAllowed(
        f"{match.pattern} does not allow {printable(call.method)}; use {match.allow}.", allow=match.allow
    )


_openapi = functools.cache(openapi_document)


def _no_metrics() -> bytes:
    return b""


def create_app(
    router: Upstream,
    config: Config | ServerConfig,
    emit: Emit,
    *,
    metrics: Callable[[], bytes] = _no_metrics,
    door: Door | None = None,
    cache: ResponseCache | None = None,
    idempotency: IdempotencyStore | None = None,
    control: ControlActions | None = None,
    principal: Principal | None = None,
    tally_of: Callable[[str], ModelTally] = no_tally,
) -> Gateway:
    """The ASGI application in front of ``router``; ``metrics`` renders Prometheus' text format.

    ``tally_of`` returns a model's statistics. Without a ``door`` every request is allowed. With a ``principal`` every
    request has that principal and no key is checked.
    """
    if isinstance(config, ServerConfig):
        config = Config(server=config, models={})
    door = door if door is not None else OpenDoor()
    context = Context(
        router, config, door, emit, metrics, _openapi, control, idempotency, cache, {}, Background(), tally_of
    )
    return Gateway(context, principal)
