"""Cohere's second embed. Texts that are too long are cut unless the request says NONE, as Cohere documents it."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET

from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.codecs.reading import read
from inferd.predict.codecs.text_wire import (
    BilledUnits,
    CohereEmbeddings,
    CohereEmbedRequest,
    CohereEmbedResponse,
    CohereMeta,
)
from inferd.predict.codecs.texts import answer_id, base64_of, check_task, parameters_of, prediction, texts_of
from inferd.predict.contract import Contract
from inferd.predict.runtime import Result
from inferd.types import ModelInfo, Prediction, PredictRequest

_decoder: Final = msgspec.json.Decoder(CohereEmbedRequest)


class CohereEmbedCodec:
    """Dialect ``cohere.embed``."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        check_task(contract, "embed")
        wire = read(request.body, _decoder, contract)
        cuts = wire.truncate != "NONE"
        parameters = parameters_of(wire, dimensions=wire.output_dimension)
        if cuts:
            parameters["truncate"] = True
            parameters.setdefault("truncation_side", "left" if wire.truncate == "START" else "right")
            if wire.max_tokens is not None:
                parameters.setdefault("truncate_prompt_tokens", min(wire.max_tokens, contract.max_tokens))
        return DecodedRequest(
            inputs={"text": texts_of(wire.texts, "texts", contract)}, parameters=parameters, form=wire
        )

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        wire = decoded.form
        assert isinstance(wire, CohereEmbedRequest)
        kinds = wire.embedding_types or ["float"]
        vectors = result.outputs["embedding"]
        embeddings = CohereEmbeddings(
            floats=vectors.tolist() if "float" in kinds else UNSET,
            base64=base64_of(vectors) if "base64" in kinds else UNSET,
        )
        body = CohereEmbedResponse(
            id=answer_id(request, "embed"),
            embeddings=embeddings,
            texts=wire.texts,
            meta=CohereMeta(BilledUnits(input_tokens=result.num_tokens)),
        )
        return prediction(body, wire)
