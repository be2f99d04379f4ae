"""Serves all HTTP routes: finds the route, checks the key, calls the endpoint and sends the answer.

Every request gets an answer, a request id and one HttpServed event. Exceptions become error bodies in this module
and nowhere else.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from inferd import clock
from inferd.cache.port import ResponseCache
from inferd.config import Config, ServerConfig
from inferd.eager import in_task, run_eagerly
from inferd.errors import Forbidden, InferdError, InternalError, Unauthenticated
from inferd.events import Emit
from inferd.gateway.admin.audit import is_recorded, note_refused, recorded
from inferd.gateway.admin.auditor import Auditor
from inferd.gateway.admin.openapi import openapi_document
from inferd.gateway.admission import Credentials, allowed, credentials_of, principal_with
from inferd.gateway.anthropic.errors import ANTHROPIC_ERRORS
from inferd.gateway.background import Background, refuse_stream
from inferd.gateway.call import (
    Answer,
    Call,
    EventStream,
    Pending,
    Pieces,
    Response,
    Switched,
    read_body,
    require_json,
)
from inferd.gateway.console.parts import Console
from inferd.gateway.context import Context, Metrics, no_tally
from inferd.gateway.control import ControlActions
from inferd.gateway.errors import (
    KSERVE_ERRORS,
    OPENAI_ERRORS,
    MethodNotAllowed,
    RouteNotFound,
    UpgradeRequired,
    error_headers,
    kind_of,
    printable,
)
from inferd.gateway.http_call import HttpCall
from inferd.gateway.mlflow.wire import API as MLFLOW_API
from inferd.gateway.mlflow.wire import MLFLOW_ERRORS, READ_ONLY
from inferd.gateway.ollama.errors import OLLAMA_ERRORS
from inferd.gateway.openai.relay_fields import remote_models
from inferd.gateway.origin import Origins
from inferd.gateway.route import Match, Route, RouteTable
from inferd.gateway.routes import ROUTES
from inferd.gateway.runs import Runs
from inferd.gateway.upstream import Upstream
from inferd.http.exchange import ClientLeft, Exchange, Headers
from inferd.jobs.runner import Runner
from inferd.observe import MetricsPage
from inferd.observe.payloads.log import PayloadLog
from inferd.observe.statistics import ModelTally
from inferd.observe.traces.context import Sampler
from inferd.observe.why import Explainer
from inferd.rollout.copies import Copies
from inferd.rollout.split import Split
from inferd.stored.port import ResponseStore
from inferd.tenancy.idempotency import IdempotencyStore
from inferd.tenancy.principal import Door, OpenDoor, Principal
from inferd.tenancy.principal import Scope as KeyScope

_log = logging.getLogger("inferd.gateway")

_BELOW: Final = (
    ("/v2/", KSERVE_ERRORS),
    (MLFLOW_API, MLFLOW_ERRORS),
    ("/api/", OLLAMA_ERRORS),
    ("/v1/messages/", ANTHROPIC_ERRORS),
)
"""The errors of paths without a route, by how they begin; others have those of OpenAI."""


class _Known(NamedTuple):
    """Values derived from a request's head. They hold while ``context`` is the gateway's."""

    context: Context
    route: Route
    rest: str
    credentials: Credentials
    common_headers: Headers


class Gateway:
    """Answers the requests of HTTP. Its only state between them is the ``Context`` and what is derived from it.

    ``principal``: the principal of every request, for the control socket, which web pages cannot reach. None: each
    request is authenticated.
    """

    __slots__ = ("_context", "_origins", "_principal", "_scope_of_metrics", "_table", "emit")

    def __init__(self, context: Context, principal: Principal | None) -> None:
        self._principal = principal
        self.emit = context.emit
        self._table = RouteTable(ROUTES)
        self._use(context)

    def configure(self, config: Config, splits: Mapping[str, Split] = {}) -> None:
        """Use another configuration from the next request on. ``splits``: how rollouts divide the units of models, as
        the weights of the configuration say."""
        self._use(self._context._replace(config=config, splits=splits))

    def _use(self, context: Context) -> None:
        server = context.config.server
        self._context = context = context._replace(
            remote_models=remote_models(context.config),
            on_demand_models=frozenset(name for name, model in context.config.models.items() if model.is_on_demand),
            max_body_bytes=server.max_body_bytes,
            body_timeout_s=server.body_timeout_s,
        )
        self._origins = Origins(context.config.server)
        context.console.config = context.config
        self._scope_of_metrics: KeyScope = "public" if context.config.server.public_metrics else "metrics"

    @property
    def context(self) -> Context:
        """The current context. A reload replaces it."""
        return self._context

    # -- the server's application -----------------------------------------------------------

    def serve(self, exchange: Exchange, principal: Principal | None = None) -> None:
        """Answer a request. ``principal``: whose it is, where that is known already. Raises BadTarget."""
        call = exchange.listener = HttpCall(self, exchange, clock.now())
        call.sampler = self._context.sampler
        call.task = run_eagerly(self._serve(call, principal or self._principal), exchange.spawn)

    def refuse(self, exchange: Exchange, error: InferdError) -> None:
        """Answer a request whose body cannot be read to its end. Raises BadTarget."""
        call = exchange.listener = HttpCall(self, exchange, clock.now())
        call.sampler = self._context.sampler
        match = self._table.find(call.path)
        if match is not None:
            call.route, call.operation, call.errors = match.pattern, match.first.operation, match.first.errors
        call.refuse(error)

    async def _serve(self, call: HttpCall, principal: Principal | None) -> None:
        """Answer a call and close it. For ``PENDING`` the items of its request do both."""
        answer: Answer | Pieces | Switched | None = None
        refusal: Response | None = None  # of the endpoint; sent after the handler of its error has ended
        defect: Response | None = None  # likewise
        try:
            try:
                try:
                    answer = await self._answering(call, principal)
                    if not isinstance(answer, Pending):
                        await call.send(answer)
                except InferdError as error:
                    refusal = self.error_response(call, error)
                if refusal is not None:
                    await call.send(refusal)
            except ClientLeft:
                call.client_left = True
            except asyncio.CancelledError:
                if not call.client_left:
                    raise
                assert call.task is not None, "what is cancelled is a task"
                call.task.uncancel()
            except Exception:
                # The request boundary: a defect ends this request, and no other.
                _log.exception("request %s failed", call.request_id)
                told = InternalError("The server met an internal error; the log has the details.")
                if isinstance(answer, EventStream) and call.exchange.has_begun:
                    call.break_off(told)
                elif call.status == 0:
                    defect = self.error_response(call, told)
            if defect is not None:
                await call.send(defect)
        finally:
            if not isinstance(answer, Pending) or call.client_left:
                call.close()

    def _answering(self, call: HttpCall, known_as: Principal | None) -> Awaitable[Answer | Pieces | Switched]:
        """The endpoint's answer to a call. Most heads are cached, and the route with them. Raises InferdError."""
        known: _Known | None = call.facts.route
        context = self._context
        if known is None or known.context is not context:
            return self._answer(call, known_as)
        route = known.route
        call.route, call.operation, call.errors = route.pattern, route.operation, route.errors
        call.common_headers = known.common_headers
        if known_as is not None:
            call.principal = known_as
        else:
            call.principal = principal = principal_with(context, known.credentials)
            if route.scope not in principal.scopes:
                allowed(principal, route.scope)
        if call.facts.is_async:
            return self._endpoint(call, route, known.rest)
        if context.payloads is not None and context.payloads.is_on:
            call.capture = context.payloads.begin(call.principal.tenant, call.unique, route.texts, call.head)
        return route.endpoint(context, call, known.rest)

    async def _answer(self, call: HttpCall, known_as: Principal | None) -> Answer | Pieces | Switched:
        if call.method == "OPTIONS" and call.path == "*":
            return Response(204, headers=((b"allow", b"GET, HEAD, POST, DELETE, OPTIONS"),))
        match = self._table.find(call.path)
        if match is None:
            call.errors = next((shape for below, shape in _BELOW if call.path.startswith(below)), OPENAI_ERRORS)
            if call.path.startswith(MLFLOW_API):
                raise RouteNotFound(READ_ONLY)
            raise RouteNotFound(f"There is nothing at {printable(call.path, 200)!r}; /docs lists what there is.")
        found = match.by_method.get("GET" if call.method == "HEAD" else call.method)
        shown = match.first if found is None else found
        call.route, call.operation, call.errors = match.pattern, shown.operation, shown.errors
        has_console = self._context.config.server.console
        if shown.of_console and not has_console and known_as is None:
            raise RouteNotFound("The console is off; server.console turns it on.")
        if shown.page and has_console and _is_browser(call):
            return Response(302, headers=((b"location", shown.page), (b"vary", b"accept")))
        call.common_headers = shown.headers
        scope = self._scope_of_metrics if match.pattern == "/metrics" else shown.scope
        is_ours = scope == "admin" or shown.of_console
        credentials = Credentials(None, None)
        if known_as is not None:
            call.principal = known_as
        elif scope != "public":
            if call.method == "OPTIONS" and not is_ours:
                self._origins.check_host(call)
                headers = self._origins.preflight(call, match.allow)
                if headers is not None:
                    return Response(204, headers=headers)
            call.common_headers += self._origins.cors_headers(call, same_origin_only=is_ours)
            try:
                credentials = credentials_of(call)
                call.principal = principal_with(self._context, credentials)
                allowed(call.principal, scope)
            except (Unauthenticated, Forbidden) as error:
                if scope == "admin":
                    note_refused(self._context, call, "authenticate", error)
                raise
            self._origins.check_host(call)
            self._origins.check_origin(call, same_origin_only=is_ours)
        elif is_ours:
            self._origins.check_host(call)
            self._origins.check_origin(call, same_origin_only=True)
        if call.method == "OPTIONS":
            return Response(204, headers=((b"allow", match.allow.encode("ascii")),))
        if found is None:
            raise _not_allowed(call, match)
        if scope != "infer":
            await in_task()  # operators' requests need a current task, and are few
        if scope == found.scope == "infer":
            call.facts.route = _Known(self._context, found, match.rest, credentials, call.common_headers)
        return await self._endpoint(call, found, match.rest)

    async def _endpoint(self, call: HttpCall, route: Route, rest: str) -> Answer | Pieces | Switched:
        if call.facts.is_async and route.method == "POST" and route.scope == "infer":
            return await self._begin_async(call)
        if route.scope == "admin" and self._context.audit is not None and is_recorded(route):
            return await recorded(self._context, call, route, rest)
        payloads = self._context.payloads
        if payloads is not None and payloads.is_on and route.scope == "infer":
            call.capture = payloads.begin(call.principal.tenant, call.unique, route.texts, call.head)
        return await route.endpoint(self._context, call, rest)

    async def _begin_async(self, call: HttpCall) -> Response:
        """Start the request in the background; the answer is its handle."""
        require_json(call)
        body = await read_body(call, self._context.max_body_bytes, self._context.body_timeout_s)
        refuse_stream(body)
        return self._context.background.start(self, call, body)

    # -- called by calls ---------------------------------------------------------------------

    def error_response(self, call: Call, error: InferdError) -> Response:
        call.note_error(error)
        status = kind_of(error).status
        headers = error_headers(error)
        if status == 503 and self._context.router.draining:
            headers = (*headers, (b"connection", b"close"))
        return Response(status, call.errors.encode(error, call.request_id), headers=headers)


def _is_browser(call: Call) -> bool:
    """Whether the client is a browser that opens an address."""
    return b"text/html" in (call.header(b"accept") or b"").lower()


def _not_allowed(call: Call, match: Match) -> MethodNotAllowed | UpgradeRequired:
    if call.offer is not None:  # Codex offers one first, and uses HTTP at once where it is told so
        return UpgradeRequired(f"{match.pattern} takes no WebSocket; use {match.allow}.", protocol="HTTP/1.1")
    remedy = f". {READ_ONLY}" if match.pattern.startswith(MLFLOW_API) else f"; use {match.allow}."
    return MethodNotAllowed(f"{match.pattern} does not allow {printable(call.method)}{remedy}", allow=match.allow)


_openapi = functools.cache(openapi_document)


async def _no_metrics(accept: str) -> MetricsPage:
    return MetricsPage(b"", "text/plain")


def create_app(
    router: Upstream,
    config: Config | ServerConfig,
    emit: Emit,
    *,
    metrics: Metrics = _no_metrics,
    door: Door | None = None,
    cache: ResponseCache | None = None,
    idempotency: IdempotencyStore | None = None,
    control: ControlActions | None = None,
    principal: Principal | None = None,
    tally_of: Callable[[str], ModelTally] = no_tally,
    explainer: Explainer | None = None,
    console: Console | None = None,
    sampler: Sampler | None = None,
    audit: Auditor | None = None,
    payloads: PayloadLog | None = None,
    stored: ResponseStore | None = None,
    runs: Runs | None = None,
    jobs: Runner | None = None,
    copies: Copies | None = None,
) -> Gateway:
    """The application in front of ``router``; ``metrics`` makes the page of ``GET /metrics``.

    ``tally_of`` returns a model's statistics, and ``explainer`` has the records of calls. With a ``sampler`` calls have
    spans of their own. Without a ``door`` every request is allowed. With a ``principal`` every request has that
    principal and no key is checked.
    """
    if isinstance(config, ServerConfig):
        config = Config(server=config, models={})
    door = door if door is not None else OpenDoor()
    explainer = explainer if explainer is not None else Explainer(0)
    console = console if console is not None else Console(config)
    context = Context(
        *(router, config, door, emit, metrics, _openapi, control, idempotency, cache, {}, Background()),
        explainer=explainer,
        console=console,
        tally_of=tally_of,
        sampler=sampler,
        audit=audit,
        payloads=payloads,
        stored=stored,
        runs=runs,
        jobs=jobs,
        copies=copies,
    )
    return Gateway(context, principal)
