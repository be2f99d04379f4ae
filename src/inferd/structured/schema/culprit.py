"""Which part of a schema the mask engine refuses, where it refuses what the schema was rewritten to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from inferd import clock
from inferd.answer_form import JSON
from inferd.errors import InvalidRequest
from inferd.structured.schema import drafts, validation
from inferd.structured.schema.document import Document, Node, subschemas
from inferd.structured.schema.emission import Emitter
from inferd.structured.schema.expansion import Expander
from inferd.structured.schema.keywords import is_constraint
from inferd.structured.schema.refusal import Path

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def smallest(schema: JSON, at: str, is_refused: Callable[[JSON], bool], seconds: float) -> Path:
    """The path of a keyword that alone makes the engine refuse the smallest sub-schema that it refuses.

    ``is_refused`` tells it of a rewritten schema. When the processor time is over, the path is that of a larger sub-schema.
    """
    end = clock.computing() + seconds
    document = Document(schema, at, validation.draft_of(schema, at))

    def refuses(node: Node) -> bool:
        if clock.computing() > end:
            return False
        try:
            return is_refused(Emitter(document, Expander(document)).schema(((node, True),)))
        except InvalidRequest:  # alone it has no value, or is refused before the engine sees it
            return False

    node, seen = document.root, {document.root}
    while True:
        inner = next((each for each in _inner(document, node) if each not in seen and refuses(each)), None)
        if inner is None:
            break
        seen.add(inner)
        node = inner
    left = {word: value for word, value in node.schema.items() if is_constraint(node, word)}
    for keyword in sorted(left, key="type".__eq__):
        rest = {word: value for word, value in left.items() if word != keyword}
        if clock.computing() > end:
            break
        if not refuses(document.made(node, rest)):
            return (*node.path, keyword)
        left = rest
    return node.path


def _inner(document: Document, node: Node) -> Iterator[Node]:
    """The schemas directly below one, and those that its references lead to."""
    for value, steps in subschemas(node.schema):
        yield document.node(node, value, *steps)
    for keyword in _REFERENCES:
        if keyword in node.schema and drafts.has(node.draft, keyword):
            target = document.lead(node, keyword)
            if isinstance(target, Node):
                yield target
