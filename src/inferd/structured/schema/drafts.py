"""The drafts of JSON Schema: which one a document is written in, and which keywords each of them has."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class Draft(IntEnum):
    DRAFT4 = 4
    DRAFT6 = 6
    DRAFT7 = 7
    DRAFT2019 = 2019
    DRAFT2020 = 2020


_URIS = {
    "json-schema.org/draft-04/schema": Draft.DRAFT4,
    "json-schema.org/draft-06/schema": Draft.DRAFT6,
    "json-schema.org/draft-07/schema": Draft.DRAFT7,
    "json-schema.org/draft/2019-09/schema": Draft.DRAFT2019,
    "json-schema.org/draft/2020-12/schema": Draft.DRAFT2020,
    "json-schema.org/schema": Draft.DRAFT2020,
}
DEFAULT = Draft.DRAFT2020

ANNOTATIONS = frozenset(
    [
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "examples",
        "id",
        "readOnly",
        "title",
        "writeOnly",
        "$dynamicAnchor",
        "$recursiveAnchor",
    ]
)
_SINCE = {
    "const": Draft.DRAFT6,
    "contains": Draft.DRAFT6,
    "propertyNames": Draft.DRAFT6,
    "if": Draft.DRAFT7,
    "minContains": Draft.DRAFT2019,
    "maxContains": Draft.DRAFT2019,
    "dependentRequired": Draft.DRAFT2019,
    "dependentSchemas": Draft.DRAFT2019,
    "unevaluatedItems": Draft.DRAFT2019,
    "unevaluatedProperties": Draft.DRAFT2019,
    "prefixItems": Draft.DRAFT2020,
    "$dynamicRef": Draft.DRAFT2020,
}


def named(uri: Any) -> Draft | None:
    """The draft of a ``$schema``; ``None`` where it names none that is known here."""
    if not isinstance(uri, str):
        return None
    return _URIS.get(uri.removeprefix("https://").removeprefix("http://").removesuffix("#"))


def of_document(schema: Any) -> Draft | None:
    """The draft of a document: that of ``$schema``. Without one it is 2020-12, unless the document uses a form that
    only older drafts have. ``None`` where ``$schema`` names a draft that is not known here."""
    if isinstance(schema, dict) and "$schema" in schema:
        return named(schema["$schema"])
    return _oldest_form(schema)


def has(draft: Draft, keyword: str) -> bool:
    """Whether the draft has the keyword. A draft that has it not ignores it."""
    if keyword == "$recursiveRef":
        return draft == Draft.DRAFT2019
    if keyword == "additionalItems":
        return draft < Draft.DRAFT2020
    return draft >= _SINCE.get(keyword, Draft.DRAFT4)


def _oldest_form(schema: Any) -> Draft:
    form = DEFAULT
    rest = [schema]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            if isinstance(value.get("exclusiveMinimum"), bool) or isinstance(value.get("exclusiveMaximum"), bool):
                return Draft.DRAFT4
            if isinstance(value.get("items"), list) or isinstance(value.get("dependencies"), dict):
                form = Draft.DRAFT7
            rest.extend(item for key, item in value.items() if key not in ("enum", "const", "default", "examples"))
        elif isinstance(value, list):
            rest.extend(value)
    return form
