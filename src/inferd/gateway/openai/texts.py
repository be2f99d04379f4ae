"""The endpoints for texts: embeddings, rerank, score, classify, pooling, and those of text-embeddings-inference (TEI).

Only the fields for the queue are read of a body. The worker reads the texts, and its answer is sent unchanged.
Requests for vectors, ranks and scores of models with remote replicas alone are relayed. Does not know tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from inferd import __version__
from inferd.errors import InvalidRequest, Unavailable
from inferd.gateway.admission import cost_elsewhere, find_model, terms_of, visible_models
from inferd.gateway.body.decode import OFF_LOOP_BYTES, decode, decode_body, within_decode_cost
from inferd.gateway.call import Answer, Call, Response, read_body, require_json
from inferd.gateway.context import Context
from inferd.gateway.generation.requests import forwarded_headers
from inferd.gateway.openai.relay import RelayWork, remote_model_of
from inferd.gateway.predictions import check_task, predict
from inferd.gateway.stages import answer_of
from inferd.gateway.terms import PredictFields
from inferd.gateway.upstream import ModelStatus
from inferd.gateway.versions import model_for
from inferd.types import Relay

# The dialects that are relayed, and their paths at remote servers.
_RELAYED: Final = {"openai.embeddings": "/embeddings", "rerank": "/rerank", "score": "/score"}

T = TypeVar("T")


class _Fields(msgspec.Struct, frozen=True):
    """The fields of a body that the gateway uses."""

    model: str | None = None
    user: msgspec.Raw = msgspec.Raw()
    priority: int | None = None
    timeout: float | None = None


class _RankFields(_Fields, frozen=True):
    texts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_fields: Final = msgspec.json.Decoder(_Fields)
_rank_fields: Final = msgspec.json.Decoder(_RankFields)


# -- endpoints -----------------------------------------------------------------------------------


def _endpoint(dialect: str, task: str) -> Callable[[Context, Call, str], Awaitable[Answer]]:
    """The endpoint of a dialect that needs no other fields than ``_Fields``."""

    async def endpoint(context: Context, call: Call, rest: str) -> Answer:
        raw = await _body(context, call)
        return await _answer(context, call, raw, await _read(raw, _fields), dialect, task)

    return endpoint


embeddings = _endpoint("openai.embeddings", "embed")  # POST /v1/embeddings
cohere_embed = _endpoint("cohere.embed", "embed")  # POST /v2/embed
cohere_rerank = _endpoint("cohere.rerank", "rerank")  # POST /v2/rerank
score = _endpoint("score", "score")  # POST /score and /v1/score
classify = _endpoint("classify", "classify")  # POST /classify
pooling = _endpoint("pooling", "predict")  # POST /pooling
tei_embed = _endpoint("tei.embed", "embed")  # POST /embed


async def rerank(context: Context, call: Call, rest: str) -> Answer:
    """POST /rerank and /v1/rerank. A body with ``texts`` has the form of text-embeddings-inference."""
    raw = await _body(context, call)
    fields = await _read(raw, _rank_fields)
    if fields.texts is msgspec.UNSET:
        return await _answer(context, call, raw, fields, "rerank", "rerank")
    return await _answer(context, call, raw, fields, "tei.rerank", "rerank")


async def tei_predict(context: Context, call: Call, rest: str) -> Answer:
    """POST /predict: classes of texts, or a reranker's scores of pairs."""
    raw = await _body(context, call)
    fields = await _read(raw, _fields)
    # A named model is not checked for these tasks here: the worker knows which of them it has.
    tasks = ("classify", "rerank") if fields.model is None else ("predict",)
    return await _answer(context, call, raw, fields, "tei.predict", *tasks)


async def _body(context: Context, call: Call) -> bytes:
    require_json(call)
    return await within_decode_cost(await read_body(call, context.max_body_bytes, context.body_timeout_s))


async def _read(raw: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The fields that the gateway uses. The worker decodes the whole body, and checks that no key comes twice."""
    if len(raw) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(_decode_fields, raw, decoder)
    return _decode_fields(raw, decoder)


def _decode_fields(raw: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The fields of the decoder's type; it skips all others. Raises InvalidRequest."""
    try:
        return decoder.decode(raw)
    except (ValueError, RecursionError):
        return decode(raw, decoder, texts=False)  # raises an InvalidRequest that names the field


async def _answer(context: Context, call: Call, raw: bytes, fields: _Fields, dialect: str, *tasks: str) -> Answer:
    remote = remote_model_of(context, call, raw)
    if remote is not None:
        path = _RELAYED.get(dialect)
        if path is None:
            raise InvalidRequest(
                f"The model {remote!r} runs on remote servers, to which {call.route} is not relayed; of requests about "
                "texts, /v1/embeddings, /v1/rerank and /v1/score are.",
                param="model",
                code="unsupported_task",
            )

        return await _relayed(context, call, remote, path, fields, raw)
    only = _only_model(context, call, *tasks) if fields.model is None else None
    name = fields.model if only is None else only.name
    model = model_for(context, call, name, bytes(fields.user).decode())
    prediction = PredictFields(
        dialect=dialect, body=raw, priority=fields.priority, timeout=fields.timeout, tokens=len(raw)
    )
    return await predict(context, call, model, prediction, *tasks)


def _only_model(context: Context, call: Call, *tasks: str) -> ModelStatus | None:
    """The model for a request without a model's name: the only model with a task, for the first task with exactly one
    model. None: there is no such task."""
    predictive = [
        status
        for status in visible_models(context, call.principal)
        if status.info is not None and status.info.kind == "predict"
    ]
    for task in tasks:
        able = [status for status in predictive if status.info is not None and task in status.info.tasks]
        if len(able) == 1:
            return able[0]
    return None


# -- relayed requests ----------------------------------------------------------------------------


async def _relayed(context: Context, call: Call, name: str, path: str, fields: _Fields, raw: bytes) -> Answer:
    """Answer for a model with remote replicas alone. The remote server checks the texts."""
    await decode_body(raw, _fields, texts=False)  # the body is not decoded again: repeated keys are refused now
    call.model = name
    terms = terms_of(call, priority=fields.priority, timeout=fields.timeout)
    relay = Relay(path=path, body=raw, headers=forwarded_headers(call))
    cost = cost_elsewhere(len(raw), num_prompts=1, width=0, max_tokens=0)
    return await answer_of(context, call, RelayWork(name, relay, terms, cost, is_random=False))


# -- GET /info -----------------------------------------------------------------------------------


class TeiInfo(msgspec.Struct, frozen=True, kw_only=True):
    """GET /info"""

    model_id: str
    model_dtype: str
    model_type: dict[str, dict[str, dict[str, str]]]
    max_input_length: int
    max_batch_requests: int
    max_client_batch_size: int
    auto_truncate: bool
    version: str


class InfoAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """GET /info: of a text encoder as text-embeddings-inference tells, else as text-generation-inference does."""

    model_id: str
    model_dtype: str
    version: str
    model_type: dict[str, dict[str, dict[str, str]]] | UnsetType = UNSET
    max_input_length: int | UnsetType = UNSET
    max_batch_requests: int | UnsetType = UNSET
    max_client_batch_size: int
    auto_truncate: bool | UnsetType = UNSET
    model_pipeline_tag: str | UnsetType = UNSET
    max_concurrent_requests: int | UnsetType = UNSET
    max_best_of: int | UnsetType = UNSET
    max_stop_sequences: int | UnsetType = UNSET
    max_input_tokens: int | UnsetType = UNSET
    max_total_tokens: int | UnsetType = UNSET


_TEI_KINDS: Final = (("embed", "embedding"), ("rerank", "reranker"), ("classify", "classifier"))


def only_encoder(context: Context, call: Call) -> ModelStatus | None:
    """The only text model, for the first kind with exactly one; None: there is no such kind."""
    return next((model for task, _ in _TEI_KINDS if (model := _only_model(context, call, task)) is not None), None)


async def tei_info(context: Context, call: Call, rest: str) -> Answer:
    """GET /info: the only text model. Raises InvalidRequest, ModelNotFound, Unavailable."""
    found = only_encoder(context, call)
    if found is None:
        check_task(find_model(context, call, None), "embed")
    if found is None or found.info is None:
        raise Unavailable("The model is still loading; try again.")
    info = found.info
    kind = next(word for task, word in _TEI_KINDS if task in info.tasks)
    labels = next((spec.labels for spec in info.outputs if spec.labels), ())
    numbered = {"id2label": {str(i): label for i, label in enumerate(labels)}} if labels else {}
    body = TeiInfo(
        model_id=found.name,
        model_dtype=info.dtype,
        model_type={kind: numbered},
        max_input_length=info.max_model_len,
        max_batch_requests=info.max_batch_size,
        max_client_batch_size=info.max_rows,
        auto_truncate=False,
        version=__version__,
    )
    return Response(200, msgspec.json.encode(body))
