"""ModelInfer: a prediction, or a text for a model that generates text.

The worker gets a prediction's message unchanged, and its answer is sent unchanged.
"""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.errors import InferdError
from inferd.gateway.call import Answer, Call
from inferd.gateway.context import Context
from inferd.gateway.grpc.calls import Calls, capture, time_left
from inferd.gateway.grpc.envelope import Envelope, Envelopes
from inferd.gateway.grpc.rpc import UnaryRpc
from inferd.gateway.grpc.texts import DIALECT, note_texts, text_work, writes_texts
from inferd.gateway.kserve.parameters import predict_fields_of
from inferd.gateway.kserve.rest import task_of
from inferd.gateway.kserve.served import Served, draw_served_version, find_served
from inferd.gateway.operations import PREDICT
from inferd.gateway.predictions import PredictWork, check_task
from inferd.gateway.stages import answer_of
from inferd.gateway.terms import PredictFields
from inferd.http.cost import REFUSAL
from inferd.protowire import sized


class Infer:
    """ModelInfer."""

    name: Final = "ModelInfer"
    scope: Final = "infer"
    operation: Final = PREDICT
    max_bytes: Final = None

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._envelopes = Envelopes()

    def take(self, rpc: UnaryRpc, body: bytes) -> None:
        if not self._calls.has_room(rpc):
            return
        call = self._calls.begin(self, rpc, len(body))
        capture(self._calls.context, call, body)
        try:
            envelope = self._envelopes.read(body)
        except InferdError as error:
            rpc.connection.charge(self._envelopes.cost + REFUSAL)
            call.refuse(error)
            return
        rpc.connection.charge(self._envelopes.cost)
        call.run(self._answer(call, rpc, envelope, body))

    async def _answer(self, call: Call, rpc: UnaryRpc, envelope: Envelope, body: bytes) -> Answer:
        return await model_infer(self._calls.context, call, envelope, body, time_left(rpc))

    def given_up(self, rpc: UnaryRpc, num_bytes: int) -> None:
        self._calls.begin(self, rpc, num_bytes).note_abandoned()

    def take_compressed(self, rpc: UnaryRpc, body: bytes) -> None:
        self._calls.start_compressed(self, rpc, body)


async def model_infer(
    context: Context, call: Call, envelope: Envelope, body: bytes, remaining_s: float | None
) -> Answer:
    """The answer to one ModelInfer: computed now, repeated for an ``idempotency-key`` in the metadata, or cached.

    Raises what ``stages.answer_of`` raises.
    """
    served = find(context, call, envelope)
    if writes_texts(served.status):
        note_texts(call)
        head = answer_head(served, envelope)
        return await answer_of(context, call, await text_work(call, served, envelope, body, remaining_s, head))
    return await answer_of(
        context, call, PredictWork(served.status, predict_fields(served, envelope, body, remaining_s))
    )


def answer_head(served: Served, envelope: Envelope) -> bytes:
    """The fields of a ModelInferResponse before its outputs: the model, the version and the request's id."""
    head = sized(1, served.name.encode()) + sized(2, served.version.encode())
    return head + sized(3, envelope.id.encode()) if envelope.id else head


def find(context: Context, call: Call, envelope: Envelope) -> Served:
    """The version of the model that computes this request. Raises ModelNotFound."""
    return draw_served_version(
        context,
        call,
        find_served(context, call.principal, envelope.model, envelope.version),
        str(envelope.parameters.get("sequence_id") or ""),
    )


def predict_fields(served: Served, envelope: Envelope, body: bytes, remaining_s: float | None) -> PredictFields:
    """Raises InvalidRequest."""
    check_task(served.status, task_of(served))
    fields = predict_fields_of(DIALECT, body, envelope.parameters, version=served.requested_version)
    if remaining_s is not None and (fields.timeout is None or remaining_s < fields.timeout):
        fields = msgspec.structs.replace(fields, timeout=remaining_s)
    return fields
