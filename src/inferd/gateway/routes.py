"""The table of routes: for each method and path the endpoint, the scope of the key, and the bodies.

The OpenAPI document is generated from the same table, so the document describes every route that is served and no
other. The routes of the console are for its own pages, and not in the document.
"""

from __future__ import annotations

import asyncio
from types import UnionType
from typing import Any, Final, Literal

import msgspec

from inferd.autoscale.controller import ScalingReport
from inferd.drift.monitors import DriftReport
from inferd.drift.reference import Reference
from inferd.events import Operation
from inferd.gateway import operations
from inferd.gateway.admin import adapters, drift, health, nodes, registry, rollouts, scaling
from inferd.gateway.admin import endpoints as admin
from inferd.gateway.admin import requests as records
from inferd.gateway.admin.audit import AuditList, AuditQuery, list_entries
from inferd.gateway.admin.pages import docs_page, start_page
from inferd.gateway.admission import visible_models
from inferd.gateway.anthropic import models as anthropic_models
from inferd.gateway.anthropic.batch_routes import MESSAGE_BATCH_ROUTES
from inferd.gateway.anthropic.routes import ROUTES as MESSAGES_ROUTES
from inferd.gateway.background import AsyncRequest
from inferd.gateway.body.compression import wanted_encoding
from inferd.gateway.body.decode import decode_body, json_body
from inferd.gateway.call import HTML_TYPE, Answer, Call, Response, read_body, require_json
from inferd.gateway.console import endpoints as console
from inferd.gateway.console.assets import DOCS_PAGE
from inferd.gateway.console.security import CONSOLE_HEADERS
from inferd.gateway.context import Context
from inferd.gateway.control import ModelReport, ReloadReport, ServerReport, UnloadReport
from inferd.gateway.decisions.routes import ROUTES as DECISION_ROUTES
from inferd.gateway.errors import KSERVE_ERRORS, OPENAI_ERRORS, TEI_ERRORS, ErrorShape
from inferd.gateway.generation.fields import decode_open_body
from inferd.gateway.kserve import models as kserve
from inferd.gateway.kserve import rest as v2
from inferd.gateway.kserve.generate import GENERATE_TEXTS, TextAnswer, TextRequest
from inferd.gateway.kserve.invocations import (
    InstancesRequest,
    InvocationRequest,
    Predictions,
    invoke,
    predict_v1,
)
from inferd.gateway.kserve.statistics import StatisticsAnswer
from inferd.gateway.kserve.wire import (
    Done,
    IndexRequest,
    InferRequest,
    InferResponse,
    Live,
    ModelReady,
    Ready,
    RepositoryRequest,
)
from inferd.gateway.mlflow import registry as mlflow
from inferd.gateway.mlflow import wire as mlflow_wire
from inferd.gateway.mlflow.webhook import WebhookAccepted, WebhookEvent, accept_webhook
from inferd.gateway.ollama.routes import ROUTES as OLLAMA_ROUTES
from inferd.gateway.openai import models, texts
from inferd.gateway.openai.chat import create_chat_completion
from inferd.gateway.openai.completions import create_completion
from inferd.gateway.openai.job_routes import JOB_ROUTES
from inferd.gateway.openai.payloads import COMPLETION_TEXTS
from inferd.gateway.openai.relay import relay_request
from inferd.gateway.openai.relay_fields import CHAT, TEXT
from inferd.gateway.openai.tokenize import detokenize, tokenize
from inferd.gateway.openai.wire import (
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
from inferd.gateway.responses import models as codex_models
from inferd.gateway.responses.routes import ROUTES as RESPONSES_ROUTES
from inferd.gateway.responses.stored_routes import STORED_ROUTES
from inferd.gateway.route import Endpoint, Route
from inferd.gateway.tgi.generate import writing_models
from inferd.gateway.tgi.info import info as tgi_info
from inferd.gateway.tgi.routes import ROUTES as TGI_ROUTES
from inferd.gateway.windows.endpoint import stream
from inferd.gateway.windows.options import WindowOptions
from inferd.lifecycle.actions import Changed, NewFiles
from inferd.lifecycle.registry import Version
from inferd.lifecycle.stages import Action
from inferd.nodes.listener import NewToken
from inferd.observe.payloads.texts import JsonAnswers, Texts
from inferd.observe.startup import StartupReport
from inferd.observe.why import RecordReport
from inferd.predict.codecs import text_wire as wire
from inferd.rollout.machine import Command
from inferd.rollout.rollouts import RolloutReport
from inferd.tenancy.keys import KeyInfo, KeySpec, NewKey
from inferd.tenancy.principal import Scope

METRICS_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
_VARY_ACCEPT: Final = ((b"vary", b"accept"),)


async def _chat(context: Context, call: Call, rest: str) -> Answer:
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    answer = await relay_request(context, call, CHAT, raw)
    if answer is not None:
        return answer
    body, ignored = await decode_open_body(raw, chat_decoder)
    return await create_chat_completion(context, call, raw, body, ignored)


async def _completion(context: Context, call: Call, rest: str) -> Answer:
    raw = await json_body(call, context.max_body_bytes, context.body_timeout_s)
    answer = await relay_request(context, call, TEXT, raw)
    if answer is not None:
        return answer
    body, ignored = await decode_open_body(raw, completion_decoder)
    return await create_completion(context, call, raw, body, ignored)


async def _tokenize(context: Context, call: Call, rest: str) -> Answer:
    require_json(call)
    raw = await read_body(call, context.max_body_bytes, context.body_timeout_s)
    body, ignored = await decode_open_body(raw, tokenize_decoder)
    return await tokenize(context, call, body, ignored)


async def _detokenize(context: Context, call: Call, rest: str) -> Answer:
    require_json(call)
    body = await decode_body(await read_body(call, context.max_body_bytes, context.body_timeout_s), detokenize_decoder)
    return await detokenize(context, call, body)


async def _async_poll(context: Context, call: Call, rest: str) -> Answer:
    return await context.background.poll(call, rest)


async def _async_cancel(context: Context, call: Call, rest: str) -> Answer:
    return context.background.cancel(call, rest)


async def _models(context: Context, call: Call, rest: str) -> Answer:
    if anthropic_models.is_asked(call):
        return anthropic_models.list_models(context, call)
    if codex_models.is_asked(call):
        return codex_models.list_models(context, call)
    return models.list_models(context, call)


async def _model(context: Context, call: Call, rest: str) -> Answer:
    if anthropic_models.is_asked(call):
        return anthropic_models.get_model(context, call, rest)
    return models.get_model(context, call, rest)


async def _info(context: Context, call: Call, rest: str) -> Answer:
    if texts.only_encoder(context, call) is None and writing_models(context, call):
        return await tgi_info(context, call, rest)
    return await texts.tei_info(context, call, rest)


async def _live(context: Context, call: Call, rest: str) -> Answer:
    return health.live()


async def _ready(context: Context, call: Call, rest: str) -> Answer:
    return health.ready(context, call)


async def _version(context: Context, call: Call, rest: str) -> Answer:
    return health.version()


async def _load(context: Context, call: Call, rest: str) -> Answer:
    return health.load(context.router)


async def _metrics(context: Context, call: Call, rest: str) -> Answer:
    accept = call.header(b"accept") or b""
    page = await context.metrics(accept.decode("latin-1"))
    return Response(200, page.body, page.media.encode("ascii"), _VARY_ACCEPT)


async def _openapi(context: Context, call: Call, rest: str) -> Answer:
    call.encoding = wanted_encoding(call)
    # The first call makes the document, which takes longer than other clients may wait.
    return Response(200, await asyncio.to_thread(context.openapi))


async def _docs(context: Context, call: Call, rest: str) -> Answer:
    if not context.config.server.console:
        return Response(200, docs_page(), HTML_TYPE)
    return await context.console.assets.answer(call, DOCS_PAGE)


async def _start(context: Context, call: Call, rest: str) -> Answer:
    host = (call.header(b"host") or b"localhost").decode("latin-1")
    return Response(200, start_page(visible_models(context, call.principal), host), HTML_TYPE)


async def _status(context: Context, call: Call, rest: str) -> Answer:
    return admin.status(context, call)


async def _startup(context: Context, call: Call, rest: str) -> Answer:
    return admin.startup(context, call)


async def _drain(context: Context, call: Call, rest: str) -> Answer:
    return admin.drain(context, call)


async def _reload(context: Context, call: Call, rest: str) -> Answer:
    return await admin.reload(context, call)


async def _list_keys(context: Context, call: Call, rest: str) -> Answer:
    return await admin.list_keys(context, call)


async def _create_key(context: Context, call: Call, rest: str) -> Answer:
    return await admin.create_key(context, call)


_CLASSES: Final = JsonAnswers()
_REFUSALS: Final = (401, 403)  # statuses of every route that is not public
_GENERATES: Final = (400, *_REFUSALS, 404, 408, 409, 413, 415, 422, 429, 500, 502, 503, 504)


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
    return Route("GET", pattern, scope, endpoint, summary, None, response, None, media, (*_REFUSALS, *statuses))


def _post(
    pattern: str,
    endpoint: Endpoint,
    summary: str,
    request: type[msgspec.Struct],
    response: type[msgspec.Struct],
    operation: Operation,
    chunk: Any = None,
    texts: Texts | None = None,
) -> Route:
    return Route(
        *("POST", pattern, "infer", endpoint, summary, request, response, chunk),
        statuses=_GENERATES,
        operation=operation,
        texts=texts,
    )


def _probe(pattern: str, endpoint: Endpoint, summary: str, response: type[msgspec.Struct], *also: int) -> Route:
    return Route("GET", pattern, "public", endpoint, summary, response=response, also=also)


def _admin(
    method: Literal["GET", "POST", "DELETE"],
    pattern: str,
    endpoint: Endpoint,
    summary: str,
    response: type[msgspec.Struct],
    *statuses: int,
    request: type[msgspec.Struct] | None = None,
    success: int = 200,
    also: tuple[int, ...] = (),
    needs_body: bool = True,
    query: type[msgspec.Struct] | None = None,
) -> Route:
    return Route(
        method,
        pattern,
        "admin",
        endpoint,
        summary,
        request,
        response,
        statuses=(*_REFUSALS, *statuses, 503),
        success=success,
        also=also,
        needs_body=needs_body,
        query=query,
    )


def _kserve() -> tuple[Route, ...]:
    """The routes of KServe v2. Every route of a model exists for each of its versions as well."""
    model, refusals = "/v2/models/{model}", (400, *_REFUSALS, 404, 503)

    def get(
        pattern: str,
        endpoint: Endpoint,
        summary: str,
        response: type[msgspec.Struct],
        scope: Scope = "models",
        statuses: tuple[int, ...] = (),
        also: tuple[int, ...] = (),
    ) -> Route:
        statuses = () if scope == "public" else (*_REFUSALS, *statuses)
        return Route(
            "GET", pattern, scope, endpoint, summary, None, response, statuses=statuses, also=also, errors=KSERVE_ERRORS
        )

    def post(
        pattern: str,
        endpoint: Endpoint,
        summary: str,
        request: type[msgspec.Struct],
        response: type[msgspec.Struct] | type[list[Any]],
        *,
        scope: Scope = "infer",
        statuses: tuple[int, ...] = _GENERATES,
        chunk: Any = None,
        needs_body: bool = True,
        operation: Operation | None = None,
        texts: Texts | None = None,
    ) -> Route:
        return Route(
            "POST",
            pattern,
            scope,
            endpoint,
            summary,
            request,
            response,
            chunk,
            statuses=statuses,
            needs_body=needs_body,
            errors=KSERVE_ERRORS,
            operation=operation,
            texts=texts,
        )

    both = (model, model + "/versions/{version}")
    repository = "/v2/repository/models/{model}"
    manages = (400, *_REFUSALS, 404, 408, 413, 415, 500, 503)
    return (
        get("/v2/health/live", v2.live, "Is the process alive?", Live, "public"),
        get("/v2/health/ready", v2.ready, "Can requests be served?", Ready, "public", also=(503,)),
        get("/v2", v2.server_metadata, "What this server is.", kserve.ServerMetadata),
        *[
            get(one, v2.model_metadata, "Inputs and outputs of a model.", kserve.ModelMetadata, statuses=refusals[3:])
            for one in both
        ],
        *[
            get(f"{one}/ready", v2.model_ready, "Can the model be asked?", ModelReady, statuses=(404,), also=(503,))
            for one in both
        ],
        *[
            get(
                f"{one}/config",
                v2.model_config,
                "The model's configuration, in Triton's words.",
                kserve.ModelConfiguration,
                statuses=refusals[3:],
            )
            for one in both
        ],
        get("/v2/models/stats", v2.statistics, "What every model has done.", StatisticsAnswer),
        *[
            get(f"{one}/stats", v2.model_statistics, "What the model has done.", StatisticsAnswer, statuses=(404,))
            for one in both
        ],
        *[
            post(
                *(f"{one}/infer", v2.infer, "Tensors in, tensors out.", InferRequest, InferResponse),
                operation=operations.PREDICT,
            )
            for one in both
        ],
        *[
            Route(
                *("GET", f"{one}/stream", "infer", stream, "Windows of a stream of samples, over a WebSocket."),
                statuses=(*refusals[:-1], 426, 503),
                success=101,
                errors=KSERVE_ERRORS,
                query=WindowOptions,
                operation=operations.PREDICT,
            )
            for one in both
        ],
        *[
            post(
                *(f"{one}/generate", v2.text, "Continue a text.", TextRequest, TextAnswer),
                operation=operations.TEXT_COMPLETION,
                texts=GENERATE_TEXTS,
            )
            for one in both
        ],
        *[
            post(
                f"{one}/generate_stream",
                v2.text_stream,
                "Continue a text, in pieces.",
                TextRequest,
                TextAnswer,
                chunk=TextAnswer,
                operation=operations.TEXT_COMPLETION,
                texts=GENERATE_TEXTS,
            )._replace(events="Events, each 'data: ' and a TextAnswer as JSON; the last has 'details'.")
            for one in both
        ],
        post(
            "/v2/repository/index",
            v2.repository_index,
            "The models and their states.",
            IndexRequest,
            list[kserve.RepositoryModel],
            scope="models",
            statuses=(400, *_REFUSALS, 408, 413, 415),
            needs_body=False,
        ),
        *[
            post(
                f"{repository}/{verb}",
                endpoint,
                summary,
                RepositoryRequest,
                Done,
                scope="admin",
                statuses=manages,
                needs_body=False,
            )
            for verb, endpoint, summary in (
                ("load", v2.repository_load, "Load a model."),
                ("unload", v2.repository_unload, "Unload a model."),
            )
        ],
    )


def _texts() -> tuple[Route, ...]:
    """The routes for vectors, ranks, scores and classes of texts, in the dialects of several servers."""

    def post(
        pattern: str,
        endpoint: Endpoint,
        summary: str,
        request: type[msgspec.Struct],
        response: type[msgspec.Struct] | type[list[Any]] | UnionType,
        operation: Operation,
        errors: ErrorShape = OPENAI_ERRORS,
        texts: Texts | None = None,
    ) -> Route:
        return Route(
            *("POST", pattern, "infer", endpoint, summary, request, response),
            statuses=_GENERATES,
            errors=errors,
            operation=operation,
            texts=texts,
        )

    ranking = wire.RerankResponse | list[wire.TeiRank]
    return (
        post(
            "/v1/embeddings",
            texts.embeddings,
            "Texts to vectors.",
            wire.EmbeddingRequest,
            wire.EmbeddingList,
            operations.EMBEDDINGS,
        ),
        post(
            "/v2/embed",
            texts.cohere_embed,
            "As Cohere does.",
            wire.CohereEmbedRequest,
            wire.CohereEmbedResponse,
            operations.EMBEDDINGS,
        ),
        post(
            *("/rerank", texts.rerank, "Documents by relevance to a query.", wire.RerankRequest, ranking),
            operation=operations.RERANK,
        ),
        post(
            *("/v1/rerank", texts.rerank, "Documents by relevance to a query.", wire.RerankRequest, ranking),
            operation=operations.RERANK,
        ),
        post(
            "/v2/rerank",
            texts.cohere_rerank,
            "As Cohere does.",
            wire.RerankRequest,
            wire.CohereRerankResponse,
            operations.RERANK,
        ),
        post(
            *("/score", texts.score, "How well texts belong together.", wire.ScoreRequest, wire.ScoreResponse),
            operation=operations.SCORE,
        ),
        post(
            *("/v1/score", texts.score, "How well texts belong together.", wire.ScoreRequest, wire.ScoreResponse),
            operation=operations.SCORE,
        ),
        post(
            *(
                "/classify",
                texts.classify,
                "Texts to classes.",
                wire.ClassifyRequest,
                wire.ClassifyResponse,
                operations.CLASSIFY,
            ),
            texts=_CLASSES,
        ),
        post(
            *("/pooling", texts.pooling, "What a text model gives.", wire.PoolingRequest, wire.PoolingResponse),
            operation=operations.POOLING,
        ),
        post(
            "/embed",
            texts.tei_embed,
            "As TEI does.",
            wire.TeiEmbedRequest,
            list[list[float]],
            operations.EMBEDDINGS,
            TEI_ERRORS,
        ),
        post(
            "/predict",
            texts.tei_predict,
            "Texts to classes, as text-embeddings-inference does.",
            wire.TeiPredictRequest,
            list[wire.TeiPrediction | list[wire.TeiPrediction]],
            operations.PREDICT,
            TEI_ERRORS,
            _CLASSES,
        ),
        Route(
            *("GET", "/info", "models", _info, "The model, as text-embeddings-inference or TGI tells of it."),
            response=texts.InfoAnswer,
            statuses=(400, *_REFUSALS, 404, 503),
            errors=TEI_ERRORS,
        ),
    )


def _console() -> tuple[Route, ...]:
    """The console's page and files, its sign-in, and what its pages read."""

    def of_console(
        method: Literal["GET", "POST", "DELETE"],
        pattern: str,
        scope: Scope,
        endpoint: Endpoint,
        summary: str,
        *statuses: int,
        request: type[msgspec.Struct] | None = None,
        response: type[msgspec.Struct] | None = None,
        media: bytes = b"application/json",
        success: int = 200,
    ) -> Route:
        return Route(
            *(method, pattern, scope, endpoint, summary, request, response),
            media=media,
            statuses=statuses,
            success=success,
            headers=CONSOLE_HEADERS,
            of_console=True,
        )

    return (
        of_console("GET", "/console", "public", console.to_page, "To the console.", success=308),
        of_console("GET", "/console/", "public", console.page, "The console.", media=HTML_TYPE),
        of_console("GET", "/console/assets/{file}", "public", console.asset, "A file of the console.", 404),
        of_console(
            *("GET", "/console/session", "public", console.session, "What the console may show and do."),
            response=console.SessionReport,
        ),
        of_console(
            *("POST", "/console/session", "public", console.sign_in, "Exchange a key for a session of the console."),
            *(400, 401, 403, 408, 413, 415, 429),
            request=console.SignIn,
            success=204,
        ),
        of_console(
            *("DELETE", "/console/session", "public", console.sign_out, "End the session.", 403),
            success=204,
        ),
        of_console(
            *("GET", "/console/live", "metrics", console.live, "Live numbers, as server-sent events."),
            *(*_REFUSALS, 503),
            media=b"text/event-stream",
        ),
        of_console(
            *("GET", "/console/alerts", "metrics", console.alerts, "The alerts that fire.", *_REFUSALS, 503),
            response=console.AlertList,
        ),
    )


def _rollouts() -> tuple[Route, ...]:
    """How rollouts are, and a route for each command."""
    told: tuple[tuple[Command, str], ...] = (
        ("start", "Begin a rollout, or begin it anew."),
        ("pause", "Stay at the present step; the guards still watch."),
        ("resume", "Go on after a pause, or follow a changed plan."),
        ("promote", "Go on to the next step now, or to all units."),
        ("abort", "End a rollout; the stable version serves all units."),
        ("undo", "Take a promoted version back."),
    )
    base = "/admin/rollouts"
    return (
        _admin("GET", base, rollouts.list_rollouts, "The rollouts.", rollouts.RolloutList),
        _admin("GET", base + "/{model}", rollouts.get_rollout, "A rollout and its changes.", RolloutReport, 400, 404),
        *[
            _admin(
                *("POST", f"{base}/{{model}}/{command}", rollouts.commanding(command), summary, RolloutReport),
                *(400, 404, 408, 413, 415),
                request=rollouts.RolloutCommand,
                needs_body=False,
            )
            for command, summary in told
        ],
        _admin(
            *("POST", base + "/{model}/bad", rollouts.note_bad, "Report something bad about an answer."),
            rollouts.BadNoted,
            *(400, 404, 408, 413, 415),
            request=rollouts.BadReport,
        ),
    )


def _registry() -> tuple[Route, ...]:
    """The registry of versions, and a route for each action."""
    told: tuple[tuple[Action, str], ...] = (
        ("validate", "Compare a version's contract, and check its evidence."),
        ("approve", "Approve a version."),
        ("canary", "Record that a version serves a part of the requests."),
        ("withdraw", "Record that a canary serves no requests any more."),
        ("promote", "Make a version the one in production."),
        ("archive", "Take a version out of production."),
        ("reject", "Reject a version that was not in production."),
    )
    base, version = "/admin/registry", "/admin/registry/{model}/versions/{version}"
    refusals = (400, 404, 408, 413, 415)
    return (
        _admin("GET", base, registry.list_all, "The versions of all models.", registry.VersionList),
        _admin("GET", base + "/{model}", registry.list_versions, "A model's versions.", registry.VersionList, 404),
        _admin(
            *("GET", base + "/{model}/history", registry.get_history, "What happened to a model's versions."),
            *(registry.HistoryList, 400, 404),
            query=registry.HistoryQuery,
        ),
        _admin("GET", version, registry.get_version, "A version.", Version, 404),
        _admin(
            *("POST", base + "/{model}/versions", registry.register, "Register files of the server's machine."),
            Changed,
            *refusals,
            request=NewFiles,
        ),
        _admin(
            *("POST", f"{version}/verify", registry.verify, "Read a version's files, and record what was found."),
            *(Changed, 400, 404),
            needs_body=False,
        ),
        _admin(
            *("POST", base + "/{model}/aliases/{alias}", registry.set_alias, "Point an alias at a version."),
            Changed,
            *refusals,
            request=registry.AliasCommand,
        ),
        _admin(
            *("DELETE", base + "/{model}/aliases/{alias}", registry.remove_alias, "Remove an alias."),
            *(Changed, 400, 404),
        ),
        *[
            _admin(
                *("POST", f"{version}/{action}", registry.moving(action), summary, Changed, *refusals),
                request=registry.MoveCommand,
                needs_body=False,
            )
            for action, summary in told
        ],
        _admin(
            *("POST", f"{version}/evidence", registry.attach, "Attach a report about a version.", Changed, *refusals),
            request=registry.EvidenceReport,
        ),
    )


def _mlflow() -> tuple[Route, ...]:
    """The registry of versions for MLflow's client, and the messages of an MLflow server, whose signature is their
    key."""
    models, versions = f"{mlflow_wire.API}registered-models", f"{mlflow_wire.API}model-versions"

    def get(
        pattern: str,
        endpoint: Endpoint,
        summary: str,
        response: type[msgspec.Struct],
        query: type[msgspec.Struct],
        *statuses: int,
    ) -> Route:
        return _admin("GET", pattern, endpoint, summary, response, 400, *statuses, query=query)

    reads = (
        get(
            f"{models}/get", mlflow.get_model, "A model.", mlflow_wire.RegisteredModelAnswer, mlflow_wire.NameQuery, 404
        ),
        get(f"{models}/search", mlflow.search_models, "Models.", mlflow_wire.RegisteredModels, mlflow_wire.SearchQuery),
        get(
            *(f"{models}/get-latest-versions", mlflow.get_latest, "The newest version of each stage."),
            *(mlflow_wire.ModelVersions, mlflow_wire.LatestQuery, 404),
        ),
        get(
            *(f"{models}/alias", mlflow.get_by_alias, "The version that an alias names."),
            *(mlflow_wire.ModelVersionAnswer, mlflow_wire.AliasQuery, 404),
        ),
        get(
            *(f"{versions}/get", mlflow.get_version, "A version."),
            *(mlflow_wire.ModelVersionAnswer, mlflow_wire.VersionQuery, 404),
        ),
        get(
            *(f"{versions}/search", mlflow.search_versions, "Versions."),
            *(mlflow_wire.ModelVersions, mlflow_wire.SearchQuery),
        ),
        get(
            *(f"{versions}/get-download-uri", mlflow.get_download_uri, "Where a version's files are."),
            *(mlflow_wire.DownloadUri, mlflow_wire.VersionQuery, 404),
        ),
    )
    webhook = Route(
        *("POST", "/admin/mlflow/webhook", "public", accept_webhook, "An MLflow registry has changed: look at it."),
        request=WebhookEvent,
        response=WebhookAccepted,
        statuses=(400, 401, 408, 413, 415, 503),
        success=202,
    )
    return (*[route._replace(errors=mlflow_wire.MLFLOW_ERRORS) for route in reads], webhook)


def _drift() -> tuple[Route, ...]:
    """How like their references the requests and answers of models are."""
    one = "/admin/drift/{model}"
    return (
        _admin("GET", "/admin/drift", drift.list_drift, "The drift of all models.", drift.DriftList),
        _admin("GET", one, drift.get_drift, "The drift of a model.", DriftReport, 400, 404),
        _admin("GET", one + "/reference", drift.get_reference, "What it is compared with.", Reference, 400, 404),
        _admin("POST", one + "/reset", drift.reset_drift, "Take another reference.", DriftReport, 400, 404),
    )


def _adapters() -> tuple[Route, ...]:
    """Adapters while the server runs, by the routes of vLLM."""
    return tuple(
        Route(
            *("POST", path, "admin", endpoint, summary, request),
            media=adapters.TEXT_TYPE,
            statuses=(400, *_REFUSALS, 404, 408, 413, 415, 503),
        )
        for path, endpoint, summary, request in (
            ("/v1/load_lora_adapter", adapters.load_adapter, "Load an adapter.", adapters.LoadAdapter),
            ("/v1/unload_lora_adapter", adapters.unload_adapter, "Unload an adapter.", adapters.UnloadAdapter),
        )
    )


def _scaling() -> tuple[Route, ...]:
    """How many replicas models have by their load, and why."""
    return (
        _admin("GET", "/admin/scaling", scaling.list_scaling, "Numbers of replicas by load.", scaling.ScalingList),
        _admin(
            *("GET", "/admin/scaling/{model}", scaling.get_scaling, "One model's number of replicas, and why."),
            *(ScalingReport, 400, 404),
        ),
    )


def _nodes() -> tuple[Route, ...]:
    """The machines that joined the server, and how others join."""
    return (
        _admin("GET", "/admin/nodes", nodes.list_nodes, "The machines that joined.", nodes.NodeList),
        _admin(
            *("POST", "/admin/nodes/token", nodes.new_token, "A token with which machines join.", NewToken),
            *(400, 408, 413, 415),
            request=nodes.TokenRequest,
            success=201,
            needs_body=False,
        ),
    )


def _invocations() -> tuple[Route, ...]:
    v1 = _post(
        "/v1/models/{model}:predict",
        predict_v1,
        "Rows in, predictions out (KServe v1).",
        InstancesRequest,
        Predictions,
        operations.PREDICT,
    )
    mlflow_rows = _post(
        "/invocations",
        invoke,
        "The same as MLflow and SageMaker ask; also a table as text/csv.",
        InvocationRequest,
        Predictions,
        operations.PREDICT,
    )
    return (v1._replace(errors=KSERVE_ERRORS), mlflow_rows._replace(errors=mlflow_wire.MLFLOW_ERRORS))


ROUTES: Final[tuple[Route, ...]] = (
    _post(
        *("/v1/chat/completions", _chat, "Answer a conversation.", ChatRequest, ChatCompletion, operations.CHAT),
        chunk=ChatCompletionChunk,
        texts=COMPLETION_TEXTS,
    ),
    _post(
        *("/v1/completions", _completion, "Continue a text, or score it.", CompletionRequest, Completion),
        operations.TEXT_COMPLETION,
        chunk=Completion,
        texts=COMPLETION_TEXTS,
    ),
    _post(
        "/tokenize", _tokenize, "Text or messages to token ids.", TokenizeRequest, TokenizeResponse, operations.TOKENIZE
    ),
    _post(
        "/detokenize", _detokenize, "Token ids to text.", DetokenizeRequest, DetokenizeResponse, operations.DETOKENIZE
    ),
    *MESSAGES_ROUTES,
    *MESSAGE_BATCH_ROUTES,
    *RESPONSES_ROUTES,
    *STORED_ROUTES,
    *JOB_ROUTES,
    *DECISION_ROUTES,
    *OLLAMA_ROUTES,
    *_texts(),
    _get(
        "/v1/async/{id}",
        _async_poll,
        "What became of a request sent with 'Prefer: respond-async'.",
        AsyncRequest,
        scope="infer",
        statuses=(404,),
    ),
    Route(
        "DELETE",
        "/v1/async/{id}",
        "infer",
        _async_cancel,
        "Stop such a request, or forget its answer.",
        statuses=(*_REFUSALS, 404),
        success=204,
    ),
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
    _get(
        "/metrics",
        _metrics,
        "Metrics in Prometheus' text format, or in OpenMetrics where Accept prefers it.",
        scope="metrics",
        media=METRICS_TYPE,
    ),
    _get("/openapi.json", _openapi, "This document.", scope="models"),
    Route(
        *("GET", "/docs", "public", _docs, "A page to try every endpoint; it has no data without a key."),
        media=HTML_TYPE,
        headers=CONSOLE_HEADERS,
    ),
    _get("/", _start, "A short page that says what is served.", scope="models", media=HTML_TYPE)._replace(
        page=b"console/"
    ),
    *TGI_ROUTES,  # behind the start page, which speaks for its path
    *_console(),
    _admin("GET", "/admin/status", _status, "Models, replicas, queues, memory, the last reload.", ServerReport),
    _admin("GET", "/admin/audit", list_entries, "The newest entries of the audit log.", AuditList, 400)._replace(
        query=AuditQuery
    ),
    _admin("GET", "/admin/startup", _startup, "The phases of the start and of the last loads.", StartupReport),
    _admin("POST", "/admin/drain", _drain, "Finish what is in flight, then leave.", admin.DrainReport, success=202),
    _admin("POST", "/admin/reload", _reload, "Read the configuration file now.", ReloadReport, 400, also=(422,)),
    _admin("POST", "/admin/models/{model}/load", admin.load, "Load a model.", ModelReport, 400, 404, 500),
    _admin("POST", "/admin/models/{model}/unload", admin.unload, "Unload a model.", UnloadReport, 400, 404, 500),
    _admin(
        "POST",
        "/admin/models/{model}/restart",
        admin.restart,
        "Replace its replicas one by one.",
        ModelReport,
        400,
        404,
        500,
    ),
    _admin(
        "GET",
        "/admin/requests",
        records.list_requests,
        "Recent calls, each with one sentence on its time.",
        records.RecordList,
        400,
        query=records.RequestsQuery,
    )._replace(scope="metrics"),
    _admin("GET", "/admin/requests/{id}", records.get_request, "Why a call took so long.", RecordReport, 404)._replace(
        scope="metrics"
    ),
    *_rollouts(),
    *_adapters(),
    *_scaling(),
    *_nodes(),
    *_registry(),
    *_drift(),
    *_mlflow(),
    _admin("GET", "/admin/keys", _list_keys, "The keys, without their secrets.", admin.KeyList),
    _admin(
        "POST",
        "/admin/keys",
        _create_key,
        "Make a key; its text is shown this once.",
        NewKey,
        400,
        413,
        415,
        request=KeySpec,
        success=201,
    ),
    _admin("DELETE", "/admin/keys/{id}", admin.revoke_key, "End a key.", KeyInfo, 404),
    _admin(
        "POST",
        "/admin/keys/{id}/rotate",
        admin.rotate_key,
        "A new key in the place of an old one.",
        NewKey,
        400,
        404,
        413,
        415,
        request=admin.RotateRequest,
        success=201,
        needs_body=False,
    ),
    *_kserve(),
    *_invocations(),
)
