"""OpenAI's embeddings, with vLLM's additions. OpenAI's Python client requests base64 by default."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.codecs.reading import read
from inferd.predict.codecs.text_wire import Embedding, EmbeddingList, EmbeddingRequest
from inferd.predict.codecs.texts import check_task, inputs_of, parameters_of, prediction, usage_of, vectors_of
from inferd.predict.contract import Contract
from inferd.predict.runtime import Result
from inferd.types import ModelInfo, Prediction, PredictRequest

_decoder: Final = msgspec.json.Decoder(EmbeddingRequest)


class OpenAIEmbeddingsCodec:
    """Dialect ``openai.embeddings``."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        check_task(contract, "embed")
        wire = read(request.body, _decoder, contract)
        parameters = parameters_of(
            wire, dimensions=wire.dimensions, normalize=wire.normalize, prompt_name=wire.prompt_name
        )
        return DecodedRequest(inputs=inputs_of(wire.input, "input", contract), parameters=parameters, form=wire)

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        wire = decoded.form
        assert isinstance(wire, EmbeddingRequest)
        vectors = vectors_of(result.outputs["embedding"], wire.encoding_format)
        data = [Embedding(index, vector) for index, vector in enumerate(vectors)]
        return prediction(EmbeddingList(data=data, model=request.model, usage=usage_of(result)), wire)
