"""The fields of OpenAI's dialect that demand a form of the answer, with those of vLLM and llama.cpp.

At most one of them may hold a constraint. The worker compiles it, and refuses what it does not support.
"""

from __future__ import annotations

import re

import msgspec

from inferd.answer_form import (
    JSON,
    AnswerForm,
    Choices,
    Constraint,
    Grammar,
    JsonSchema,
    Regex,
    TaggedStructure,
    TaggedText,
)
from inferd.gateway.body.embedded import decoded_text
from inferd.gateway.errors import invalid, shown
from inferd.gateway.limits import check_strings
from inferd.gateway.openai.wire import GenerationFields, ResponseFormat, StructuredOutputs

ANY_OBJECT: JSON = {"type": "object"}
_MOST_CHOICES, _LONGEST_CHOICE = 10_000, 65_536
_START_OF_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|\??start[ \t]*(?:\[[^\]\n]*\])?[ \t]*:(?!:=))", re.MULTILINE)
_FORMATS = "text, json_object, json_schema, json, regex or structural_tag"


class _TagStructure(msgspec.Struct, frozen=True):
    begin: str
    schema: JSON | bool
    end: str


class _Tags(msgspec.Struct, frozen=True):
    """A structural tag as vLLM writes it."""

    structures: list[_TagStructure]
    triggers: list[str]


def constraint_of(body: GenerationFields) -> Constraint | None:
    """What the answer must be; None: any text. Raises InvalidRequest."""
    spaces = body.guided_whitespace_pattern
    found: list[tuple[str, Constraint]] = []

    def add(field: str, constraint: Constraint | None) -> None:
        if constraint is not None:
            found.append((field, constraint))

    if body.response_format is not None:
        add("response_format", _of_format(body.response_format))
    if body.structured_outputs is not None:
        add("structured_outputs", _of_structured_outputs(body.structured_outputs))
    if body.guided_json is not None:
        schema = _schema(body.guided_json, "guided_json")
        add("guided_json", JsonSchema(schema=schema, at="guided_json", whitespace=spaces))
    if body.guided_regex is not None:
        add("guided_regex", Regex(pattern=_text(body.guided_regex, "guided_regex"), at="guided_regex"))
    if body.guided_choice is not None:
        add("guided_choice", _choices(body.guided_choice, "guided_choice"))
    if body.guided_grammar is not None:
        add("guided_grammar", _grammar(body.guided_grammar, "guided_grammar"))
    if body.structural_tag is not None:
        add("structural_tag", _tags(body.structural_tag, "structural_tag"))
    if body.grammar is not None:
        add("grammar", _grammar(body.grammar, "grammar"))
    if len(found) > 1:
        (first, _), (second, _) = found[:2]
        raise invalid(second, f"{second} cannot be combined with {first}: an answer has one form. Leave one out.")
    return found[0][1] if found else None


def plain_form_of(body: GenerationFields) -> AnswerForm | None:
    """The form of a text without calls and reasoning. Raises InvalidRequest."""
    constraint = constraint_of(body)
    if constraint is None and not body.fit:
        return None
    return AnswerForm(constraint=constraint, fit=bool(body.fit), splits_reasoning=False)


def _of_format(wanted: ResponseFormat) -> Constraint | None:
    at = "response_format"
    match wanted.type:
        case "text":
            return None
        case "json_object" | "json" if wanted.value is not None:
            if wanted.schema is not None:
                raise invalid(f"{at}.value", f"{at} has both value and schema: an answer has one form. Leave one out.")
            return JsonSchema(schema=_schema(wanted.value, f"{at}.value"), at=f"{at}.value")
        case "json":
            raise invalid(f"{at}.value", f"{at} of type json has no schema; send one in value.")
        case "json_object":
            schema = ANY_OBJECT if wanted.schema is None else wanted.schema
            return JsonSchema(schema=schema, at=at if wanted.schema is None else f"{at}.schema")
        case "regex":
            if not isinstance(wanted.value, str):
                raise invalid(f"{at}.value", f"{at}.value must be the pattern of the answer as a text.")
            return Regex(pattern=_text(wanted.value, f"{at}.value"), at=f"{at}.value")
        case "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema is None:
                raise invalid(f"{at}.json_schema", f"{at}.json_schema has no schema; send one in json_schema.schema.")
            return JsonSchema(schema=wanted.json_schema.schema, at=f"{at}.json_schema.schema")
        case "structural_tag":
            return _tags({"structures": wanted.structures, "triggers": wanted.triggers, "format": wanted.format}, at)
        case _:
            raise invalid(
                f"{at}.type", f"{at}.type must be {_FORMATS}, not {shown(wanted.type)}.", "unsupported_parameter"
            )


def _of_structured_outputs(wanted: StructuredOutputs) -> Constraint | None:
    at = "structured_outputs"
    found: list[tuple[str, Constraint]] = []
    spaces = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
    if wanted.json is not None:
        schema = _schema(wanted.json, f"{at}.json")
        found.append(("json", JsonSchema(schema=schema, at=f"{at}.json", whitespace=spaces)))
    if wanted.json_object:
        found.append(("json_object", JsonSchema(schema=ANY_OBJECT, at=f"{at}.json_object", whitespace=spaces)))
    if wanted.regex is not None:
        found.append(("regex", Regex(pattern=_text(wanted.regex, f"{at}.regex"), at=f"{at}.regex")))
    if wanted.choice is not None:
        found.append(("choice", _choices(wanted.choice, f"{at}.choice")))
    if wanted.grammar is not None:
        found.append(("grammar", _grammar(wanted.grammar, f"{at}.grammar")))
    if wanted.structural_tag is not None:
        found.append(("structural_tag", _tags(wanted.structural_tag, f"{at}.structural_tag")))
    if wanted.disable_additional_properties:
        raise invalid(
            f"{at}.disable_additional_properties",
            f"{at}.disable_additional_properties is not supported. Set 'additionalProperties' to false in the schema.",
            "unsupported_parameter",
        )
    if len(found) > 1:
        raise invalid(
            f"{at}.{found[1][0]}",
            f"{at} has both {found[0][0]} and {found[1][0]}: an answer has one form. Leave one out.",
        )
    return found[0][1] if found else None


def _schema(given: str | JSON | bool, at: str) -> JSON | bool:
    """vLLM's clients send a schema also as a text."""
    if not isinstance(given, str):
        return given
    try:
        schema: JSON | bool = msgspec.convert(decoded_text(given), JSON | bool)
    except ValueError as error:
        raise invalid(at, f"{at} is a text that is no JSON Schema: {error}. Send an object.") from error
    return schema


def _text(given: str, at: str) -> str:
    if not given:
        raise invalid(at, f"{at} is empty; leave it out or give it text.")
    return given


def _choices(given: list[str], at: str) -> Choices:
    if not given:
        raise invalid(at, f"{at} is empty; name at least one text or leave it out.")
    check_strings(at, given, _MOST_CHOICES, _LONGEST_CHOICE)
    return Choices(texts=tuple(dict.fromkeys(given)), at=at)


def _grammar(given: str, at: str) -> Grammar:
    """GBNF is told from Lark by its sign of definition, which in Lark can stand in a text alone."""
    is_gbnf = "::=" in given and _START_OF_LARK.search(given) is None
    return Grammar(text=_text(given, at), syntax="gbnf" if is_gbnf else "lark", at=at)


def _tags(given: str | JSON, at: str) -> TaggedText:
    try:
        if isinstance(given, str):
            given = msgspec.convert(decoded_text(given), JSON)
        if given.get("format") is not None:
            raise invalid(
                f"{at}.format",
                f"{at}.format is not supported. Describe the tags by 'structures' and 'triggers'.",
                "unsupported_parameter",
            )
        tags = msgspec.convert(given, _Tags)
    except ValueError as error:  # also a ValidationError, which names the field
        raise invalid(at, f"{at} is no structural tag: {error}. Send 'structures' and 'triggers'.") from error
    check_strings(f"{at}.triggers", tags.triggers, 1024, 1024)
    if not tags.triggers or not tags.structures:
        raise invalid(at, f"{at} needs at least one of 'structures' and one of 'triggers'.")
    return TaggedText(
        structures=tuple(TaggedStructure(begin=s.begin, schema=s.schema, end=s.end) for s in tags.structures),
        triggers=tuple(tags.triggers),
        at=at,
    )
