"""Admits requests for predictions of all dialects, and returns the worker's answers.

The endpoints of the dialects (KServe v2, embeddings, rerank, ...) read a few fields of a body (``PredictFields``). The
worker decodes the body, and its answer is sent unchanged. Does not know tensors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from inferd.errors import InternalError, InvalidRequest
from inferd.gateway.admission import reserve, terms_of
from inferd.gateway.caching import CacheInputs, get_or_compute
from inferd.gateway.call import Answer, Call, Response
from inferd.gateway.context import Context
from inferd.gateway.generation import check_end
from inferd.gateway.idempotency import run_idempotent
from inferd.gateway.upstream import ModelStatus, Stream
from inferd.types import Output, Prediction, PredictRequest

BYTES_PER_TOKEN: Final = 64  # tensors have no tokens; with this rate the queue's limit in bytes is reached first


class PredictFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request for a prediction that the gateway uses, and its body for the worker."""

    dialect: str
    body: bytes
    header_bytes: int = -1
    version: str = ""
    sequence: str = ""
    sequence_start: bool = False
    sequence_end: bool = False
    may_wait: bool = True
    priority: int | None = None  # as in ``Request``
    timeout: float | None = None  # seconds
    tokens: int = 0  # an upper bound of its tokens, for the tenant's quota; 0: it has no tokens


async def predict(
    context: Context, call: Call, model: ModelStatus, fields: PredictFields, *, tasks: tuple[str, ...]
) -> Answer:
    """The model's answer in the request's dialect: computed now, repeated for an Idempotency-Key, or cached. The model
    must have one of the ``tasks``.

    Raises InvalidRequest, QuotaExceeded, IdempotencyConflict, what the router raises and the error of a failed request.
    """
    check_task(model, *tasks)
    return await get_or_compute_prediction(
        context, call, model, fields, lambda: compute_prediction(context, call, model, fields)
    )


async def get_or_compute_prediction(
    context: Context, call: Call, model: ModelStatus, fields: PredictFields, compute: Callable[[], Awaitable[Response]]
) -> Answer:
    """The result of ``compute``, or the stored or cached answer of an equal earlier request."""

    def inputs() -> CacheInputs:
        info = model.info
        return CacheInputs(
            model.name,
            None if info is None else f"{info.fingerprint} {info.artifact}",
            fields.body,
            f"{fields.dialect} {fields.header_bytes}".encode(),
            stream=False,
            is_random=False,
            timeout=fields.timeout,
            is_exact=True,
        )

    async def find_or_compute() -> Answer:
        if fields.sequence:  # its answer depends on the sequence's earlier requests
            return await compute()
        return await get_or_compute(context, call, inputs, model.name, compute)

    if call.header(b"idempotency-key") is None:
        return await find_or_compute()
    asks = f"{model.name} {fields.version} {fields.dialect} {fields.header_bytes}\n".encode()
    return await run_idempotent(context, call, asks + fields.body, model.name, find_or_compute)


async def compute_prediction(context: Context, call: Call, model: ModelStatus, fields: PredictFields) -> Response:
    """The model's answer, computed now. Raises what ``submit`` raises and the error of a failed request."""
    stream = submit(context, call, model, fields)
    prediction: Prediction | None = None
    async for output in stream:
        if isinstance(output, Output):
            if output.prediction is not None:
                if prediction is not None:
                    raise several_answers_error(model.name)
                prediction = output.prediction
            if output.end is not None:
                check_end(output.end)
    if prediction is None:
        raise no_answer_error(model.name)
    return response_of(prediction)


def several_answers_error(name: str) -> InvalidRequest:
    """The error when a model yields several answers to a call that returns one."""
    return InvalidRequest(
        f"The model {name!r} gives several answers, and this call has one; ask it with gRPC's ModelStreamInfer.",
        param="model",
        code="several_answers",
    )


def no_answer_error(name: str) -> InternalError:
    """The error when a model yields no answer."""
    return InternalError(f"The model {name!r} ended without an answer.")


def check_task(model: ModelStatus, *tasks: str) -> None:
    """Raises InvalidRequest when the model's tasks are known and none of ``tasks`` is among them."""
    info = model.info
    if info is not None and not any(task in info.tasks for task in tasks):
        raise InvalidRequest(
            f"The model {model.name!r} cannot {' or '.join(tasks).replace('_', ' ')}; it can {', '.join(info.tasks)}.",
            param="model",
            code="unsupported_task",
        )


def submit(context: Context, call: Call, model: ModelStatus, fields: PredictFields) -> Stream:
    """Reserve the request's quota and put it into the model's queue. The call owns the stream. Raises InvalidRequest,
    QuotaExceeded and what the router raises."""
    call.model = model.name
    request = predict_request(call, model, fields)
    reserve(context, call, model.name, prompt_tokens=fields.tokens)
    stream = context.router.submit(request)
    call.streams.append(stream)
    return stream


def predict_request(call: Call, model: ModelStatus, fields: PredictFields) -> PredictRequest:
    """The request that is submitted to the router. Raises InvalidRequest."""
    terms = terms_of(call, priority=fields.priority, timeout=fields.timeout)
    return PredictRequest(
        id=call.response_id("predict"),
        model=model.name,
        priority=terms.priority,
        deadline_s=terms.deadline_s,
        first_byte_s=terms.first_byte_s,
        tenant=terms.tenant,
        weight=terms.weight,
        session=fields.sequence or terms.session,
        region=terms.region,
        num_tokens=fields.tokens or max(1, len(fields.body) // BYTES_PER_TOKEN),
        num_bytes=len(fields.body),
        arrived_at=call.started_at,
        idempotent=not fields.sequence,  # a retry would advance the sequence's state twice
        dialect=fields.dialect,
        body=fields.body,
        header_bytes=fields.header_bytes,
        version=fields.version,
        sequence=fields.sequence,
        sequence_start=fields.sequence_start,
        sequence_end=fields.sequence_end,
        may_wait=fields.may_wait,
    )


def response_of(prediction: Prediction) -> Response:
    """The answer of a worker as an HTTP answer."""
    headers = tuple([(name.encode("latin-1"), value.encode("latin-1")) for name, value in prediction.headers])
    return Response(200, prediction.body, prediction.content_type.encode("latin-1"), headers)
