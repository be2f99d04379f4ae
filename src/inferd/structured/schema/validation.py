"""What the drafts themselves say of a document: the check of a schema's own form, and an independent validator."""

from __future__ import annotations

from typing import Any

import jsonschema_rs

from inferd.structured.schema import drafts, formats
from inferd.structured.schema.drafts import Draft
from inferd.structured.schema.refusal import refuse

_CLASSES = {
    Draft.DRAFT4: jsonschema_rs.Draft4Validator,
    Draft.DRAFT6: jsonschema_rs.Draft6Validator,
    Draft.DRAFT7: jsonschema_rs.Draft7Validator,
    Draft.DRAFT2019: jsonschema_rs.Draft201909Validator,
    Draft.DRAFT2020: jsonschema_rs.Draft202012Validator,
}
_ANNOTATIONS = {
    name: lambda _: True
    for name in [
        "idn-email",
        "idn-hostname",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "uri-reference",
        "uri-template",
        "color",
        "currency",
    ]
    if not formats.is_enforced(name)
}


_MOST_BACKTRACKS = 10_000  # of a pattern with look-around or back-references, which no mask enforces


def validator(schema: Any, draft: Draft) -> Any:
    """A validator by other code than the normaliser's and the masks'. Formats that no mask enforces are annotations."""
    options = jsonschema_rs.FancyRegexOptions(backtrack_limit=_MOST_BACKTRACKS)
    return _CLASSES[draft](schema, formats=_ANNOTATIONS, validate_formats=True, offline=True, pattern_options=options)


def draft_of(schema: Any, at: str) -> Draft:
    draft = drafts.of_document(schema)
    if draft is None:
        remedy = "drafts 4, 6, 7, 2019-09 and 2020-12 are accepted"
        refuse(at, ("$schema",), f"$schema {schema['$schema']!r} names no known draft", remedy)
    return draft


def check_form(schema: Any, draft: Draft, at: str) -> None:
    """Refuse a document that the draft's own schema does not allow, or whose references lead to nothing."""
    try:
        validator(schema, draft)
    except jsonschema_rs.ValidationError as error:
        refuse(at, error.instance_path, error.message.split("\n")[0], "correct it")
