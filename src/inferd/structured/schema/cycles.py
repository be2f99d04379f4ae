"""References that lead back to themselves without a step into the value. Such a schema says nothing."""

from __future__ import annotations

from collections.abc import Iterator

from inferd.structured.schema import drafts
from inferd.structured.schema.document import Document, Node
from inferd.structured.schema.drafts import Draft

_ONE = ("not", "if", "then", "else")
_MANY = ("allOf", "anyOf", "oneOf")
_NAMED = ("dependentSchemas", "dependencies")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def check(document: Document) -> None:
    """Refuse the document where one of its schemas applies to a value only if it applies to it already."""
    done: set[Node] = set()
    for start in document.nodes():
        path: list[Node] = []
        stack = [iter((start,))]
        active: set[Node] = set()
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
                if path:
                    active.discard(last := path.pop())
                    done.add(last)
            elif node in active:
                problem = "its references lead back to it without a step into a property or an item"
                document.refuse(node, None, problem, "a reference below properties or items")
            elif node not in done:
                path.append(node)
                active.add(node)
                stack.append(_applied(document, node))


def _applied(document: Document, node: Node) -> Iterator[Node]:
    """The schemas that apply to the same value as the node."""
    schema = node.schema
    for keyword in _REFERENCES:
        if keyword in schema and drafts.has(node.draft, keyword):
            target = document.lead(node, keyword)
            if isinstance(target, Node):
                yield target
    if "$ref" in schema and node.draft < Draft.DRAFT2019:
        return
    for keyword in _ONE:
        if isinstance(value := schema.get(keyword), dict):
            yield document.node(node, value, keyword)
    for keyword in _MANY:
        if isinstance(values := schema.get(keyword), list):
            yield from (document.node(node, v, keyword, n) for n, v in enumerate(values) if isinstance(v, dict))
    for keyword in _NAMED:
        if isinstance(by_name := schema.get(keyword), dict):
            yield from (document.node(node, v, keyword, n) for n, v in by_name.items() if isinstance(v, dict))
