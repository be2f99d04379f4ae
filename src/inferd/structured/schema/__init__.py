"""The schemas that an answer can be held to: what is accepted, and in which form the masks enforce it."""

from __future__ import annotations

from inferd.answer_form import JSON
from inferd.structured.schema import cycles, limits, validation
from inferd.structured.schema.document import Document
from inferd.structured.schema.emission import Emitter
from inferd.structured.schema.expansion import Expander
from inferd.structured.schema.refusal import refuse


def normalise(schema: JSON | bool, at: str) -> JSON:
    """A schema of 2020-12 in the keywords that the masks enforce, with instances of ``schema`` alone.

    It has all of them but for the losses that docs/structured-output.md lists. Raises ``InvalidRequest`` with
    ``param=at`` where there is none; the message has the JSON pointer of the place, the keyword and what would be
    accepted instead.
    """
    if not isinstance(schema, dict | bool):
        refuse(at, (), f"a JSON Schema is an object or a boolean, not {type(schema).__name__}", "send an object")
    if schema is False:
        refuse(at, (), "the schema false has no valid value", "a schema with at least one valid value")
    if schema is True:
        schema = {}
    limits.check(schema, at)
    draft = validation.draft_of(schema, at)
    document = Document(schema, at, draft)
    cycles.check(document)
    normal = Emitter(document, Expander(document)).schema(((document.root, True),))
    validation.check_form(schema, draft, at)  # last, because the refusals above say more
    return normal
