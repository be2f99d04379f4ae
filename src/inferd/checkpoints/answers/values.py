"""Values of arguments that a notation writes without quotes, as JSON by the schema of their parameter."""

from __future__ import annotations

import ast
import json
from typing import Any

import msgspec

JSON = dict[str, Any]


def escaped(text: str) -> str:
    """Text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def parameter_schema(schema: Any, key: str) -> Any:
    """The schema of one parameter; None: the tool's schema does not name it."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties.get(key) if isinstance(properties, dict) else None


def is_text(schema: Any, key: str) -> bool:
    """Whether a parameter takes strings and nothing else."""
    return _types(parameter_schema(schema, key)) == {"string"}


def value_json(text: str, schema: Any, key: str) -> str:
    """A value as JSON. Text that is no JSON value of an allowed type is a string."""
    allowed = _types(parameter_schema(schema, key))
    stripped = text.strip()
    found = _decoded(stripped)
    if found is not None and (not allowed or _type_of(found[0]) & allowed):
        return found[1]
    return json.dumps(text, ensure_ascii=False)


def _decoded(text: str) -> tuple[Any, str] | None:
    """The value of a text that is JSON, or a literal of Python as some models write it, and its JSON."""
    try:
        return msgspec.json.decode(text), text
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text) if len(text) < 4096 else None
        return None if value is None and text != "None" else (value, json.dumps(value, ensure_ascii=False))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _types(schema: Any) -> set[str]:
    """The types that a schema names; empty: any."""
    if not isinstance(schema, dict):
        return set()
    if "enum" in schema and isinstance(schema["enum"], list):
        return set().union(*(_type_of(value) for value in schema["enum"]))
    if "const" in schema:
        return _type_of(schema["const"])
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {name for name in named if isinstance(name, str)}
    branches = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(branches, list):
        found = [_types(branch) for branch in branches]
        return set().union(*found) if all(found) else set()
    return set()


def _type_of(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}
