"""A schema document: its schemas as nodes, the URIs and anchors that name them, and what a reference leads to.

References lead to places inside of the document. Nothing is ever fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn
from urllib.parse import unquote, urldefrag, urljoin

from inferd.structured.schema import drafts
from inferd.structured.schema.drafts import Draft
from inferd.structured.schema.refusal import Path, refuse

ONE = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
MANY = frozenset(["allOf", "anyOf", "oneOf", "prefixItems", "items"])
NAMED = frozenset(["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"])


class Node:
    """One schema object at its place. A node is equal to itself alone."""

    __slots__ = ("base", "draft", "number", "path", "schema")

    def __init__(self, schema: dict[str, Any], path: Path, base: str, draft: Draft, number: int) -> None:
        self.schema = schema
        self.path = path
        self.base = base
        self.draft = draft
        self.number = number


class Document:
    def __init__(self, schema: dict[str, Any], at: str, draft: Draft) -> None:
        self.at = at
        self._nodes: dict[int, Node] = {}  # by the identity of the schema object
        self._made: list[dict[str, Any]] = []  # schema objects that no document holds, kept for their identity
        self._resources: dict[str, Node] = {}  # by absolute URI without fragment
        self._anchors: dict[tuple[str, str], Node] = {}
        self._dynamic: dict[str, list[Node]] = {}  # by the name of the anchor
        self._bases: list[tuple[Path, str]] = []
        self.root = self._add(schema, (), "", draft)
        self._resources.setdefault("", self.root)

    def refuse(self, node: Node, keyword: str | None, problem: str, remedy: str) -> NoReturn:
        refuse(self.at, node.path if keyword is None else (*node.path, keyword), problem, remedy)

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def node(self, parent: Node, schema: Any, *steps: str | int) -> Node:
        """The node of a sub-schema (an object) that ``parent`` holds at ``steps``."""
        known = self._nodes.get(id(schema))
        return known if known is not None else self._add(schema, (*parent.path, *steps), parent.base, parent.draft)

    def made(self, parent: Node, schema: dict[str, Any], *steps: str | int) -> Node:
        """A node for a schema object that stands for a part of ``parent``. Its references are those of ``parent``."""
        self._made.append(schema)
        node = Node(schema, (*parent.path, *steps), parent.base, parent.draft, len(self._nodes))
        self._nodes[id(schema)] = node
        return node

    def lead(self, node: Node, keyword: str) -> Node | bool:
        """What the reference at ``keyword`` of a node leads to."""
        reference = node.schema[keyword]
        if not isinstance(reference, str):
            self.refuse(node, keyword, f"{keyword} is not a text", "write a URI reference, such as '#/$defs/name'")
        uri, fragment = urldefrag(urljoin(node.base, reference) if reference else node.base)
        resource = self._resources.get(uri)
        if resource is None:
            self.refuse(
                node, keyword, f"{keyword} {reference!r} leads out of the document", "put what it names into $defs"
            )
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchored(node, keyword, uri, fragment)
        return self._pointed(node, keyword, resource, fragment)

    def _anchored(self, node: Node, keyword: str, uri: str, name: str) -> Node:
        target = self._anchors.get((uri, name))
        if target is None:
            self.refuse(node, keyword, f"no schema of the document has the anchor {name!r}", "add it, or correct it")
        if keyword == "$dynamicRef" and target.schema.get("$dynamicAnchor") == name and len(self._dynamic[name]) > 1:
            problem = f"several schemas have the $dynamicAnchor {name!r}, so that $dynamicRef has no fixed target"
            self.refuse(node, keyword, problem, "a $ref, or a $dynamicAnchor that one schema of the document has")
        return target

    def _pointed(self, node: Node, keyword: str, resource: Node, fragment: str) -> Node | bool:
        value: Any = resource.schema
        path: Path = resource.path
        holder = resource
        for step in fragment.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and step in value:
                value = value[step]
                path = (*path, step)
            elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
                value = value[int(step)]
                path = (*path, int(step))
            else:
                problem = f"{keyword} {node.schema[keyword]!r} leads to nothing in the document"
                self.refuse(node, keyword, problem, "add what it names to $defs, or correct the pointer")
            if isinstance(value, dict):
                holder = self._nodes.get(id(value), holder)
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            self.refuse(node, keyword, f"{keyword} leads to a {_kind(value)}", "a reference must lead to a schema")
        known = self._nodes.get(id(value))
        return known if known is not None else self._add(value, path, holder.base, holder.draft)

    def _add(self, schema: dict[str, Any], path: Path, base: str, draft: Draft) -> Node:
        first: Node | None = None
        rest = [(schema, path, base, draft)]
        while rest:
            schema, path, base, draft = rest.pop()
            if id(schema) in self._nodes:
                continue
            if path and "$schema" in schema and "$id" in schema:
                other = drafts.named(schema["$schema"])
                if other is None:
                    refuse(self.at, path, f"$schema {schema['$schema']!r} is unknown", "drafts 4 to 2020-12")
                draft = other
            base = self._identify(schema, path, base, draft)
            node = Node(schema, path, base, draft, len(self._nodes))
            first = first or node
            self._nodes[id(schema)] = node
            self._name(node)
            rest.extend((item, (*path, *steps), base, draft) for item, steps in subschemas(schema))
        assert first is not None
        return first

    def _identify(self, schema: dict[str, Any], path: Path, base: str, draft: Draft) -> str:
        name = schema.get("id" if draft == Draft.DRAFT4 else "$id")
        if not isinstance(name, str) or ("$ref" in schema and draft < Draft.DRAFT2019):
            return base
        uri, fragment = urldefrag(urljoin(base, name))
        return base if fragment and not uri else uri

    def _name(self, node: Node) -> None:
        schema = node.schema
        keyword = "id" if node.draft == Draft.DRAFT4 else "$id"
        if isinstance(name := schema.get(keyword), str) and not ("$ref" in schema and node.draft < Draft.DRAFT2019):
            fragment = urldefrag(name).fragment
            if fragment and not fragment.startswith("/"):
                self._anchors.setdefault((node.base, fragment), node)
            if urldefrag(name).url:
                self._resources.setdefault(node.base, node)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if node.draft >= Draft.DRAFT2019 and isinstance(anchor := schema.get(keyword), str):
                self._anchors.setdefault((node.base, anchor), node)
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(anchor, []).append(node)


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Path]]:
    """The schema objects directly inside of one, each with the steps that lead to it."""
    for keyword, value in schema.items():
        if keyword in ONE and isinstance(value, dict):
            yield value, (keyword,)
        if keyword in MANY and isinstance(value, list):
            yield from ((item, (keyword, index)) for index, item in enumerate(value) if isinstance(item, dict))
        if keyword in NAMED and isinstance(value, dict):
            yield from ((item, (keyword, name)) for name, item in value.items() if isinstance(item, dict))


def _kind(value: Any) -> str:
    return {str: "text", list: "list", type(None): "null"}.get(type(value), "number")
