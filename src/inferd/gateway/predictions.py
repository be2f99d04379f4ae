"""Admits requests for predictions of all dialects, and returns the worker's answers.

The endpoints of the dialects (KServe v2, embeddings, rerank, ...) read a few fields of a body (``PredictFields``). The
worker decodes the body, and its answer is sent unchanged. Does not know tensors.
"""

from __future__ import annotations

from typing import Final

from inferd import clock
from inferd.errors import InternalError, InvalidRequest
from inferd.gateway.admission import reserve, terms_of
from inferd.gateway.caching import CacheInputs
from inferd.gateway.call import PENDING, Answer, Call, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import check_end
from inferd.gateway.rescue import router_for
from inferd.gateway.stages import answer_of
from inferd.gateway.terms import Cost, PredictFields
from inferd.gateway.upstream import ModelStatus
from inferd.router.stream import Stream, open_stream
from inferd.types import Output, Prediction, PredictRequest

BYTES_PER_TOKEN: Final = 64  # tensors have no tokens; with this rate the queue's limit in bytes is reached first


async def predict(context: Context, call: Call, model: ModelStatus, fields: PredictFields, *tasks: str) -> Answer:
    """The model's answer in the request's dialect: computed now, repeated for an Idempotency-Key, or cached. The model
    must have one of the ``tasks``.

    Raises InvalidRequest, QuotaExceeded, IdempotencyConflict, and what the router raises.
    """
    check_task(model, *tasks)
    return await answer_of(context, call, PredictWork(model, fields))


class PredictWork:
    """A request for a prediction, for the stages."""

    __slots__ = ("_fields", "_model", "_request")

    _request: PredictRequest

    def __init__(self, model: ModelStatus, fields: PredictFields) -> None:
        self._model = model
        self._fields = fields

    @property
    def model_name(self) -> str:
        return self._model.name

    def identity(self) -> bytes:
        fields = self._fields
        return f"{self._model.name} {fields.version} {fields.dialect} {fields.header_bytes}\n".encode() + fields.body

    def inputs(self, context: Context) -> CacheInputs | None:
        fields, info = self._fields, self._model.info
        if fields.sequence:  # its answer depends on earlier requests of the sequence
            return None
        return CacheInputs(
            self._model.name,
            None if info is None else f"{info.fingerprint} {info.artifact}",
            fields.body,
            f"{fields.dialect} {fields.header_bytes}".encode(),
            stream=False,
            is_random=False,
            timeout=fields.timeout,
            is_exact=True,
        )

    def prepare(self, context: Context, call: Call) -> Cost:
        self._request = predict_request(call, self._model, self._fields)
        return Cost(self._fields.tokens, 0, self._request.num_tokens)

    async def submit(self, context: Context, call: Call) -> Answer:
        call.requests.append(router_for(context.router, call).submit(self._request, call))
        return PENDING


async def compute_prediction(context: Context, call: Call, model: ModelStatus, fields: PredictFields) -> Response:
    """The model's answer, for a call that is not its request's sink. Raises the error of a failed request."""
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
    """Admit a request whose items a task reads, and submit it."""
    call.model = model.name
    call.received_at = clock.now()
    request = predict_request(call, model, fields)
    reserve(context, call, model.name, prompt_tokens=fields.tokens)
    call.submitted_at = clock.now()
    stream = open_stream(router_for(context.router, call), request)
    call.requests.append(stream.request)
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
