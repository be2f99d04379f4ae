"""Why the mask engine does not take a form, in words of the form and with the place in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from inferd.answer_form import JSON, Grammar, JsonSchema, Regex, TaggedText
from inferd.errors import InvalidRequest
from inferd.structured import lark, lark_reader, regex
from inferd.structured.faults import Fault
from inferd.structured.grammar_text import LONGEST_PATTERN, Form, Tries, at_structure, json_part, written_part
from inferd.structured.schema import culprit
from inferd.structured.schema.refusal import pointer

_REMEDY: Final = "Correct it, or send a simpler one."
_MOST_SECONDS_LOCATING = 0.7  # to find the part of a schema that the mask engine refuses
_OVERLAP: Final = re.compile(r"regexes /(.*)/ and /(.*)/ are not disjoint")
_NO_TEXT: Final = "no text satisfies it"
_ENGINE_WORDS: Final = (
    ("NoExt", _NO_TEXT),
    ("items; max", "more parts may come next than a form may have"),
    ("grammar.symbols", "it is larger than a form may be"),
    ("too many", "it needs more states than a form may have"),
    ("too big", "it is larger than a form may be"),
    ("too large", "it is larger than a form may be"),
    ("limit", "it is larger than a form may be"),
    ("fuel", "it is larger than a form may be"),
    ("TooComplex", "it is larger than a form may be"),
)
"""Parts of the mask engine's messages, and what is told instead."""
_SCHEMA_WORDS: Final = (
    (
        "lookarounds",
        "a pattern asks by '^' or '$' for an end within the text",
        "'^' and '$' at the ends of the pattern",
    ),
    (
        "if regex is empty",
        "patterns, formats and lengths of one text are too complex together",
        "one pattern that says all",
    ),
    (
        "required property",
        "no mask enforces a required property together with a pattern that its name matches",
        "the property in 'properties', and patterns that do not match its name",
    ),
    (
        "intersection stack",
        "patterns of names are joined with the schemas of too many properties",
        "patterns that match no named property",
    ),
    (
        "schema too large",
        "patterns of names are joined with too many schemas of values",
        "patterns that match no named property, or fewer alternatives in the values",
    ),
)
"""The same for a part of a schema, with what is accepted."""


def refusal_of(form: Form, problem: str, tries: Tries) -> InvalidRequest:
    """The refusal of a form for which the mask engine has this message, with the place in the form."""
    constraint = form.constraint
    fault: Fault | None = None
    if isinstance(constraint, Regex) and "invalid regex" in problem:
        fault = regex.fault_of(constraint.pattern, problem)
    elif isinstance(constraint, Grammar) and constraint.syntax == "lark":
        fault = lark.fault_of(constraint.text, problem, lark_reader.without_endless(constraint.text))
    if fault is not None:
        return InvalidRequest(f"{form.at}: {fault}.", param=form.at, code="invalid_grammar")
    for schema, at in _schemas_of(form):
        own = tries([json_part("answer", schema, at)])
        if own is not None:
            return _refusal_of_schema(schema, at, own, tries)
    return refusal(form, _told(problem))


def _schemas_of(form: Form) -> Iterator[tuple[JSON, str]]:
    """The schemas of a form, each with the field that holds it."""
    constraint, frame = form
    schemas: list[tuple[JSON | bool, str]] = []
    if isinstance(constraint, JsonSchema):
        schemas.append((constraint.schema, constraint.at))
    elif isinstance(constraint, TaggedText):
        schemas += [(each.schema, at_structure(constraint, n)) for n, each in enumerate(constraint.structures)]
    if frame is not None:
        schemas += [(schema, at) for _, schema, at in frame.schemas]
    yield from ((schema, at) for schema, at in schemas if isinstance(schema, dict))


def _refusal_of_schema(schema: JSON, at: str, problem: str, tries: Tries) -> InvalidRequest:
    path = culprit.smallest(
        schema, at, lambda normal: tries([written_part("answer", normal)]) is not None, _MOST_SECONDS_LOCATING
    )
    told, remedy = _of_schema(problem)
    place = pointer(path)
    where = f"{at}: at {place}" if place else at
    return InvalidRequest(f"{where}: {told}; {remedy}", param=at, code="unsupported_schema")


def _of_schema(problem: str) -> tuple[str, str]:
    """What is wrong with a part of a schema, and what is accepted, from the mask engine's message."""
    overlap = _OVERLAP.search(problem)
    if overlap is not None:
        names = " and ".join(repr(pattern[:LONGEST_PATTERN]) for pattern in overlap.groups())
        return f"a name may match both {names}", "patterns of which no two match the same name, or one pattern for both"
    for part, told, remedy in _SCHEMA_WORDS:
        if part in problem:
            return told, remedy
    return _told(problem), "a simpler schema in this place"


def _told(problem: str) -> str:
    """The mask engine's message in words of the form."""
    return next((told for part, told in _ENGINE_WORDS if part in problem), "no mask enforces it")


def refusal(form: Form, told: str) -> InvalidRequest:
    constraint = form.constraint
    is_schema = constraint is None or isinstance(constraint, JsonSchema)
    return InvalidRequest(
        f"{form.at}: {told}. {_REMEDY}",
        param=form.at,
        code="unsupported_schema" if is_schema else "invalid_grammar",
    )
