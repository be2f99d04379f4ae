"""The front door: one ASGI application, and uvicorn around it.

Everything that comes in gets an answer, a request id and one HttpServed event; what goes wrong on the
way becomes an error body here and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import cache

from inferd import clock
from inferd.config import ServerConfig
from inferd.errors import InferdError, InternalError
from inferd.events import Emit, HttpServed
from inferd.gateway.errors import (
    CLIENT_LEFT,
    MethodNotAllowed,
    RouteNotFound,
    error_body,
    error_headers,
    kind_of,
    printable,
)
from inferd.gateway.generation import error_frame, note_end
from inferd.gateway.http import (
    Call,
    ClientLeft,
    EventStream,
    Receive,
    Response,
    Scope,
    Send,
    send_events,
    send_response,
)
from inferd.gateway.openapi import openapi_document
from inferd.gateway.routes import Room, RouteTable
from inferd.gateway.upstream import Upstream

LAST_WORDS_S = 1.0  # for a cancelled request to say how far it came

_log = logging.getLogger("inferd.gateway")


class Gateway:
    """The ASGI application. Keeps nothing between requests but the table of routes."""

    __slots__ = ("_emit", "_room", "_router", "_table")

    def __init__(self, router: Upstream, config: ServerConfig, emit: Emit, metrics: Callable[[], bytes]) -> None:
        self._router = router
        self._emit = emit
        self._table = RouteTable()
        self._room = Room(router, config.max_body_bytes, metrics, cache(openapi_document))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"The gateway serves HTTP, not {scope['type']}.")
        call = Call(scope, receive, send, clock.now())
        try:
            await self._serve(call)
        except ClientLeft:
            call.gone = True
            await _hear_ends(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not call.gone or task is None:
                raise
            task.uncancel()
            await _hear_ends(call)
        finally:
            call.finish()
            self._emit(_served(call, clock.now()))

    async def _serve(self, call: Call) -> None:
        begun = False
        try:
            answer = await self._answer(call)
            if isinstance(answer, EventStream):
                begun = True
                await send_events(call, answer)
            else:
                await send_response(call, answer)
        except InferdError as error:
            await send_response(call, self._error(call, error))
        except ClientLeft:
            raise
        except Exception:
            # The request boundary: a defect ends this request, and no other.
            _log.exception("request %s failed", call.request_id)
            defect = InternalError("The server met an internal error; the log has the details.")
            if begun:
                await call.send({"type": "http.response.body", "body": error_frame(call, defect), "more_body": False})
            elif call.status == 0:
                await send_response(call, self._error(call, defect))

    async def _answer(self, call: Call) -> Response | EventStream:
        if call.method == "OPTIONS" and call.path == "*":
            return Response(204, headers=((b"allow", b"GET, HEAD, POST, OPTIONS"),))
        match = self._table.find(call.path)
        if match is None:
            raise RouteNotFound(f"There is nothing at {printable(call.path, 200)!r}; /docs lists what there is.")
        call.route = match.pattern
        if call.method == "OPTIONS":
            return Response(204, headers=((b"allow", match.allow.encode("ascii")),))
        route = match.by_method.get("GET" if call.method == "HEAD" else call.method)
        if route is None:
            raise MethodNotAllowed(
                f"{match.pattern} does not allow {printable(call.method)}; use {match.allow}.", allow=match.allow
            )
        return await route.endpoint(self._room, call, match.rest)

    def _error(self, call: Call, error: InferdError) -> Response:
        call.error_code = error.code
        status = kind_of(error).status
        headers = error_headers(error)
        if status == 503 and self._router.draining:
            headers = (*headers, (b"connection", b"close"))
        return Response(status, error_body(error), headers=headers)


async def _hear_ends(call: Call) -> None:
    """The client left; what its requests had cost by then still belongs into the log."""
    call.close_streams()
    with contextlib.suppress(TimeoutError, InferdError):
        async with asyncio.timeout(LAST_WORDS_S):
            for stream in call.streams:
                async for output in stream:
                    if output.end is not None:
                        note_end(call, output.end)


def _served(call: Call, now: float) -> HttpServed:
    return HttpServed(
        request_id=call.request_id,
        method=printable(call.method, 16),
        route=call.route,
        status=CLIENT_LEFT if call.gone else call.status or 500,
        duration_s=now - call.started_at,
        request_bytes=call.request_bytes,
        response_bytes=call.response_bytes,
        model=call.model,
        stream=call.stream,
        outcome="cancelled" if call.gone and call.streams and call.outcome is None else call.outcome,
        finish_reasons=call.finish_reasons,
        error_code=call.error_code,
        usage=call.usage,
        timings=call.timings,
    )


def _no_metrics() -> bytes:
    return b""


def create_app(
    router: Upstream, config: ServerConfig, emit: Emit, *, metrics: Callable[[], bytes] = _no_metrics
) -> Gateway:
    """The ASGI application in front of ``router``; ``metrics`` renders Prometheus' text format."""
    return Gateway(router, config, emit, metrics)
