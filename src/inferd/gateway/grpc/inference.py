"""ModelInfer, and the requests of ModelStreamInfer: a prediction, or a text for a model that generates text.

The worker gets a prediction's message unchanged, and its answer is sent unchanged.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

import msgspec

from inferd.errors import InternalError
from inferd.gateway.call import Answer, Call, Response
from inferd.gateway.context import Context
from inferd.gateway.errors import Unsupported
from inferd.gateway.generation import check_end
from inferd.gateway.grpc.envelope import Envelope
from inferd.gateway.grpc.texts import completed, completions, writes_texts
from inferd.gateway.idempotency import run_idempotent
from inferd.gateway.kserve.models import Served, draw_served_version, find_served, predict_fields_of
from inferd.gateway.kserve.rest import task_of
from inferd.gateway.predictions import PredictFields, check_task, get_or_compute_prediction, submit
from inferd.gateway.upstream import Stream
from inferd.predict.codecs.v2_parameters import parameter_entry
from inferd.protowire import sized
from inferd.types import Output

DIALECT: Final = "v2.grpc"

_CONTENT_TYPE: Final = b"application/grpc"  # of stored answers, so that REST does not repeat them
_ONCE: Final = b"idempotency-key"
_EMPTY_FINAL: Final = "triton_enable_empty_final_response"
_IS_LAST: Final = sized(4, parameter_entry("triton_final_response", True))
_IS_NOT_LAST: Final = sized(4, parameter_entry("triton_final_response", False))


async def model_infer(
    context: Context, call: Call, envelope: Envelope, body: bytes, remaining_s: float | None
) -> bytes:
    """The answer to a ModelInfer call, which may be stored (``idempotency-key`` in the metadata) or cached.

    ``remaining_s``: seconds until the deadline. Raises what ``predictions.predict`` raises, and Unsupported when the
    model does not have exactly one answer.
    """
    served = _find(context, call, envelope)
    if writes_texts(served.status):
        head = answer_head(served, envelope)
        if call.header(_ONCE) is None:
            return await completed(context, call, served, envelope, body, remaining_s, head)

        async def complete() -> Response:
            return _response(await completed(context, call, served, envelope, body, remaining_s, head))

        asks = f"{served.status.name} {served.requested_version} {DIALECT}\n".encode()
        return _body(call, await run_idempotent(context, call, asks + body, served.status.name, complete))
    fields = _predict_fields(served, envelope, body, remaining_s)
    name = served.status.name
    if call.header(_ONCE) is None and not context.caching_of(name).enabled:
        return await only_answer(call, served.name, submit(context, call, served.status, fields))

    async def compute() -> Response:
        return _response(await only_answer(call, served.name, submit(context, call, served.status, fields)))

    return _body(call, await get_or_compute_prediction(context, call, served.status, fields, compute))


def _response(answer: bytes) -> Response:
    """The answer in the form that the idempotency store and the cache keep."""
    return Response(200, answer, _CONTENT_TYPE)


def _body(call: Call, answer: Answer) -> bytes:
    """The answer's body. Its headers go into the trailing metadata."""
    assert isinstance(answer, Response)
    call.common_headers = answer.headers
    return answer.body


async def only_answer(call: Call, name: str, stream: Stream) -> bytes:
    """The one prediction in ``stream``. ``name``: the model, for messages. Raises the error of a failed request, and
    Unsupported when there is not exactly one prediction."""
    answer: bytes | None = None
    async for output in stream:
        if not isinstance(output, Output):
            raise InternalError("A relayed answer came where a prediction was expected. This is a bug.")
        if output.prediction is not None:
            if answer is not None:
                raise Unsupported(
                    f"The model {name!r} answers several times, and ModelInfer has one answer; call ModelStreamInfer."
                )
            answer = output.prediction.body
        if output.end is not None:
            check_end(output.end)
    if answer is None:
        raise Unsupported(f"The model {name!r} had no answer; call ModelStreamInfer, where there may be none.")
    return answer


async def answers(
    context: Context, call: Call, envelope: Envelope, body: bytes, remaining_s: float | None
) -> AsyncGenerator[bytes, None]:
    """Every answer to one request of a stream. Each has the parameter ``triton_final_response``, true for the last one.

    If the last answer was not marked as such, because the worker reported the end after it, a request with
    ``triton_enable_empty_final_response`` gets a final answer without outputs.
    """
    served = _find(context, call, envelope)
    head = answer_head(served, envelope)
    is_over = False
    if writes_texts(served.status):
        async for answer, is_over in completions(context, call, served, envelope, body, remaining_s, head):
            yield answer + (_IS_LAST if is_over else _IS_NOT_LAST)
    else:
        async for output in _submitted(context, call, served, envelope, body, remaining_s):
            if not isinstance(output, Output):
                raise InternalError("A relayed answer came where a prediction was expected. This is a bug.")
            end = output.end
            if end is not None:
                check_end(end)
            if output.prediction is not None:
                is_over = end is not None
                yield output.prediction.body + (_IS_LAST if is_over else _IS_NOT_LAST)
    if not is_over and envelope.parameters.get(_EMPTY_FINAL) is True:
        yield head + _IS_LAST


def answer_head(served: Served, envelope: Envelope) -> bytes:
    """The fields of a ModelInferResponse before its outputs: the model, the version and the request's id."""
    head = sized(1, served.name.encode()) + sized(2, served.version.encode())
    return head + sized(3, envelope.id.encode()) if envelope.id else head


def _find(context: Context, call: Call, envelope: Envelope) -> Served:
    """The version of the model that computes this request. Raises ModelNotFound."""
    return draw_served_version(
        context,
        call,
        find_served(context, call.principal, envelope.model, envelope.version),
        str(envelope.parameters.get("sequence_id") or ""),
    )


def _submitted(
    context: Context, call: Call, served: Served, envelope: Envelope, body: bytes, remaining_s: float | None
) -> Stream:
    return submit(context, call, served.status, _predict_fields(served, envelope, body, remaining_s))


def _predict_fields(served: Served, envelope: Envelope, body: bytes, remaining_s: float | None) -> PredictFields:
    """Raises InvalidRequest."""
    check_task(served.status, task_of(served))
    fields = predict_fields_of(DIALECT, body, envelope.parameters, version=served.requested_version)
    if remaining_s is not None and (fields.timeout is None or remaining_s < fields.timeout):
        fields = msgspec.structs.replace(fields, timeout=remaining_s)
    return fields
