"""What is tried, and the work of a trial. The same limits hold in the worker, where a form that passed is compiled."""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from inferd.answer_form import JSON, JsonSchema
from inferd.errors import InvalidRequest
from inferd.structured.check import Validator
from inferd.structured.grammar_text import Form
from inferd.structured.matching import grammar_of, matcher_of
from inferd.structured.schema import normalise
from inferd.structured.spelling import LongestTokens

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class TrialVocabulary(msgspec.Struct, dict=True):
    """The tokens of a model for a trial. Texts are spelled by the longest tokens, whatever the tokenizer does."""

    texts: list[bytes]  # as llguidance expects them
    eos_ids: frozenset[int]
    missing: str

    @cached_property
    def tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(LongestTokens(self.texts, self.eos_ids), eos_token=sorted(self.eos_ids))  # type: ignore[arg-type]


class Task(msgspec.Struct, omit_defaults=True):
    """A form to be compiled, or schemas to be normalised, each with the field of the request that holds it."""

    form: Form | None = None
    schemas: tuple[tuple[JSON | bool, str], ...] = ()


class Refusal(msgspec.Struct):
    """An InvalidRequest."""

    message: str
    param: str | None
    code: str | None

    @classmethod
    def of(cls, error: InvalidRequest) -> Refusal:
        return cls(error.message, error.param, error.code)

    def error(self) -> InvalidRequest:
        return InvalidRequest(self.message, param=self.param, code=self.code)


class Result(msgspec.Struct, omit_defaults=True):
    """The form's grammar and what compiling it takes; or why there is none."""

    grammar: str = ""
    compile_s: float = 0.0  # of processor time
    refusals: tuple[Refusal | None, ...] = ()  # of the form, or of each schema


def do(task: Task, vocabulary: TrialVocabulary) -> Result:
    if task.form is None:
        return Result(refusals=tuple(_refusal(schema, at) for schema, at in task.schemas))
    try:
        grammar = grammar_of(task.form, vocabulary)
        constraint, frame = task.form
        for _, schema in frame.tools if frame is not None else ():
            Validator(schema)
        if isinstance(constraint, JsonSchema):
            Validator(constraint.schema)
        began = time.process_time()
        matcher_of(task.form, grammar, vocabulary)
    except InvalidRequest as error:
        return Result(refusals=(Refusal.of(error),))
    return Result(grammar, time.process_time() - began)


def _refusal(schema: JSON | bool, at: str) -> Refusal | None:
    try:
        normalise(schema, at)
    except InvalidRequest as error:
        return Refusal.of(error)
    return None
