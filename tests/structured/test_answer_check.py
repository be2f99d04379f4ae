"""The net: which texts the independent validator lets through, and what it says of the others."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.answer_form import JSON, TaggedStructure, TaggedText
from inferd.structured.check import TaggedValidator, Validator


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "3"),
        ({"type": "integer"}, "3.0"),
        ({"type": "object", "required": ["a"]}, ' {"a": null}\n'),
        ({"multipleOf": 0.01}, "19.99"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True}, "4"),
        (True, "[]"),
        ({}, "1e400"),
    ],
)
def test_a_valid_text_has_no_errors(schema: JSON | bool, text: str) -> None:
    assert Validator(schema).errors(text) is None


@pytest.mark.parametrize(
    ("schema", "text", "words"),
    [
        ({}, '{"a": 1, "a": 2}', "same key twice"),
        ({}, "NaN", "NaN"),
        ({}, "-Infinity", "Infinity"),
        ({}, '{"a": 1', "not JSON"),
        ({}, "1 2", "not JSON"),
        ({}, "9" * 5_000, "5000 characters"),
        ({}, "0." + "9" * 5_000, "characters"),
        ({}, "[" * 100_000, "nested too deeply"),
        (False, "1", "does not match"),
        ({"properties": {"a": {"items": {"type": "string"}}}}, '{"a": ["", 7]}', "'/a/1'"),
        ({"uniqueItems": True}, "[1, 1.0]", "/uniqueItems"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True}, "3", "/"),
        ({"multipleOf": 0.01}, "19.991", "/multipleOf"),
    ],
)
def test_the_errors_of_an_invalid_text_name_the_place(schema: JSON | bool, text: str, words: str) -> None:
    assert words in (Validator(schema).errors(text) or "no errors")


def test_errors_quote_nothing_of_the_answer() -> None:
    schema = {"properties": {"name": {"const": "x"}}}
    assert "a secret" not in (Validator(schema).errors('{"name": "a secret"}') or "")


def tagged(*structures: tuple[str, Any, str], triggers: tuple[str, ...]) -> TaggedValidator:
    given = tuple(TaggedStructure(begin=begin, schema=schema, end=end) for begin, schema, end in structures)
    return TaggedValidator(TaggedText(structures=given, triggers=triggers, at="t"))


ANY_TEXT = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
FUNCTIONS = tagged(("<f=a>", ANY_TEXT, "</f>"), ("<f=b>", {"type": "integer", "maximum": 9}, "</f>"), triggers=("<f=",))
DIGITS = tagged(("aab", {"type": "integer", "maximum": 99}, "5"), triggers=("aa",))
SHORT = tagged(("<a>", {"type": "boolean"}, ""), ("[[", {"type": "array"}, "]]"), triggers=("<a", "[["))


@pytest.mark.parametrize(
    ("validator", "text", "is_valid"),
    [
        (FUNCTIONS, "no structure at all <f", True),
        (FUNCTIONS, 'hi <f=a>{"x": "</f>"}</f> and <f=b>7</f>.', True),
        (FUNCTIONS, 'hi <f=a>{"x": 1}</f>', False),
        (FUNCTIONS, "hi <f=b>7</f> <f=b>10</f>", False),
        (FUNCTIONS, "hi <f=b>7", False),
        (FUNCTIONS, "hi <f=b>seven</f>", False),
        (FUNCTIONS, "hi <f=c>7</f>", False),
        (FUNCTIONS, 'hi <f=a>{"x": "", "x": ""}</f>', False),
        (DIGITS, "xaab125", True),
        (DIGITS, "xaab55", True),
        (DIGITS, "xaab1005", False),
        (DIGITS, "xaa", False),
        (SHORT, "<a>truefalse[[[]]]", True),
        (SHORT, "<a>null", False),
    ],
)
def test_the_structures_in_a_text_are_read(validator: TaggedValidator, text: str, is_valid: bool) -> None:
    assert (validator.errors(text) is None) == is_valid
