"""Ollama's bodies of requests for vectors. The vectors have length 1."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.codecs.reading import read
from inferd.predict.codecs.text_wire import (
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
)
from inferd.predict.codecs.texts import check_task, inputs_of, parameters_of, prediction
from inferd.predict.contract import Contract
from inferd.predict.runtime import Result
from inferd.types import ModelInfo, Prediction, PredictRequest

_embed_decoder: Final = msgspec.json.Decoder(OllamaEmbedRequest)
_embeddings_decoder: Final = msgspec.json.Decoder(OllamaEmbeddingsRequest)


class OllamaEmbedCodec:
    """Dialect ``ollama.embed``: a text that is too long is cut, unless the request says otherwise."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        check_task(contract, "embed")
        wire = read(request.body, _embed_decoder, contract)
        parameters = parameters_of(
            wire, truncate=wire.truncate is not False, normalize=True, dimensions=wire.dimensions
        )
        texts: list[str | int | list[int]] = [wire.input] if isinstance(wire.input, str) else [*wire.input]
        return DecodedRequest(inputs=inputs_of(texts, "input", contract), parameters=parameters, form=wire)

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        wire = decoded.form
        assert isinstance(wire, OllamaEmbedRequest)
        vectors = result.outputs["embedding"].tolist()
        body = OllamaEmbedResponse(model=request.model, embeddings=vectors, prompt_eval_count=result.num_tokens)
        return prediction(body, wire)


class OllamaEmbeddingsCodec:
    """Dialect ``ollama.embeddings``: one text, one vector. A text that is too long is cut."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        check_task(contract, "embed")
        wire = read(request.body, _embeddings_decoder, contract)
        parameters = parameters_of(wire, truncate=True, normalize=True)
        return DecodedRequest(inputs=inputs_of(wire.prompt, "prompt", contract), parameters=parameters, form=wire)

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        wire = decoded.form
        assert isinstance(wire, OllamaEmbeddingsRequest)
        return prediction(OllamaEmbeddingsResponse(result.outputs["embedding"][0].tolist()), wire)
