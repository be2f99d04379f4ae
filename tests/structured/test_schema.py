"""The normaliser: the same instances are valid before and after, by two validators that share no code with it."""

from __future__ import annotations

import contextlib
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import jsonschema_rs
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from tests.structured.near_schemas import schemas, values
from tests.tiers import THOROUGH, examples

from inferd.errors import InvalidRequest
from inferd.structured.schema import formats, normalise

AT = "response_format.json_schema.schema"


def _is_valid(schema: Any, value: Any) -> bool:
    is_valid = jsonschema_rs.Draft202012Validator(schema).is_valid(value)
    assert jsonschema.Draft202012Validator(schema).is_valid(value) == is_valid
    return is_valid


@settings(deadline=None, max_examples=examples(300), suppress_health_check=list(HealthCheck))
@given(schemas, st.lists(values, min_size=3, max_size=12))
def test_no_value_becomes_valid(schema: Any, near: list[Any]) -> None:
    try:
        after = normalise(schema, AT)
    except InvalidRequest as refusal:
        event("refused")
        if "no finite value" in refusal.message:
            assert not any(_is_valid(schema, value) for value in near)
        return
    for value in near:
        if _is_valid(after, value):
            event("valid")
            assert _is_valid(schema, value)


@settings(deadline=None, max_examples=examples(300), suppress_health_check=list(HealthCheck))
@given(schemas, st.lists(values, min_size=3, max_size=12))
def test_no_value_is_lost_but_by_the_listed_losses(schema: Any, near: list[Any]) -> None:
    text = repr(schema)
    assume(not any(word in text for word in ("not", "oneOf", "contains", "Contains", "if", "uniqueItems")))
    try:
        after = normalise(schema, AT)
    except InvalidRequest:
        return
    for value in near:
        if _is_valid(schema, value):
            event("valid")
            assert _is_valid(after, value)


DISCRIMINATED = {
    "oneOf": [
        {"properties": {"kind": {"const": "circle"}, "r": {"type": "number"}}, "required": ["kind", "r"]},
        {"properties": {"kind": {"const": "square"}, "side": {"type": "number"}}, "required": ["kind", "side"]},
    ],
    "type": "object",
}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (DISCRIMINATED, [{"kind": "circle", "r": 1}], [{"kind": "circle", "side": 1}, {"kind": "circle"}]),
        ({"oneOf": [{"multipleOf": 5}, {"multipleOf": 3}], "enum": [3, 5, 15]}, [3, 5], [15]),
        ({"not": {"type": ["string", "null"]}}, [1, [], {}], ["", None]),
        ({"not": {"enum": ["a", 1]}}, ["b", "aa", "", 2, []], ["a", 1]),
        ({"not": {"required": ["a"]}, "type": "object"}, [{}, {"b": 1}], [{"a": 1}]),
        ({"not": {"required": ["a", "b"]}, "type": "object"}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
        (
            {
                "properties": {"country": {"enum": ["us", "nl"]}, "code": {"type": "string"}},
                "required": ["country", "code"],
                "if": {"properties": {"country": {"const": "us"}}},
                "then": {"properties": {"code": {"pattern": "^[0-9]+$"}}},
                "else": {"properties": {"code": {"pattern": "^[A-Z]+$"}}},
            },
            [{"country": "us", "code": "12"}, {"country": "nl", "code": "AB"}],
            [{"country": "us", "code": "AB"}, {"country": "nl", "code": "12"}, {"country": "us"}],
        ),
        ({"dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({"dependentSchemas": {"a": {"maxProperties": 1}}}, [{"a": 1}, {"b": 1, "c": 1}], [{"a": 1, "b": 1}]),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"], "c": False}},
            [{"b": 1}, {"a": 1, "b": 1}],
            [{"a": 1}, {"c": 1}],
        ),
        (
            {"type": "array", "items": {"enum": ["x", "y", "z"]}, "uniqueItems": True, "minItems": 2},
            [["x", "y"], ["z", "x", "y"]],
            [["x", "x"], ["x"], ["x", "y", "z", "x"]],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 3}},
            },
            [{}, {"b": 1}],
            [{"a": [1, 2]}, {"a": []}, {"a": [1, 2, 1]}],
        ),
        ({"type": "array", "contains": {"const": 1}}, [[1], [0, 1], [2, 3, 1]], [[], [0]]),
        ({"type": "array", "contains": {"const": 1}, "maxContains": 1}, [[1], [0, 1]], [[1, 1], []]),
        (
            {
                "type": "object",
                "properties": {"a": {"minimum": 1}},
                "patternProperties": {".*": {"type": "integer"}, "^b": {"maximum": 5}},
                "additionalProperties": False,
            },
            [{"a": 1, "b": 5, "c": 9}, {}],
            [{"a": 0}, {"b": 6}, {"c": ""}],
        ),
        (
            {"not": {"patternProperties": {"": {"type": "integer"}}}, "type": "object", "properties": {"a": True}},
            [{"a": "x"}],
            [{"a": 1}, {}, {"b": 2}],
        ),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{"x1": 1}, {}], [{"y": 1}]),
        ({"type": "object", "propertyNames": {"enum": ["p", "q"]}}, [{"p": 1}, {}], [{"y": 1}]),
        (
            {"allOf": [{"properties": {"a": True}}], "properties": {"b": True}, "unevaluatedProperties": False},
            [{"a": 1, "b": 2}, {}],
            [{"c": 1}],
        ),
        (
            {
                "anyOf": [{"required": ["a"], "properties": {"a": True}}, {"properties": {"b": {"type": "integer"}}}],
                "unevaluatedProperties": False,
            },
            [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
            [{"c": 1}, {"a": 1, "b": ""}, {"b": ""}],
        ),
        ({"prefixItems": [True], "unevaluatedItems": False}, [[], [1]], [[1, 2]]),
        ({"const": 2.0}, [2], [2.5]),
        ({"type": "object", "properties": {"a": True, "b": True}, "minProperties": 1}, [{"a": 1}, {"c": 1}], [{}]),
        (
            {"type": "object", "properties": {"a": True, "b": True, "c": True}, "maxProperties": 1},
            [{}, {"a": 1}, {"d": 1}],
            [{"a": 1, "b": 1}, {"a": 1, "d": 1}],
        ),
        (
            {"$id": "http://x/y", "$defs": {"n": {"$anchor": "here", "type": "integer"}}, "$ref": "#here"},
            [1],
            ["", 1.5],
        ),
        (
            {"$id": "http://x/root", "$ref": "item", "$defs": {"i": {"$id": "item", "type": "null"}}},
            [None],
            [1],
        ),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True}, [2], [1, 0]),
        ({"$ref": "#/definitions/a~1b%25", "definitions": {"a/b%": {"type": "null"}}}, [None], [1]),
        ({"format": "anything else", "type": "string"}, ["", "x"], [1]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "2024-13-01", "today"]),
        ({"not": {"pattern": "^x-"}, "type": "string"}, ["", "x", "y-", "-x-"], ["x-", "x-1"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5, "type": "number"}, [0.1, 0.4999], [0, 0.5, 1]),
    ],
)
def test_a_keyword_keeps_its_meaning(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    after = normalise(schema, AT)
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    for value in valid:
        assert validator.is_valid(value), value
        assert _is_valid(after, value), value
    for value in invalid:
        assert not validator.is_valid(value), value
        assert not _is_valid(after, value), value


# fmt: off
NEGATED = [
    {"const": True}, {"enum": [1, "a", None]},
    {"minimum": 1}, {"maximum": 1}, {"exclusiveMinimum": 1}, {"exclusiveMaximum": 1},
    {"minLength": 1}, {"minLength": 2}, {"maxLength": 1},
    {"minItems": 1}, {"minItems": 2}, {"maxItems": 1}, {"items": {"type": "integer"}},
    {"prefixItems": [{"type": "integer"}]}, {"prefixItems": [True, {"const": 1}], "items": {"type": "string"}},
    {"contains": {"const": 1}}, {"contains": {"const": 1}, "minContains": 2}, {"contains": {"const": 1}, "maxContains": 1},
    {"minProperties": 1}, {"minProperties": 2}, {"maxProperties": 0}, {"maxProperties": 1}, {"required": ["a", "b"]},
    {"properties": {"a": {"type": "integer"}, "b": {"const": 2}}},
]
EVERY_KIND = [
    None, True, False, -1, 0, 1, 2.5, 3, "", "a", "ab", "abc",
    [], [1], ["a"], [1, "a"], [1, 1], ["a", 1], ["a", 1, "a"], ["a", 1, 1],
    {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"b": 2}, {"a": 1, "b": 2}, {"a": "x", "b": 1, "c": 1},
]
# fmt: on


@pytest.mark.parametrize("keyword", NEGATED, ids=str)
def test_what_a_keyword_excludes_is_valid_below_not_and_nothing_else(keyword: dict[str, Any]) -> None:
    for schema in ({"not": keyword}, {"not": {"not": keyword}}):
        after, validator = normalise(schema, AT), jsonschema_rs.validator_for(schema)
        valid = [value for value in EVERY_KIND if _is_valid(after, value)]
        assert valid == [value for value in EVERY_KIND if validator.is_valid(value)], schema


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        (["type"], "", "a boolean, not list"),
        (False, "", "no valid value"),
        ({"properties": {"a": {"type": "text"}}}, "/properties/a/type", "one of null, boolean"),
        ({"$ref": "http://elsewhere/x.json"}, "/$ref", "leads out of the document"),
        ({"$ref": "#/$defs/none"}, "/$ref", "leads to nothing"),
        ({"items": {"$ref": "#nowhere"}}, "/items/$ref", "anchor"),
        ({"$ref": "#"}, "", "lead back"),
        ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "/$defs/a", "lead back"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "/properties/a", "no finite value"),
        ({"items": {"const": 1, "type": "null"}, "minItems": 1, "type": "array"}, "/items", "no finite value"),
        ({"additionalProperties": {"$ref": "#"}, "minProperties": 1, "type": "object"}, "", "no finite value"),
        (
            {"patternProperties": {"^[ab]$": {}}, "additionalProperties": False, "minProperties": 3, "type": "object"},
            "",
            "no finite value",
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#"}, "b": True},
                "additionalProperties": False,
                "minProperties": 2,
            },
            "/properties/a",
            "no finite value",
        ),
        ({"type": "string", "pattern": r"^a[^\s\S]$"}, "", "no finite value"),
        (
            {"required": ["p"], "properties": {"p": {"pattern": r"[^\d\D]", "type": "string"}}, "type": "object"},
            "/properties/p",
            "no finite value",
        ),
        ({"type": "string", "pattern": "(?!x)"}, "/pattern", "look-around"),
        ({"type": "string", "pattern": "("}, "/pattern", "the group is not closed"),
        ({"properties": {"a~/b": {"minLength": -1}}}, "/properties/a~0~1b/minLength", "natural number"),
        ({"type": "array", "uniqueItems": True}, "", "uniqueItems over an enum"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "/$schema", "no known draft"),
        ({"enum": list(range(6_000))}, "/enum", "5000"),
        ({"anyOf": []}, "", "no finite value"),
        ({"const": "a\u0000b"}, "", "control characters"),
        ({"type": "string", "pattern": r"^a\x00b$"}, "/pattern", "a control character"),
        ({"type": "string", "pattern": r"^\[a\x01]$"}, "/pattern", "a control character"),
        ({"type": "string", "pattern": r"\p{Foo}"}, "/pattern", r"\p names no property of Unicode"),
        ({"type": "string", "pattern": "(?=a)" + "b" * 999}, "/pattern", "b...' has look-around"),
        ({"type": "string", "const": 1}, "", "no finite value"),
        ({"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "minItems": 2}, "", "no finite value"),
    ],
)
def test_a_refusal_names_field_pointer_and_remedy(schema: Any, place: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        normalise(schema, AT)
    assert refusal.value.param == AT
    assert refusal.value.message.startswith(f"{AT}: at {place}: " if place else f"{AT}: ")
    assert words in refusal.value.message


@THOROUGH
def test_a_long_chain_of_unions_is_read_without_deep_recursion() -> None:
    links: dict[str, Any] = {
        f"d{i}": {
            "oneOf": [
                {"type": "object", "required": ["next"], "properties": {"next": {"$ref": f"#/$defs/d{i + 1}"}}},
                {"type": "object", "required": ["next"], "properties": {"next": {"const": i}}},
            ]
        }
        for i in range(300)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**links, "d300": {"type": "null"}}}
    after = normalise(schema, AT)
    assert _is_valid(after, {"next": {"next": 1}})
    assert not _is_valid(after, {"next": {"next": 0}})


def test_a_recursive_schema_is_written_once() -> None:
    after = normalise({"type": "object", "properties": {"a": {"$ref": "#"}}}, AT)
    assert after["properties"] == {"a": {"$ref": "#/$defs/d0"}}
    assert after["$defs"]["d0"]["properties"] == after["properties"]


def _nested(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "bomb",
    [
        _nested(50_000),
        {"enum": ["x" * 2_000] * 4_000},
        {"enum": [{"a": [10**309]}]},
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(10)]} for i in range(10)]},
        {"properties": {f"p{i}": {"type": "null"} for i in range(60)}, "minProperties": 30, "type": "object"},
        {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(40)}, "$ref": "#/$defs/d0"},
    ],
)
def test_a_bomb_is_refused_or_bounded(bomb: Any) -> None:
    with pytest.raises(InvalidRequest):
        normalise(bomb, AT)


ANY_NUMBER = st.one_of(
    st.sampled_from([10**308, 10**309, -(10**4000), 2**64, -(2**63) - 1, 1e308, 5e-324, -0.0, 1e22]),
    st.integers(-(10**400), 10**400),
    st.floats(allow_nan=False, allow_infinity=False),
)
NUMERIC = [
    "const",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
]
SIZES = ["minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"]


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.sampled_from([*NUMERIC, *SIZES]), ANY_NUMBER, max_size=3), st.booleans())
def test_numbers_of_any_size_are_written_out_or_refused(schema: dict[str, Any], is_negated: bool) -> None:
    with contextlib.suppress(InvalidRequest):
        normalise({"not": schema} if is_negated else schema, AT)


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(formats.PATTERNS)), st.data())
def test_the_pattern_of_a_format_is_within_the_format(name: str, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(formats.pattern(name), fullmatch=True))
    assert jsonschema_rs.Draft202012Validator({"format": name}, validate_formats=True).is_valid(text.rstrip("\n"))
