"""vLLM's classify: each text's class and probabilities; for models that classify tokens, its entities."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.codecs.reading import read
from inferd.predict.codecs.text_wire import Classified, ClassifyRequest, ClassifyResponse, EntityBody
from inferd.predict.codecs.texts import (
    answer_id,
    check_task,
    created_now,
    parameters_of,
    prediction,
    texts_of,
    usage_of,
)
from inferd.predict.contract import Array, Contract
from inferd.predict.runtime import Result
from inferd.types import ModelInfo, Prediction, PredictRequest

_decoder: Final = msgspec.json.Decoder(ClassifyRequest)
_entities: Final = msgspec.json.Decoder(list[EntityBody])


class ClassifyCodec:
    """Dialect ``classify``."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        check_task(contract, "classify")
        wire = read(request.body, _decoder, contract)
        texts = [wire.input] if isinstance(wire.input, str) else wire.input
        raw = None if wire.use_activation is None else not wire.use_activation
        parameters = parameters_of(wire, raw_scores=raw, aggregation_strategy=wire.aggregation_strategy)
        return DecodedRequest(inputs={"text": texts_of(texts, "input", contract)}, parameters=parameters, form=wire)

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        wire = decoded.form
        assert isinstance(wire, ClassifyRequest)
        if "entities" in result.outputs:
            found = result.outputs["entities"].tolist()
            data = [Classified(i, entities=_entities.decode(value)) for i, value in enumerate(found)]
        else:
            data = _classes(result.outputs["probabilities"], labels_of(info))
        body = ClassifyResponse(
            id=answer_id(request, "classify"),
            created=created_now(),
            model=request.model,
            data=data,
            usage=usage_of(result),
        )
        return prediction(body, wire)


def labels_of(info: ModelInfo) -> tuple[str, ...]:
    """Names of the classes; empty where the model has none."""
    return next((spec.labels for spec in info.outputs if spec.labels), ())


def _classes(probabilities: Array, labels: tuple[str, ...]) -> list[Classified]:
    data = []
    for index, row in enumerate(probabilities.tolist()):
        best = max(range(len(row)), key=row.__getitem__)
        data.append(Classified(index, labels[best] if labels else str(best), row, len(row)))
    return data
