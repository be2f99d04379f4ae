"""Text-embeddings-inference's bodies: embed, rerank, predict. Its answers are bare lists."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from inferd.errors import InvalidRequest
from inferd.predict.codecs.classify import labels_of
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.codecs.reading import read
from inferd.predict.codecs.rerank import decoder as rerank_decoder
from inferd.predict.codecs.rerank import ranking
from inferd.predict.codecs.text_wire import (
    RerankRequest,
    TeiEmbedRequest,
    TeiFields,
    TeiPrediction,
    TeiPredictRequest,
    TeiRank,
)
from inferd.predict.codecs.texts import (
    Pairs,
    check_task,
    encode,
    inputs_of,
    pairs_question,
    parameters_of,
    prediction,
    scores_of,
    side_of,
    texts_of,
    vectors_of,
)
from inferd.predict.contract import Array, Contract
from inferd.predict.runtime import Result
from inferd.types import ModelInfo, Prediction, PredictRequest

_embed_decoder: Final = msgspec.json.Decoder(TeiEmbedRequest)
_predict_decoder: Final = msgspec.json.Decoder(TeiPredictRequest)


class TeiEmbedCodec:
    """Dialect ``tei.embed``: vectors are normalised unless the request says otherwise."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        check_task(contract, "embed")
        wire = read(request.body, _embed_decoder, contract)
        parameters = _parameters(
            wire, normalize=wire.normalize is not False, prompt_name=wire.prompt_name, dimensions=wire.dimensions
        )
        return DecodedRequest(inputs=inputs_of(wire.inputs, "inputs", contract), parameters=parameters, form=wire)

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        return Prediction(encode(vectors_of(result.outputs["embedding"], None)))


class TeiRerankCodec:
    """Dialect ``tei.rerank``: the best first."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        wire = read(request.body, rerank_decoder, contract)
        assert wire.texts is not None, "the gateway tells the two forms of /rerank apart by this field"
        if wire.documents is not None:
            raise InvalidRequest("Send either 'documents' or 'texts', one of the two.", param="texts")
        parameters = parameters_of(wire, truncate=wire.truncate, raw_scores=wire.raw_scores)
        side = side_of(wire.truncation_direction)
        if side is not None:
            parameters["truncation_side"] = side
        return pairs_question(contract, wire, [wire.query], wire.texts, ("query", "texts"), parameters)

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        form = decoded.form
        assert isinstance(form, Pairs)
        wire = form.wire
        assert isinstance(wire, RerankRequest)
        assert wire.texts is not None
        scores, texts = scores_of(decoded, result), wire.texts
        tells = wire.return_text is True
        ranks = [TeiRank(i, scores[i], texts[i]) if tells else TeiRank(i, scores[i]) for i in ranking(scores)]
        return prediction(ranks, wire)


class TeiPredictCodec:
    """Dialect ``tei.predict``: a text or pair alone gets a list of classes, several a list of such lists."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        if not any(spec.name in ("probabilities", "score") for spec in contract.outputs):
            raise InvalidRequest(
                f"This model gives no class of a whole text; it can {', '.join(contract.tasks)}.",
                param="model",
                code="unsupported_task",
            )
        wire = read(request.body, _predict_decoder, contract)
        rows = _rows(wire)
        widths = {len(row) for row in rows}
        if len(widths) != 1 or not widths <= {1, 2}:
            raise InvalidRequest(
                "inputs must be a text, a pair of texts, or a list of lists that all hold one text, or all two.",
                param="inputs",
            )
        inputs: dict[str, Array] = {"text": texts_of([row[0] for row in rows], "inputs", contract)}
        if widths == {2}:
            second = texts_of([row[1] for row in rows], "inputs", contract)
            is_reranker = any(spec.name == "query" for spec in contract.inputs)
            inputs = {"query": inputs["text"], "text": second} if is_reranker else {**inputs, "text_pair": second}
        return DecodedRequest(inputs=inputs, parameters=_parameters(wire, raw_scores=wire.raw_scores), form=wire)

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        wire = decoded.form
        assert isinstance(wire, TeiPredictRequest)
        if "probabilities" in result.outputs:
            values, labels = result.outputs["probabilities"], labels_of(info)
        else:
            values, labels = np.asarray(result.outputs["score"])[:, None], ("LABEL_0",)
        found = [
            [TeiPrediction(row[i], labels[i] if labels else str(i)) for i in ranking(row)] for row in values.tolist()
        ]
        is_one = isinstance(wire.inputs, str) or all(isinstance(entry, str) for entry in wire.inputs)
        return Prediction(encode(found[0] if is_one else found))


def _rows(wire: TeiPredictRequest) -> list[list[str]]:
    value = wire.inputs
    if isinstance(value, str):
        return [[value]]
    texts = [entry for entry in value if isinstance(entry, str)]
    if texts and len(texts) == len(value):
        return [texts]
    return [entry if isinstance(entry, list) else [entry] for entry in value]


def _parameters(wire: TeiFields, **more: object) -> dict[str, object]:
    found = {"truncate": wire.truncate, "truncation_side": side_of(wire.truncation_direction), **more}
    return {name: value for name, value in found.items() if value is not None}
