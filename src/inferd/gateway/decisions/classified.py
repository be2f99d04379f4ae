"""Questions that a classifier answers: those whose answers are labels of the model.

A classifier reads the texts of the input and no instructions. The probability of an answer is that of its label,
divided by the sum over the labels that the question names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from inferd.errors import InternalError, InvalidRequest
from inferd.gateway.caching import CacheInputs
from inferd.gateway.call import Answer, Call, Response
from inferd.gateway.context import Context
from inferd.gateway.decisions.questions import Asked, decision_body
from inferd.gateway.decisions.wire import JSON
from inferd.gateway.errors import check_end, shown
from inferd.gateway.generation.requests import ignored_header
from inferd.gateway.generation.writer import encode
from inferd.gateway.predictions import no_answer_error, predict_request
from inferd.gateway.rescue import router_for
from inferd.gateway.terms import Cost, PredictFields
from inferd.gateway.upstream import ModelStatus
from inferd.predict.codecs.text_wire import ClassifyRequest, ClassifyResponse
from inferd.router.stream import open_stream
from inferd.types import ModelInfo, Output, PredictRequest, Usage

_PAIRS: Final = (("true", "false"), ("yes", "no"))
_classes: Final = msgspec.json.Decoder(ClassifyResponse)


class ClassifierWork:
    """A request for decisions of a classifier, for the stages."""

    __slots__ = ("_asked", "_inputs", "_messages", "_model", "_places", "_raw", "_request")

    _request: PredictRequest

    def __init__(
        self, model: ModelStatus, raw: bytes, inputs: CacheInputs, messages: Sequence[JSON], asked: Sequence[Asked]
    ) -> None:
        """Raises InvalidRequest for a question that names no labels of the model."""
        assert model.info is not None, "its tasks are known"
        self._model = model
        self._raw = raw
        self._inputs = inputs
        self._messages = messages
        self._asked = asked
        labels = _labels_of(model.info)
        self._places = [_places_of(one, f"questions[{i}]", labels) for i, one in enumerate(asked)]

    @property
    def model_name(self) -> str:
        return self._model.name

    def identity(self) -> bytes:
        return self._raw

    def inputs(self, context: Context) -> CacheInputs | None:
        return self._inputs

    def prepare(self, context: Context, call: Call) -> Cost:
        text = "\n".join([message["content"] for message in self._messages])
        body = encode(ClassifyRequest(input=text))
        fields = PredictFields(dialect="classify", body=body, tokens=len(body))
        self._request = predict_request(call, self._model, fields)
        return Cost(fields.tokens, 0, self._request.num_tokens)

    async def submit(self, context: Context, call: Call) -> Answer:
        stream = open_stream(router_for(context.router, call), self._request)
        call.requests.append(stream.request)
        found: ClassifyResponse | None = None
        async for output in stream:
            if isinstance(output, Output):
                if output.prediction is not None:
                    found = _classes.decode(output.prediction.body)
                if output.end is not None:
                    check_end(output.end)
        if found is None:
            raise no_answer_error(self._model.name)
        (classified,) = found.data
        if not isinstance(classified.probs, list):
            raise InvalidRequest(
                f"The model {self._model.name!r} classifies the words of a text, not the text; POST to /classify.",
                param="model",
                code="unsupported_task",
            )
        scores = [[_score(classified.probs, place) for place in places] for places in self._places]
        usage = Usage(prompt_tokens=found.usage.prompt_tokens)
        body = decision_body(self._model.name, self._asked, scores, usage)
        return Response(200, body, headers=ignored_header(call.ignored))


def _score(probabilities: Sequence[float], place: int) -> float:
    if place >= len(probabilities):
        raise InternalError("The classifier gave fewer probabilities than it has labels.")
    return math.log(probabilities[place]) if probabilities[place] > 0 else -math.inf


def _labels_of(info: ModelInfo) -> tuple[str, ...]:
    return next((spec.labels for spec in info.outputs if spec.labels), ())


def _places_of(asked: Asked, at: str, labels: Sequence[str]) -> list[int]:
    """The place of each answer's label. Raises InvalidRequest where the model has no such label."""
    question = asked.question
    if question.choices is None and question.levels is None:
        lower = [label.lower() for label in labels]
        for pair in _PAIRS:
            if all(word in lower for word in pair):
                return [lower.index(word) for word in pair]
        raise InvalidRequest(
            f"{at} is a predicate, which a classifier answers if its labels include true and false, or yes and no. "
            f"This one has {_shown(labels)}; ask a choice among them.",
            param=at,
            code="unsupported_question",
        )
    given = [choice.value for choice in question.choices] if question.choices is not None else list(asked.texts)
    places: list[int] = []
    for value, place in zip(given, asked.at, strict=True):
        text = value if isinstance(value, str) else encode(value).decode()
        if text not in labels:
            raise InvalidRequest(
                f"{place} is {shown(value)}, which is no label of this classifier; it has {_shown(labels)}.",
                param=place,
                code="unsupported_question",
            )
        places.append(labels.index(text))
    return places


def _shown(labels: Sequence[str]) -> str:
    told = ", ".join([shown(label) for label in labels[:20]])
    return told + (", ..." if len(labels) > 20 else "") if labels else "no labels"
