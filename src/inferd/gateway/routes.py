"""The table of routes: which method and path lead where, and what is read and written there.

The OpenAPI document is generated from the same table, so that nothing is served that is not
described and nothing described that is not served.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, NamedTuple

import msgspec

from inferd.gateway import health, models
from inferd.gateway.admission import visible
from inferd.gateway.chat import create_chat_completion
from inferd.gateway.completions import create_completion
from inferd.gateway.decode import decode_body
from inferd.gateway.docs_page import docs_page, start_page
from inferd.gateway.http import HTML_TYPE, Answer, Call, Response, read_body, require_json
from inferd.gateway.openai_wire import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    chat_decoder,
    completion_decoder,
    detokenize_decoder,
    tokenize_decoder,
)
from inferd.gateway.room import Room
from inferd.gateway.tokenize import detokenize, tokenize
from inferd.tenancy.principal import Scope

METRICS_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"


Endpoint = Callable[[Room, Call, str], Awaitable[Answer]]


class Route(NamedTuple):
    method: Literal["GET", "POST"]
    pattern: str  # a last segment in braces takes the rest of the path, slashes included
    scope: Scope
    endpoint: Endpoint
    summary: str
    request: type[msgspec.Struct] | None = None
    response: type[msgspec.Struct] | None = None
    chunk: type[msgspec.Struct] | None = None  # what each event of a streamed answer holds
    media: bytes = b"application/json"
    statuses: tuple[int, ...] = ()  # besides 200


async def _chat(room: Room, call: Call, rest: str) -> Answer:
    require_json(call)
    body = await decode_body(await read_body(call, room.max_body_bytes), chat_decoder)
    return await call.watched(create_chat_completion(room, call, body))


async def _completion(room: Room, call: Call, rest: str) -> Answer:
    require_json(call)
    body = await decode_body(await read_body(call, room.max_body_bytes), completion_decoder)
    return await call.watched(create_completion(room, call, body))


async def _tokenize(room: Room, call: Call, rest: str) -> Answer:
    require_json(call)
    body = await decode_body(await read_body(call, room.max_body_bytes), tokenize_decoder)
    return await call.watched(tokenize(room, call, body))


async def _detokenize(room: Room, call: Call, rest: str) -> Answer:
    require_json(call)
    body = await decode_body(await read_body(call, room.max_body_bytes), detokenize_decoder)
    return await call.watched(detokenize(room, call, body))


async def _models(room: Room, call: Call, rest: str) -> Answer:
    return models.list_models(room, call)


async def _model(room: Room, call: Call, rest: str) -> Answer:
    return models.get_model(room, call, rest)


async def _live(room: Room, call: Call, rest: str) -> Answer:
    return health.live()


async def _ready(room: Room, call: Call, rest: str) -> Answer:
    return health.ready(room, call)


async def _version(room: Room, call: Call, rest: str) -> Answer:
    return health.version()


async def _load(room: Room, call: Call, rest: str) -> Answer:
    return health.load(room.router)


async def _metrics(room: Room, call: Call, rest: str) -> Answer:
    return Response(200, room.metrics(), METRICS_TYPE)


async def _openapi(room: Room, call: Call, rest: str) -> Answer:
    return Response(200, room.openapi())


async def _docs(room: Room, call: Call, rest: str) -> Answer:
    return Response(200, docs_page(), HTML_TYPE)


async def _start(room: Room, call: Call, rest: str) -> Answer:
    return Response(200, start_page(visible(room.router, call.principal)), HTML_TYPE)


_REFUSALS: Final = (401, 403)  # of every route that is not public
_GENERATES: Final = (400, *_REFUSALS, 404, 408, 413, 415, 429, 500, 503)


def _get(
    pattern: str,
    endpoint: Endpoint,
    summary: str,
    response: type[msgspec.Struct] | None = None,
    *,
    scope: Scope,
    media: bytes = b"application/json",
    statuses: tuple[int, ...] = (),
) -> Route:
    refusals = () if scope == "public" else _REFUSALS
    return Route("GET", pattern, scope, endpoint, summary, None, response, None, media, (*refusals, *statuses))


def _post(
    pattern: str,
    endpoint: Endpoint,
    summary: str,
    request: type[msgspec.Struct],
    response: type[msgspec.Struct],
    chunk: Any = None,
) -> Route:
    return Route("POST", pattern, "infer", endpoint, summary, request, response, chunk, b"application/json", _GENERATES)


def _probe(pattern: str, endpoint: Endpoint, summary: str, response: type[msgspec.Struct], *statuses: int) -> Route:
    return _get(pattern, endpoint, summary, response, scope="public", statuses=statuses)


ROUTES: Final[tuple[Route, ...]] = (
    _post("/v1/chat/completions", _chat, "Answer a conversation.", ChatRequest, ChatCompletion, ChatCompletionChunk),
    _post("/v1/completions", _completion, "Continue a text, or score it.", CompletionRequest, Completion, Completion),
    _post("/tokenize", _tokenize, "Text or messages to token ids.", TokenizeRequest, TokenizeResponse),
    _post("/detokenize", _detokenize, "Token ids to text.", DetokenizeRequest, DetokenizeResponse),
    _get("/v1/models", _models, "The models served here.", ModelList, scope="models"),
    _get("/v1/models/{model}", _model, "One model.", ModelCard, scope="models", statuses=(404,)),
    _probe("/health", _ready, "Can requests be served?", health.Readiness, 503),
    _probe("/health/ready", _ready, "Can requests be served?", health.Readiness, 503),
    _probe("/readyz", _ready, "Can requests be served?", health.Readiness, 503),
    _probe("/ping", _ready, "Can requests be served?", health.Readiness, 503),
    _probe("/health/live", _live, "Is the process alive?", health.Liveness),
    _probe("/healthz", _live, "Is the process alive?", health.Liveness),
    _probe("/livez", _live, "Is the process alive?", health.Liveness),
    _get("/version", _version, "The server's version.", health.Version, scope="models"),
    _get("/load", _load, "Requests inside the server.", health.Load, scope="metrics"),
    _get("/metrics", _metrics, "Metrics in Prometheus' text format.", scope="metrics", media=METRICS_TYPE),
    _get("/openapi.json", _openapi, "This document.", scope="models"),
    _get("/docs", _docs, "This document, for people.", scope="models", media=HTML_TYPE),
    _get("/", _start, "A short page that says what is served.", scope="models", media=HTML_TYPE),
)


class Match(NamedTuple):
    pattern: str
    by_method: dict[str, Route]
    rest: str

    @property
    def scope(self) -> Scope:
        """What it takes to be told anything at all about this path."""
        return next(iter(self.by_method.values())).scope

    @property
    def allow(self) -> str:
        methods = list(self.by_method)
        if "GET" in self.by_method:
            methods.append("HEAD")
        return ", ".join([*methods, "OPTIONS"])


class RouteTable:
    """Finds the routes of a path."""

    __slots__ = ("_exact", "_open_ended")

    def __init__(self, routes: tuple[Route, ...] = ROUTES) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._open_ended: list[tuple[str, str, dict[str, Route]]] = []
        for route in routes:
            if "{" in route.pattern:
                self._open_ended.append((route.pattern.partition("{")[0], route.pattern, {route.method: route}))
            else:
                self._exact.setdefault(route.pattern, {})[route.method] = route

    def find(self, path: str) -> Match | None:
        exact = self._exact.get(path)
        if exact is not None:
            return Match(path, exact, "")
        for prefix, pattern, by_method in self._open_ended:
            if path.startswith(prefix) and len(path) > len(prefix):
                return Match(pattern, by_method, path[len(prefix) :])
        return None
