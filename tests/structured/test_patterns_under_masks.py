"""Masks against the independent validator, byte by byte: random answers are valid, and patterns mean the same."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from bench.schemas import Masks, Refused
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tests.structured.near_schemas import schemas, values
from tests.tiers import examples

from inferd.structured.check import Validator


@settings(deadline=None, max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(schemas, st.integers(0, 1_000))
def test_every_answer_under_masks_is_valid(schema: Any, seed: int) -> None:
    try:
        masks, validator = Masks(schema), Validator(schema)
    except Refused:
        event("refused")
        return
    for number in range(8):
        text = masks.walk(random.Random(f"{seed} {number}"))
        if text is not None:
            event("answer")
            assert validator.errors(text) is None, text


@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(schemas, st.lists(values, min_size=3, max_size=8))
def test_no_invalid_value_is_allowed(schema: Any, near: list[Any]) -> None:
    try:
        masks, validator = Masks(schema), Validator(schema)
    except Refused:
        return
    for value in near:
        if masks.allow(value):
            event("allowed")
            assert validator.errors(json.dumps(value)) is None


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (r"^[[a]$", "[a", "]"),
        (r"^[a[b]]$", ["a]", "[]", "b]"], "ab"),
        (r"^[[:alpha:]]$", [":]", "a]"], "ab"),
        (r"^[a&&b]$", "ab&", "c"),
        (r"^[\w--]$", "a-", "+"),
        (r"^[a~~b]$", "a~b", "c"),
        (r"^[]a]$", "]a", "["),
        (r"^[\w\s-]+$", ["a b", "\t-"], ["\x85", "é"]),
        (r"^[^\s]$", "aé", " \n\u3000"),
        (r"^[a\S]$", "aé", " \n\u3000\ufeff"),
        (r"^[^a\S]$", " \n", "a\x85\ufeff"),
        (r"^\S\s$", ["a "], ["\ufeff ", "a\x85"]),
        (r'^[^,"]+$', ["a", "\\\n"], ['"', 'a"b', ","]),
        (r"^[^\\]$", ["a", '"', "\t"], "\\"),
        (r'^[^"\n]$', ["a", "\\", "\t"], '"\n'),
        (r"^[a\x00-\x1f]$", "a\n", '"\\b'),
        (r"^\PP$", "a\n", '"\\!'),
        (r"^[\x01\u{1F600}]\u{1F601}$", ["\U0001f600\U0001f601"], ["\U0001f601"]),
    ],
)
def test_a_pattern_means_what_ecma_262_says(pattern: str, matching: list[str] | str, others: list[str] | str) -> None:
    by_text = {"type": "string", "pattern": pattern}
    by_name = {"type": "object", "patternProperties": {pattern: {"const": 1}}, "additionalProperties": False}
    for masks, value in ((Masks(by_text), lambda text: text), (Masks(by_name), lambda text: {text: 1})):
        for text in matching:
            assert masks.allow(value(text)), text
        for text in others:
            assert not masks.allow(value(text)), text
    for text in matching:
        assert Validator(by_text).errors(json.dumps(text)) is None


def test_a_text_that_is_excluded_may_begin_with_a_quotation_mark() -> None:
    masks = Masks({"type": "string", "not": {"enum": ['"', "\\a"]}})
    assert all(masks.allow(text) for text in ('""', "\\", "\\b", "a", ""))
    assert not any(masks.allow(text) for text in ('"', "\\a"))


@pytest.mark.parametrize(
    "names",
    [
        {"patternProperties": {"^[a-c]$": {"const": 1}}, "additionalProperties": False, "minProperties": 3},
        {"patternProperties": {"^[ab]{2}$": {"const": 1}}, "additionalProperties": False, "minProperties": 2},
        {"propertyNames": {"pattern": "^[0-3]$"}, "minProperties": 2},
        {"propertyNames": {"pattern": "^(?:a|b{1,2}?)$"}, "minProperties": 2},
        {"propertyNames": {"pattern": "^[a-f]{0,3}$", "maxLength": 0}},
        {"patternProperties": {"^[ab]$": {"const": 1}}, "additionalProperties": False},
        {"patternProperties": {"^a?b?$": {"const": 1}, "^(?i:a)$": {}}, "unevaluatedProperties": False},
        {"patternProperties": {"^[ab]$": {"const": 1}}, "additionalProperties": False, "required": ["a", "b"]},
        {
            "not": {"patternProperties": {"^a$": {"type": "integer"}}, "properties": {"a": {"minimum": 1}}},
            "patternProperties": {"^[ab]$": {"enum": [0, 1]}},
            "additionalProperties": False,
        },
        {"patternProperties": {r"^a\.\\b\-#$": {"const": 1}}, "additionalProperties": False},
        {
            "patternProperties": {"^(a|)$": {"const": 1}, "^(?:a|b)$": {"minimum": 0}},
            "properties": {"a": {"type": ["integer", "null"]}, "b": {"const": 2}},
            "additionalProperties": False,
        },
    ],
)
def test_a_property_is_never_begun_whose_name_can_only_be_repeated(names: dict[str, Any]) -> None:
    schema = {"type": "object", **names, "maxProperties": 3}  # the third one of two names is the repeated one
    masks, validator = Masks(schema), Validator(schema)
    for seed in range(150):
        text = masks.walk(random.Random(seed))
        assert text is not None
        assert validator.errors(text) is None, text
