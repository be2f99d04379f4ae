"""Requests for predictions, whatever their dialect: admitted here, decoded by the worker that knows the model.

The endpoints of the dialects (KServe v2, embeddings, rerank, ...) say what they read of a body; the rest goes
through as it came, and the worker's answer goes back as it is. Knows no tensor.
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

BYTES_PER_TOKEN: Final = (
    64  # of tensors, which have none: the queue's bound in bytes is met first, and is the one that is told
)


class PredictFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a dialect's endpoint has read of a request."""

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
    tokens: int = 0  # an upper bound of what it costs a tenant's quota of tokens; 0: it is not counted in tokens


async def predict(
    context: Context, call: Call, model: ModelStatus, fields: PredictFields, *, tasks: tuple[str, ...]
) -> Answer:
    """The model's answer, in the dialect's own words: computed now, or what it was when the same was asked before
    (Idempotency-Key, the cache of models that have one). The model must be able to do one of the ``tasks``.

    Raises InvalidRequest, QuotaExceeded, IdempotencyConflict, what the router raises and what the request failed with.
    """
    check_task(model, *tasks)
    return await get_or_compute_prediction(
        context, call, model, fields, lambda: compute_prediction(context, call, model, fields)
    )


async def get_or_compute_prediction(
    context: Context, call: Call, model: ModelStatus, fields: PredictFields, compute: Callable[[], Awaitable[Response]]
) -> Answer:
    """What ``compute`` answers, or what it answered when the same was asked before."""

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
        if fields.sequence:  # what it is answered depends on what came before
            return await compute()
        return await get_or_compute(context, call, inputs, model.name, compute)

    if call.header(b"idempotency-key") is None:
        return await find_or_compute()
    asks = f"{model.name} {fields.version} {fields.dialect} {fields.header_bytes}\n".encode()
    return await run_idempotent(context, call, asks + fields.body, model.name, find_or_compute)


async def compute_prediction(context: Context, call: Call, model: ModelStatus, fields: PredictFields) -> Response:
    """Likewise, whatever was asked before."""
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
    """A generator was asked where there is place for one answer."""
    return InvalidRequest(
        f"The model {name!r} gives several answers, and this call has one; ask it with gRPC's ModelStreamInfer.",
        param="model",
        code="several_answers",
    )


def no_answer_error(name: str) -> InternalError:
    """A generator that yielded nothing."""
    return InternalError(f"The model {name!r} ended without an answer.")


def check_task(model: ModelStatus, *tasks: str) -> None:
    """Raises InvalidRequest when the model is known and can do none of them."""
    info = model.info
    if info is not None and not any(task in info.tasks for task in tasks):
        raise InvalidRequest(
            f"The model {model.name!r} cannot {' or '.join(tasks).replace('_', ' ')}; it can {', '.join(info.tasks)}.",
            param="model",
            code="unsupported_task",
        )


def submit(context: Context, call: Call, model: ModelStatus, fields: PredictFields) -> Stream:
    """Admit it and put it into the model's queue. The call owns the stream."""
    call.model = model.name
    request = predict_request(call, model, fields)
    reserve(context, call, model.name, prompt_tokens=fields.tokens)
    stream = context.router.submit(request)
    call.streams.append(stream)
    return stream


def predict_request(call: Call, model: ModelStatus, fields: PredictFields) -> PredictRequest:
    """What the router gets. Raises InvalidRequest."""
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
        idempotent=not fields.sequence,  # a state must not be moved on twice
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
    headers = tuple([(name.encode("latin-1"), value.encode("latin-1")) for name, value in prediction.headers])
    return Response(200, prediction.body, prediction.content_type.encode("latin-1"), headers)
