"""The endpoints of KServe v2 (Open Inference Protocol) over REST, with Triton's extensions.

Tensors are passed to the worker unchanged, as JSON or binary, after a compressed body was decompressed. Shared memory
is not supported, and its routes do not exist.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from inferd.errors import InvalidRequest
from inferd.gateway.admin import health
from inferd.gateway.body.compression import decompressed, encoding_of, wanted_encoding
from inferd.gateway.body.decode import OFF_LOOP_BYTES, decode_body
from inferd.gateway.call import Answer, Call, Response, read_body, require_json
from inferd.gateway.context import Context
from inferd.gateway.errors import UnsupportedMediaType, printable
from inferd.gateway.generation.writer import encode
from inferd.gateway.kserve import models as kserve
from inferd.gateway.kserve.generate import text_decoder, text_work
from inferd.gateway.kserve.parameters import read_infer
from inferd.gateway.kserve.repository import load_model, unload_model
from inferd.gateway.kserve.served import (
    Served,
    draw_served_version,
    find_served,
    is_ready,
    served_models,
    versions_served,
)
from inferd.gateway.kserve.statistics import statistics_of
from inferd.gateway.kserve.wire import Done, IndexRequest, Live, ModelReady, Ready, RepositoryRequest, Value
from inferd.gateway.predictions import predict
from inferd.gateway.stages import answer_of

BINARY_TYPE: Final = b"application/octet-stream"
MAX_REPOSITORY_BYTES: Final = 64 * 1024
_HEADER_LENGTH: Final = b"inference-header-content-length"
_OF_TABLES: Final = " A table as text/csv is taken by POST /invocations."
_VERSIONS: Final = "/versions/"
_RETRY: Final = ((b"retry-after", b"1"),)


_index_decoder: Final = msgspec.json.Decoder(IndexRequest)
_repository_decoder: Final = msgspec.json.Decoder(RepositoryRequest)


# -- the server ----------------------------------------------------------------------------------


async def live(context: Context, call: Call, rest: str) -> Answer:
    return Response(200, encode(Live()))


async def ready(context: Context, call: Call, rest: str) -> Answer:
    if health.is_ready(context.router):
        return Response(200, encode(Ready(True)))
    return Response(503, encode(Ready(False)), headers=_RETRY)


async def server_metadata(context: Context, call: Call, rest: str) -> Answer:
    return Response(200, encode(kserve.server_metadata(context)))


# -- models --------------------------------------------------------------------------------------


def served_of(context: Context, call: Call, rest: str) -> Served:
    """The model, or the version of it, that a path names. Raises ModelNotFound."""
    name, between, version = rest.rpartition(_VERSIONS)
    served = (
        find_served(context, call.principal, name, version) if between else find_served(context, call.principal, rest)
    )
    call.model = served.status.name
    return served


async def model_metadata(context: Context, call: Call, rest: str) -> Answer:
    served = served_of(context, call, rest)
    return Response(200, encode(kserve.model_metadata(context, call.principal, served)))


async def model_ready(context: Context, call: Call, rest: str) -> Answer:
    served = served_of(context, call, rest)
    status = served.status
    ready = is_ready(served)
    report = ModelReady(served.name, served.version, ready, kserve.condition_of(status), status.detail)
    return Response(200 if ready else 503, encode(report), headers=() if ready else _RETRY)


async def model_config(context: Context, call: Call, rest: str) -> Answer:
    return Response(200, encode(kserve.model_configuration(context, served_of(context, call, rest))))


async def model_statistics(context: Context, call: Call, rest: str) -> Answer:
    if _VERSIONS in rest:
        models = [served_of(context, call, rest)]
    else:
        models = versions_served(context, call.principal, rest)
    call.encoding = wanted_encoding(call)
    return Response(200, encode(statistics_of(context, models)))


async def statistics(context: Context, call: Call, rest: str) -> Answer:
    call.encoding = wanted_encoding(call)
    return Response(200, encode(statistics_of(context, served_models(context, call.principal))))


# -- inference -----------------------------------------------------------------------------------


async def infer(context: Context, call: Call, rest: str) -> Answer:
    """POST /v2/models/{model}/infer. Raises what ``predictions.predict`` raises, and errors of the body."""
    header_bytes = header_length(call)
    body = await read_tensor_body(context, call, is_binary=header_bytes >= 0)
    served = served_of(context, call, rest)
    if len(body) <= OFF_LOOP_BYTES:
        fields = read_infer(body, header_bytes, served.requested_version)
    else:
        info = served.status.info
        most = info.max_json if info is not None else None
        fields = await asyncio.to_thread(read_infer, body, header_bytes, served.requested_version, most=most)
    served = draw_served_version(context, call, served, fields.sequence)
    call.encoding = wanted_encoding(call)
    return await predict(context, call, served.status, fields, task_of(served))


def task_of(served: Served) -> str:
    """The task that a request with tensors needs: the model's first one, because every model that takes tensors accepts
    such requests."""
    info = served.status.info
    return info.tasks[0] if info is not None and info.kind == "predict" and info.tasks else "predict"


def header_length(call: Call) -> int:
    """The length in bytes of the body's JSON part, which binary tensors follow. -1: the whole body is JSON. Raises
    InvalidRequest."""
    value = call.header(_HEADER_LENGTH)
    if value is None:
        return -1
    if not value.isdigit() or len(value) > 18 or call.head.count(_HEADER_LENGTH) > 1:
        raise InvalidRequest(
            f"The header Inference-Header-Content-Length is {printable(value.decode('latin-1'))!r}; one number of "
            "bytes is expected.",
            param="inference-header-content-length",
        )
    return int(value)


async def read_tensor_body(context: Context, call: Call, *, is_binary: bool = False, is_table: bool = False) -> bytes:
    """A request's body, decompressed. ``is_table``: its Content-Type is text/csv and was checked. Raises
    UnsupportedMediaType, BodyTooLarge, InvalidRequest."""
    encoding = encoding_of(call)
    if not is_table:
        check_media(call, is_binary=is_binary)
    body = await read_body(call, context.max_body_bytes, context.body_timeout_s)
    return await decompressed(body, encoding, context.max_body_bytes)


def check_media(call: Call, *, is_binary: bool) -> None:
    """Check that the Content-Type allows tensors. Raises UnsupportedMediaType."""
    content_type = call.header(b"content-type")
    if content_type is not None:
        media = content_type.partition(b";")[0].strip().lower()
        is_json = media in (b"", b"application/json") or (
            media.startswith(b"application/") and media.endswith(b"+json")
        )
        # Web pages may send some other types across origins without a preflight request.
        if not is_json and not (is_binary and media == BINARY_TYPE):
            shown = printable(media.decode("latin-1"))
            raise UnsupportedMediaType(
                f"Content-Type {shown!r} is not supported; send application/json, or application/octet-stream with the "
                "header Inference-Header-Content-Length." + _OF_TABLES * (media == b"text/csv")
            )


async def text(context: Context, call: Call, rest: str) -> Answer:
    """POST /v2/models/{model}/generate. Raises InferdError for every failure."""
    return await _written(context, call, rest, is_stream=False)


async def text_stream(context: Context, call: Call, rest: str) -> Answer:
    """POST /v2/models/{model}/generate_stream. Raises InferdError for every failure before the first piece."""
    return await _written(context, call, rest, is_stream=True)


async def _written(context: Context, call: Call, rest: str, *, is_stream: bool) -> Answer:
    require_json(call)
    raw = await read_body(call, context.max_body_bytes, context.body_timeout_s)
    body = await decode_body(raw, text_decoder)
    served = draw_served_version(context, call, served_of(context, call, rest))
    return await answer_of(context, call, await text_work(call, served, body, raw, is_stream=is_stream))


# -- the repository ------------------------------------------------------------------------------


async def repository_index(context: Context, call: Call, rest: str) -> Answer:
    body = await _small_body(context, call)
    request = await decode_body(body, _index_decoder) if body else IndexRequest()
    models = kserve.repository_index(context, call.principal, ready=request.ready)
    call.encoding = wanted_encoding(call)
    return Response(200, encode(models))


async def repository_load(context: Context, call: Call, rest: str) -> Answer:
    """POST /v2/repository/models/{model}/load. Raises what ``load_model`` raises."""
    parameters = await _repository_parameters(context, call)
    await load_model(context, call.principal, rest, parameters)
    return Response(200, encode(Done()))


async def repository_unload(context: Context, call: Call, rest: str) -> Answer:
    """POST /v2/repository/models/{model}/unload. Raises what ``unload_model`` raises."""
    parameters = await _repository_parameters(context, call)
    await unload_model(context, call.principal, rest, parameters)
    return Response(200, encode(Done()))


async def _repository_parameters(context: Context, call: Call) -> dict[str, Value]:
    body = await _small_body(context, call)
    return (await decode_body(body, _repository_decoder)).parameters or {} if body else {}


async def _small_body(context: Context, call: Call) -> bytes:
    body = await read_body(call, MAX_REPOSITORY_BYTES, context.body_timeout_s)
    if body:
        require_json(call)
    return body
