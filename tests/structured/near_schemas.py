"""Schemas over a few keywords, and values near them: names, numbers and texts that the schemas mention."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "b", "ab")
TEXTS = ("", "a", "b", "ab", "abc")
NUMBERS = (-1, 0, 1, 2, 3, 0.5, 2.5)

scalars = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(TEXTS)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)

_TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")


def _maps(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=2)


def _keywords(inner: st.SearchStrategy[Any], is_exact: bool) -> dict[str, st.SearchStrategy[Any]]:
    some = st.lists(inner, min_size=1, max_size=3)
    small = st.integers(0, 3)
    names = st.lists(st.sampled_from(NAMES), max_size=2, unique=True)
    exact = {
        "type": st.sampled_from(_TYPES) | st.lists(st.sampled_from(_TYPES), min_size=1, max_size=3, unique=True),
        "const": values,
        "enum": st.lists(values, min_size=1, max_size=3),
        "allOf": some,
        "anyOf": some,
        "minimum": st.sampled_from(NUMBERS),
        "maximum": st.sampled_from(NUMBERS),
        "exclusiveMinimum": st.sampled_from(NUMBERS),
        "exclusiveMaximum": st.sampled_from(NUMBERS),
        "multipleOf": st.sampled_from((0.5, 1, 2, 3)),
        "minLength": small,
        "maxLength": small,
        "pattern": st.sampled_from(("^a", "b$", "^ab?$", "b")),
        "items": inner,
        "prefixItems": some,
        "minItems": small,
        "maxItems": small,
        "properties": _maps(inner),
        "patternProperties": st.dictionaries(st.sampled_from(("^a", "^b", ".*")), inner, min_size=1, max_size=2),
        "additionalProperties": inner,
        "required": names,
        "minProperties": small,
        "maxProperties": small,
        "dependentRequired": _maps(names),
        "dependentSchemas": _maps(inner),
        "propertyNames": st.fixed_dictionaries({"maxLength": st.just(1)}) | st.just({"enum": ["a", "b"]}),
        "if": inner,
        "then": inner,
        "else": inner,
    }
    lossy = {
        "oneOf": some,
        "not": inner,
        "contains": inner,
        "minContains": small,
        "maxContains": small,
        "uniqueItems": st.booleans(),
        "unevaluatedProperties": inner,
        "unevaluatedItems": inner,
    }
    return exact if is_exact else {**exact, **lossy}


def _schema(inner: st.SearchStrategy[Any], is_exact: bool) -> st.SearchStrategy[dict[str, Any]]:
    keywords = _keywords(inner, is_exact)
    chosen = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=4, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: keywords[name] for name in names}))


schemas = st.recursive(st.booleans() | _schema(st.booleans(), False), lambda inner: _schema(inner, False), max_leaves=5)
