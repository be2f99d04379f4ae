"""Questions as messages with the answers that they allow, and the answers of the API from their scores.

The probability of an answer is the model's probability of this text and an end after it, divided by the sum over all
answers that the question allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from inferd.gateway.decisions.evidence import text_of_parts
from inferd.gateway.decisions.wire import (
    ChoiceAnswer,
    ChoiceOption,
    ChoiceProbability,
    Decision,
    DecisionAnswer,
    DecisionUsage,
    InputTokensDetails,
    LevelProbability,
    PredicateAnswer,
    Question,
    ScoreAnswer,
)
from inferd.gateway.errors import invalid, shown
from inferd.gateway.generation.writer import encode
from inferd.types import AnswerSet, Usage

MAX_QUESTIONS: Final = 400
MAX_ANSWERS: Final = 255
MAX_NAME_CHARS: Final = 256
_TYPES: Final = ("predicate", "choice", "score")
_TRUE: Final = ("true", "false")


class Asked(NamedTuple):
    """A question that was checked. ``texts``: the answers that it allows; ``at``: the field of each."""

    question: Question
    instructions: str
    texts: tuple[str, ...]
    at: tuple[str, ...]

    def answer_set(self) -> AnswerSet:
        return AnswerSet(
            messages=[{"role": "user", "content": _wording(self)}],
            answers=self.texts,
            at=self.at,
        )


def asked_of(questions: Sequence[Question]) -> list[Asked]:
    """The questions, checked. Raises InvalidRequest, which names the field."""
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        raise invalid("questions", f"questions must have 1 to {MAX_QUESTIONS} entries, not {len(questions)}.")
    return [_checked(question, f"questions[{i}]") for i, question in enumerate(questions)]


def answer_of(asked: Asked, scores: Sequence[float]) -> DecisionAnswer:
    """The answer to a question. ``scores``: of each text, the logarithm of a number that its probability is
    proportional to."""
    question, probabilities = asked.question, normalised(scores)
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    if question.choices is not None:
        return ChoiceAnswer(
            name=question.name,
            choice=question.choices[best].value,
            confidence=probabilities[best],
            probabilities=[
                ChoiceProbability(one.value, probability)
                for one, probability in zip(question.choices, probabilities, strict=True)
            ],
        )
    if question.levels is not None:
        return ScoreAnswer(
            name=question.name,
            score=math.fsum(value * probability for value, probability in enumerate(probabilities)),
            confidence=probabilities[best],
            probabilities=[
                LevelProbability(level.label, value, probability)
                for value, (level, probability) in enumerate(zip(question.levels, probabilities, strict=True))
            ],
        )
    return PredicateAnswer(name=question.name, probability=probabilities[0])


def decision_body(model: str, asked: Sequence[Asked], scores: Sequence[Sequence[float]], usage: Usage) -> bytes:
    """The answers to all questions. ``scores``: of each question, as ``answer_of`` takes them."""
    return encode(
        Decision(
            model=model,
            answers=[answer_of(one, found) for one, found in zip(asked, scores, strict=True)],
            usage=DecisionUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(usage.cached_tokens),
                total_tokens=usage.prompt_tokens,
            ),
        )
    )


def normalised(scores: Sequence[float]) -> list[float]:
    """Numbers with the sum 1 that are proportional to the exponentials of ``scores``; equal where all are 0."""
    most = max(scores)
    if most == -math.inf:
        return [1.0 / len(scores)] * len(scores)
    weights = [math.exp(score - most) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


# -- checks ------------------------------------------------------------------------------------


def _checked(question: Question, at: str) -> Asked:
    if question.type not in _TYPES:
        raise invalid(f"{at}.type", f"{at}.type must be one of {', '.join(_TYPES)}, not {shown(question.type)}.")
    if question.name is not None and len(question.name) > MAX_NAME_CHARS:
        raise invalid(
            f"{at}.name", f"{at}.name may have at most {MAX_NAME_CHARS} characters, not {len(question.name)}."
        )
    instructions = text_of_parts(question.instructions, f"{at}.instructions")
    if not instructions.strip():
        raise invalid(
            f"{at}.instructions",
            f"{at}.instructions is empty; say what is asked about the input.",
            "missing_required_parameter",
        )
    _check_kind(question, at)
    if question.choices is not None:
        _check_count(len(question.choices), f"{at}.choices")
        texts = _texts_of(question.choices)
        places = tuple([f"{at}.choices[{j}].value" for j in range(len(texts))])
    elif question.levels is not None:
        _check_count(len(question.levels), f"{at}.levels")
        texts = tuple([level.label for level in question.levels])
        places = tuple([f"{at}.levels[{j}].label" for j in range(len(texts))])
    else:
        return Asked(question, instructions, _TRUE, (at, at))
    first: dict[str, str] = {}
    for text, place in zip(texts, places, strict=True):
        other = first.setdefault(text, place)
        if other != place:
            raise invalid(place, f"{place} is {shown(text)}, as {other} is; each must be unique.")
    return Asked(question, instructions, texts, places)


def _check_kind(question: Question, at: str) -> None:
    """Check that a question has the answers of its type and no others."""
    for kind, name, given in (("choice", "choices", question.choices), ("score", "levels", question.levels)):
        if question.type == kind and given is None:
            raise invalid(f"{at}.{name}", f"{at}.{name} is missing; a {kind} needs it.", "missing_required_parameter")
        if question.type != kind and given is not None:
            raise invalid(
                f"{at}.{name}", f"{at}.{name} belongs to a {kind}, not to a {question.type}. Remove it, or set type."
            )


def _check_count(count: int, at: str) -> None:
    if not 2 <= count <= MAX_ANSWERS:
        raise invalid(at, f"{at} must have 2 to {MAX_ANSWERS} entries, not {count}.")


def _texts_of(choices: Sequence[ChoiceOption]) -> tuple[str, ...]:
    """The text of each value. Beside a boolean, strings are written as JSON writes them, so that no string looks like a
    boolean."""
    if not any(isinstance(choice.value, bool) for choice in choices):
        return tuple([str(choice.value) for choice in choices])
    return tuple([encode(choice.value).decode() for choice in choices])


# -- the wording -------------------------------------------------------------------------------


def _wording(asked: Asked) -> str:
    question = asked.question
    if question.choices is not None:
        told = "Choose one of these values. Answer with the value alone."
        listed = _listed(asked.texts, [choice.description for choice in question.choices])
        return f"{asked.instructions}\n\n{told}\n{listed}"
    if question.levels is not None:
        listed = _listed(asked.texts, [level.description for level in question.levels])
        told = "Choose one of these levels, which go from the lowest to the highest. Answer with the level alone."
        return f"{asked.instructions}\n\n{told}\n{listed}"
    told = "Is this true of the text before? Answer with true or false alone."
    return f"{asked.instructions}\n\n{told}"


def _listed(texts: Sequence[str], descriptions: Sequence[str | None]) -> str:
    return "\n".join(
        [
            f"- {text}" if description is None else f"- {text}: {description}"
            for text, description in zip(texts, descriptions, strict=True)
        ]
    )
