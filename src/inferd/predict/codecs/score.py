"""vLLM's score: the similarity of texts, one against several or pair by pair."""

from __future__ import annotations

from typing import Final

import msgspec

from inferd.errors import InvalidRequest
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.codecs.reading import read
from inferd.predict.codecs.text_wire import Score, ScoreRequest, ScoreResponse
from inferd.predict.codecs.texts import (
    Pairs,
    answer_id,
    created_now,
    pairs_question,
    parameters_of,
    prediction,
    scores_of,
    usage_of,
)
from inferd.predict.contract import Contract
from inferd.predict.runtime import Result
from inferd.types import ModelInfo, Prediction, PredictRequest

_decoder: Final = msgspec.json.Decoder(ScoreRequest)
_FIRST: Final = ("text_1", "queries", "data_1")
_SECOND: Final = ("text_2", "documents", "items", "data_2")


class ScoreCodec:
    """Dialect ``score``."""

    def decode(self, request: PredictRequest, contract: Contract) -> DecodedRequest:
        wire = read(request.body, _decoder, contract)
        (left, first), (right, second) = _side(wire, _FIRST), _side(wire, _SECOND)
        raw = None if wire.use_activation is None else not wire.use_activation
        return pairs_question(contract, wire, first, second, (left, right), parameters_of(wire, raw_scores=raw))

    def encode(self, request: PredictRequest, decoded: DecodedRequest, result: Result, info: ModelInfo) -> Prediction:
        form = decoded.form
        assert isinstance(form, Pairs)
        data = [Score(index, score) for index, score in enumerate(scores_of(decoded, result))]
        body = ScoreResponse(
            id=answer_id(request, "score"),
            created=created_now(),
            model=request.model,
            data=data,
            usage=usage_of(result),
        )
        return prediction(body, form.wire)


def _side(wire: ScoreRequest, names: tuple[str, ...]) -> tuple[str, list[str]]:
    """The one name under which a side came, and its texts."""
    given = [name for name in names if getattr(wire, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"Send one of {', '.join(names)}, not {' and '.join(given) or 'none'}.",
            param=names[0],
            code="missing_required_parameter" if not given else "invalid_value",
        )
    value: str | list[str] = getattr(wire, given[0])
    return given[0], [value] if isinstance(value, str) else value
