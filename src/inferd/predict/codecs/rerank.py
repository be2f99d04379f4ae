"""Documents in the order of their relevance to a query: Jina's and vLLM's form, and Cohere's second."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.errors import InvalidRequest
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.codecs.reading import read
from inferd.predict.codecs.text_wire import (
    BilledUnits,
    CohereMeta,
    CohereRerankResponse,
    Document,
    Ranked,
    RerankRequest,
    RerankResponse,
)
from inferd.predict.codecs.texts import (
    Pairs,
    answer_id,
    pairs_question,
    parameters_of,
    prediction,
    scores_of,
    usage_of,
)
from inferd.predict.contract import Contract
from inferd.predict.runtime import Result
from inferd.types import ModelInfo, Prediction, PredictRequest

decoder: Final = msgspec.json.Decoder(RerankRequest)


class RerankCodec:
    """Dialect ``rerank``."""

    tells_documents = True
    cuts = False

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        wire = read(request.body, decoder, contract)
        if wire.documents is None:
            raise InvalidRequest(
                "The required field 'documents' is missing; add it.",
                param="documents",
                code="missing_required_parameter",
            )
        cuts = self.cuts if wire.truncation is None else wire.truncation
        parameters = parameters_of(wire, truncate=cuts or wire.truncate or None, raw_scores=wire.raw_scores)
        return pairs_question(contract, wire, [wire.query], _texts(wire.documents), ("query", "documents"), parameters)

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        wire = _wire(decoded)
        assert wire.documents is not None
        scores = scores_of(decoded, result)
        tells = self.tells_documents if wire.return_documents is None else wire.return_documents
        texts = _texts(wire.documents)
        ranked = [
            Ranked(i, scores[i], Document(texts[i])) if tells else Ranked(i, scores[i])
            for i in ranking(scores)[: wire.top_n or None]
        ]
        return prediction(self._body(request, ranked, result), wire)

    def _body(self, request: PredictRequest, ranked: list[Ranked], result: Result) -> msgspec.Struct:
        return RerankResponse(
            id=answer_id(request, "rerank"), model=request.model, results=ranked, usage=usage_of(result)
        )


class CohereRerankCodec(RerankCodec):
    """Dialect ``cohere.rerank``: documents are returned only on demand, and cut when they are too long."""

    tells_documents = False
    cuts = True

    def _body(self, request: PredictRequest, ranked: list[Ranked], result: Result) -> msgspec.Struct:
        return CohereRerankResponse(
            id=answer_id(request, "rerank"), results=ranked, meta=CohereMeta(BilledUnits(search_units=1))
        )


def ranking(scores: list[float]) -> list[int]:
    """Places from the best score to the worst; equal scores keep their order."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])


def _wire(decoded: DecodedRequest) -> RerankRequest:
    form = decoded.form
    assert isinstance(form, Pairs)
    assert isinstance(form.wire, RerankRequest)
    return form.wire


def _texts(documents: list[str | Document]) -> list[str]:
    return [document if isinstance(document, str) else document.text for document in documents]
