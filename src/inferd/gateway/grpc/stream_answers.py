"""The answers to a request of ModelStreamInfer: an async generator, which mypyc does not compile."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

from inferd.errors import InternalError
from inferd.gateway.call import Call
from inferd.gateway.context import Context
from inferd.gateway.errors import check_end
from inferd.gateway.grpc.envelope import Envelope
from inferd.gateway.grpc.inference import answer_head, find, predict_fields
from inferd.gateway.grpc.texts import completions, note_texts, writes_texts
from inferd.gateway.kserve.served import Served
from inferd.gateway.predictions import submit
from inferd.predict.codecs.v2_parameters import parameter_entry
from inferd.protowire import sized
from inferd.router.stream import Stream
from inferd.types import Output

_EMPTY_FINAL: Final = "triton_enable_empty_final_response"
_IS_LAST: Final = sized(4, parameter_entry("triton_final_response", True))
_IS_NOT_LAST: Final = sized(4, parameter_entry("triton_final_response", False))


async def answers(
    context: Context, call: Call, envelope: Envelope, body: bytes, remaining_s: float | None
) -> AsyncGenerator[bytes, None]:
    """Every answer to one request of a stream. Each has the parameter ``triton_final_response``, true for the last one.

    If the last answer was not marked as such, because the worker reported the end after it, a request with
    ``triton_enable_empty_final_response`` gets a final answer without outputs.
    """
    served = find(context, call, envelope)
    head = answer_head(served, envelope)
    is_over = False
    if writes_texts(served.status):
        note_texts(call)
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


def _submitted(
    context: Context, call: Call, served: Served, envelope: Envelope, body: bytes, remaining_s: float | None
) -> Stream:
    return submit(context, call, served.status, predict_fields(served, envelope, body, remaining_s))
