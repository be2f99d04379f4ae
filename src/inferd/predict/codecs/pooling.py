"""vLLM's pooling: any output of a text model as rows of numbers."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.codecs.reading import read
from inferd.predict.codecs.text_wire import Pooled, PoolingRequest, PoolingResponse
from inferd.predict.codecs.texts import (
    answer_id,
    check_task,
    created_now,
    inputs_of,
    parameters_of,
    prediction,
    usage_of,
    vectors_of,
)
from inferd.predict.contract import Contract
from inferd.predict.runtime import Result
from inferd.types import ModelInfo, Prediction, PredictRequest

_decoder: Final = msgspec.json.Decoder(PoolingRequest)
_OUTPUTS: Final = ("embedding", "probabilities")


class PoolingCodec:
    """Dialect ``pooling``."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        if not any(spec.name in _OUTPUTS for spec in contract.outputs):
            check_task(contract, "pool")
        wire = read(request.body, _decoder, contract)
        raw = None if wire.use_activation is None else not wire.use_activation
        parameters = parameters_of(wire, dimensions=wire.dimensions, raw_scores=raw)
        return DecodedRequest(inputs=inputs_of(wire.input, "input", contract), parameters=parameters, form=wire)

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        wire = decoded.form
        assert isinstance(wire, PoolingRequest)
        (array,) = [result.outputs[name] for name in _OUTPUTS if name in result.outputs]
        data = [Pooled(index, row) for index, row in enumerate(vectors_of(array, wire.encoding_format))]
        body = PoolingResponse(
            id=answer_id(request, "pool"), created=created_now(), model=request.model, data=data, usage=usage_of(result)
        )
        return prediction(body, wire)
