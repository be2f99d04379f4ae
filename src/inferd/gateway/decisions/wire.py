"""The bodies of requests and answers of the Decisions API, as structs.

``questions`` and ``evidence`` check what the fields mean. ``None`` stands for a field that was absent or null. Unknown
fields are dropped and listed (``generation/fields.py``).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import UNSET, Meta

from inferd.gateway.generation.items import ITEM_VARIANTS, PART_VARIANTS
from inferd.gateway.generation.variants import Variants
from inferd.predict.codecs.text_wire import Ignored

JSON = dict[str, Any]

# -- requests ----------------------------------------------------------------------------------


class EvidencePart(msgspec.Struct, frozen=True):
    """One part of a content: input_text, output_text, refusal, or input_json with ``data``."""

    type: str
    text: str | None = None
    refusal: str | None = None
    data: JSON | list[JSON] | None = None
    variants: ClassVar[Variants] = PART_VARIANTS


class EvidenceItem(msgspec.Struct, frozen=True):
    """One item of the input: a message, function_call, custom_tool_call, or the output of a call."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[EvidencePart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[EvidencePart] | None = None
    variants: ClassVar[Variants] = ITEM_VARIANTS


class ChoiceOption(msgspec.Struct, frozen=True):
    value: str | bool
    description: str | None = None


class ScoreLevel(msgspec.Struct, frozen=True):
    label: str
    description: str | None = None


class Question(msgspec.Struct, frozen=True):
    """A predicate, a choice (with ``choices``) or a score (with ``levels``, the lowest first)."""

    type: str
    instructions: str | list[EvidencePart]
    name: str | None = None
    choices: list[ChoiceOption] | None = None
    levels: list[ScoreLevel] | None = None


class DecisionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/decisions"""

    model: str | None = None
    input: str | list[EvidenceItem]
    questions: Annotated[list[Question], Meta(description="1 to 400 questions.")]
    prompt_cache_key: str | None = None
    prompt_cache_options: Ignored = UNSET
    safety_identifier: Ignored = UNSET


decision_decoder: Final = msgspec.json.Decoder(DecisionRequest)

# -- answers -----------------------------------------------------------------------------------


class PredicateAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="predicate", tag_field="type"):
    name: str | None
    probability: float  # that the statement is true


class ChoiceProbability(msgspec.Struct, frozen=True):
    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="choice", tag_field="type"):
    name: str | None
    choice: str | bool
    confidence: float  # the probability of ``choice``
    probabilities: list[ChoiceProbability]


class LevelProbability(msgspec.Struct, frozen=True):
    label: str
    value: int  # the level's place, from 0
    probability: float


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="score", tag_field="type"):
    name: str | None
    score: float  # the expectation of ``value``
    confidence: float  # the probability of the likeliest level
    probabilities: list[LevelProbability]


DecisionAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class DecisionUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The answers, in the order of the questions."""

    model: str
    answers: list[DecisionAnswer]
    usage: DecisionUsage
