"""The limits of a schema's own size. They are checked first, before anything walks the schema recursively."""

from __future__ import annotations

from typing import Any

from inferd.structured.schema.refusal import Path, refuse

MOST_VALUES = 50_000  # of the document, schemas and plain values together
DEEPEST = 100  # levels of the document
MOST_CHARACTERS = 1_000_000  # of all its texts
LARGEST_ENUM = 5_000
MOST_DIGITS = 308  # of an integer; a double holds no longer ones


def check(schema: Any, at: str) -> None:
    values = characters = 0
    rest: list[tuple[Any, Path]] = [(schema, ())]
    while rest:
        value, path = rest.pop()
        values += 1
        if values > MOST_VALUES:
            refuse(at, path[:1], f"the schema has more than {MOST_VALUES} values", "send a smaller schema")
        if len(path) > DEEPEST:
            refuse(at, path[:3], f"the JSON is nested over {DEEPEST} levels", "name parts of it in $defs")
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
            refuse(at, path, f"the integer has over {MOST_DIGITS} digits", "write a smaller number")
        elif isinstance(value, dict):
            characters += sum(map(len, value))
            rest.extend((item, (*path, key)) for key, item in value.items())
        elif isinstance(value, list):
            if len(value) > LARGEST_ENUM:
                problem = f"the list has {len(value)} members"
                refuse(at, path, problem, f"lists of up to {LARGEST_ENUM} are accepted; a pattern may say the same")
            rest.extend((item, (*path, index)) for index, item in enumerate(value))
        if characters > MOST_CHARACTERS:
            refuse(at, path[:1], f"the texts of the schema have over {MOST_CHARACTERS} characters", "shorten them")
