"""What each keyword of a schema says of an instance of one type, as a formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from inferd.structured import regex
from inferd.structured.schema import drafts, formats, patterns
from inferd.structured.schema.arrays import Contains, ItemCount, Items, Unique
from inferd.structured.schema.document import Document, Node
from inferd.structured.schema.drafts import Draft
from inferd.structured.schema.formulas import (
    ANYTHING,
    NOTHING,
    Atom,
    Conjunction,
    Formula,
    Holds,
    Kind,
    all_of,
    any_of,
    both,
    negation,
)
from inferd.structured.schema.numbers import AtLeast, AtMost, MultipleOf, NumberIn, exact
from inferd.structured.schema.objects import Absent, Names, Properties, PropertyCount, Required, Shape
from inferd.structured.schema.strings import Format, Length, Pattern, TextIn

TYPES: dict[str, Kind] = {
    "null": "null",
    "boolean": "boolean",
    "number": "number",
    "integer": "number",
    "string": "string",
    "array": "array",
    "object": "object",
}
MOST_CASES = 64  # of what `unevaluatedProperties` and `unevaluatedItems` may depend on
MOST_ALTERNATIVES = 200  # of one oneOf
MOST_ITEMS = 10_000


@dataclass(frozen=True, slots=True)
class BooleanIn(Atom):
    values: frozenset[bool]

    def negated(self) -> Formula:
        return BooleanIn(frozenset((True, False)) - self.values)

    def narrow(self, booleans: frozenset[bool], _: object) -> frozenset[bool] | None:
        return booleans & self.values or None


class Reader:
    """Reads the nodes of a document. ``is_disjoint`` tells whether provably no value of a type meets two schemas."""

    def __init__(self, document: Document, is_disjoint: Callable[[Conjunction, Conjunction, Kind], bool]) -> None:
        self._document = document
        self._is_disjoint = is_disjoint
        self._read: dict[tuple[Node, Kind], Formula] = {}

    def formula(self, node: Node, kind: Kind) -> Formula:
        known = self._read.get((node, kind))
        if known is None:
            known = self._read[node, kind] = self._formula(node, kind)
        return known

    def _formula(self, node: Node, kind: Kind) -> Formula:
        schema = node.schema
        if "$ref" in schema and node.draft < Draft.DRAFT2019:
            return self._reference(node, "$ref")
        readers: dict[_Read, None] = {}  # one may read several keywords
        for keyword in schema:
            if keyword in _KEYWORDS and drafts.has(node.draft, keyword):
                of_kind, read = _KEYWORDS[keyword]
                if of_kind is None or kind == of_kind:
                    readers[read] = None
        return all_of(*(read(self, node, kind) for read in readers))

    # Sub-schemas

    def sub(self, node: Node, value: Any, *steps: str | int) -> Formula:
        """A sub-schema of the same instance."""
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            self._document.refuse(node, None, f"{steps[0]} holds no schema", "write an object or a boolean")
        return Holds(self._document.node(node, value, *steps))

    def part(self, node: Node, value: Any, *steps: str | int) -> Conjunction:
        """A sub-schema of a part of the instance."""
        formula = self.sub(node, value, *steps)
        if isinstance(formula, bool):
            return ANYTHING if formula else NOTHING
        assert isinstance(formula, Holds)
        return ((formula.node, True),) if constrains(formula.node) else ANYTHING

    def _list(self, node: Node, keyword: str) -> list[Any]:
        value = node.schema[keyword]
        if not isinstance(value, list):
            self._document.refuse(node, keyword, f"{keyword} is not a list", "write a list")
        return value

    def _map(self, node: Node, keyword: str) -> dict[str, Any]:
        value = node.schema.get(keyword, {})
        if not isinstance(value, dict):
            self._document.refuse(node, keyword, f"{keyword} is not an object", "write an object")
        return value

    def count(self, node: Node, keyword: str) -> int:
        value = node.schema[keyword]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self._document.refuse(node, keyword, f"{keyword} is not a natural number", "write 0, 1, 2 or more")
        return value

    def _number(self, node: Node, keyword: str) -> Any:
        value = node.schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._document.refuse(node, keyword, f"{keyword} is not a number", "write a number")
        return exact(value)

    def _names(self, node: Node, keyword: str, value: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._document.refuse(node, keyword, f"{keyword} is not a list of names", "write a list of texts")
        return cast(list[str], value)

    # In-place applicators

    def _static(self, node: Node, _: Kind) -> Formula:
        return self._reference(node, "$ref")

    def _dynamic(self, node: Node, _: Kind) -> Formula:
        return self._reference(node, "$dynamicRef")

    def _reference(self, node: Node, keyword: str) -> Formula:
        target = self._document.lead(node, keyword)
        return target if isinstance(target, bool) else Holds(target)

    def _recursive(self, node: Node, _: Kind) -> Formula:
        return self._reference(node, "$recursiveRef")

    def _all(self, node: Node, _: Kind) -> Formula:
        return all_of(*(self.sub(node, each, "allOf", n) for n, each in enumerate(self._list(node, "allOf"))))

    def _any(self, node: Node, _: Kind) -> Formula:
        return any_of(*(self.sub(node, each, "anyOf", n) for n, each in enumerate(self._list(node, "anyOf"))))

    def _one(self, node: Node, kind: Kind) -> Formula:
        options = [self.sub(node, each, "oneOf", n) for n, each in enumerate(self._list(node, "oneOf"))]
        options = [option for option in options if option is not False]
        if len(options) > MOST_ALTERNATIVES:
            problem = f"oneOf has {len(options)} alternatives"
            self._document.refuse(node, "oneOf", problem, f"up to {MOST_ALTERNATIVES}, or anyOf")
        exclusions: list[list[Formula]] = [[] for _ in options]
        for first, option in enumerate(options):
            for second in range(first):
                if not self._apart(option, options[second], kind):
                    exclusions[first].append(negation(options[second]))
                    exclusions[second].append(negation(option))
        return any_of(*(all_of(option, *others) for option, others in zip(options, exclusions, strict=True)))

    def _apart(self, first: Formula, second: Formula, kind: Kind) -> bool:
        if not isinstance(first, Holds) or not isinstance(second, Holds):
            return False
        return self._is_disjoint(((first.node, True),), ((second.node, True),), kind)

    def _not(self, node: Node, _: Kind) -> Formula:
        return negation(self.sub(node, node.schema["not"], "not"))

    def _if(self, node: Node, _: Kind) -> Formula:
        condition = self.sub(node, node.schema["if"], "if")
        then = self.sub(node, node.schema.get("then", True), "then")
        otherwise = self.sub(node, node.schema.get("else", True), "else")
        if then is True and otherwise is True:
            return True
        return any_of(all_of(condition, then), all_of(negation(condition), otherwise))

    def _dependencies(self, node: Node, keyword: str) -> Formula:
        parts = []
        for name, value in self._map(node, keyword).items():
            if isinstance(value, list):
                needed = all_of(*map(Required, self._names(node, keyword, value)))
            else:
                needed = self.sub(node, value, keyword, name)
            parts.append(any_of(Absent(name), all_of(Required(name), needed)))
        return all_of(*parts)

    # Values

    def _type(self, node: Node, kind: Kind) -> Formula:
        value = node.schema["type"]
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) and name in TYPES for name in names):
            self._document.refuse(node, "type", f"type {value!r} is unknown", f"one of {', '.join(TYPES)}, or a list")
        if kind == "number" and "number" not in names:
            return "integer" in names and MultipleOf(exact(1))
        return kind in (TYPES[name] for name in names)

    def _const(self, node: Node, kind: Kind) -> Formula:
        return self._among(node, [node.schema["const"]], kind, "const")

    def _enum(self, node: Node, kind: Kind) -> Formula:
        return self._among(node, self._list(node, "enum"), kind, "enum")

    def _among(self, node: Node, values: list[Any], kind: Kind, keyword: str) -> Formula:
        own = [value for value in values if _kind(value) == kind]
        if kind == "null" or not own:
            return bool(own)
        if kind == "boolean":
            return BooleanIn(frozenset(own))
        if kind == "number":
            return NumberIn(tuple(dict.fromkeys(map(exact, own))))
        if kind == "string":
            return TextIn(tuple(dict.fromkeys(own)))
        return any_of(*(self._compound(node, value, keyword) for value in own))

    def _compound(self, node: Node, value: Any, keyword: str) -> Formula:
        if isinstance(value, list):
            items = tuple(self._exactly(node, item, keyword) for item in value)
            return all_of(ItemCount(len(items), len(items)), Items(items, NOTHING))
        named = {name: self._exactly(node, item, keyword) for name, item in value.items()}
        return all_of(*map(Required, named), Properties(Shape(named, {}, NOTHING)))

    def _exactly(self, node: Node, value: Any, keyword: str) -> Conjunction:
        made = self._document.made(node, {"const": value}, keyword)
        made.draft = Draft.DRAFT2020
        return ((made, True),)

    # Numbers and texts

    def _minimum(self, node: Node, _: Kind) -> Formula:
        return AtLeast(self._number(node, "minimum"), node.schema.get("exclusiveMinimum") is True)

    def _maximum(self, node: Node, _: Kind) -> Formula:
        return AtMost(self._number(node, "maximum"), node.schema.get("exclusiveMaximum") is True)

    def _above(self, node: Node, _: Kind) -> Formula:
        if isinstance(node.schema["exclusiveMinimum"], bool) and node.draft == Draft.DRAFT4:
            return True
        return AtLeast(self._number(node, "exclusiveMinimum"), True)

    def _below(self, node: Node, _: Kind) -> Formula:
        if isinstance(node.schema["exclusiveMaximum"], bool) and node.draft == Draft.DRAFT4:
            return True
        return AtMost(self._number(node, "exclusiveMaximum"), True)

    def _multiple(self, node: Node, _: Kind) -> Formula:
        step = self._number(node, "multipleOf")
        if step <= 0:
            self._document.refuse(node, "multipleOf", "multipleOf is not positive", "write a number above 0")
        return MultipleOf(step)

    def _pattern(self, node: Node, _: Kind) -> Formula:
        pattern = self._readable(node, node.schema["pattern"], "pattern")
        return not regex.is_empty(pattern) and Pattern(pattern)

    def _readable(self, node: Node, pattern: Any, *steps: str) -> str:
        if not isinstance(pattern, str):
            self._document.refuse(node, steps[0], f"{pattern!r} is no regular expression", "write a text")
        if not patterns.is_readable(pattern):
            problem, remedy = patterns.fault_of(pattern)
            self._document.refuse(node, steps[0], problem, remedy)
        if (construct := patterns.unreadable(pattern)) is not None:
            problem = f"the pattern {patterns.shown(pattern)} has {construct}, which no mask enforces"
            self._document.refuse(node, steps[0], problem, "a pattern without it")
        if (fault := patterns.misread(pattern)) is not None:
            self._document.refuse(node, steps[0], *fault)
        return pattern

    def _format(self, node: Node, _: Kind) -> Formula:
        name = node.schema["format"]
        return not formats.is_enforced(name) or Format(name)

    # Lists

    def _items(self, node: Node, _: Kind) -> Formula:
        schema = node.schema
        items = schema.get("items", True)
        if node.draft >= Draft.DRAFT2020:
            if isinstance(items, list):
                self._document.refuse(node, "items", "items is a list", "prefixItems, or an older $schema")
            first = self._list(node, "prefixItems") if "prefixItems" in schema else []
            return self._positions(node, first, "prefixItems", items, "items")
        if isinstance(items, list):
            return self._positions(node, items, "items", schema.get("additionalItems", True), "additionalItems")
        return self._positions(node, [], "items", items, "items")

    def _positions(self, node: Node, first: list[Any], keyword: str, rest: Any, rest_keyword: str) -> Formula:
        prefix = tuple(self.part(node, each, keyword, n) for n, each in enumerate(first))
        tail = self.part(node, rest, rest_keyword)
        return True if not any(prefix) and tail == ANYTHING else Items(prefix, tail)

    def _contains(self, node: Node, _: Kind) -> Formula:
        item = self.part(node, node.schema["contains"], "contains")
        has_counts = drafts.has(node.draft, "minContains")
        least = self.count(node, "minContains") if has_counts and "minContains" in node.schema else 1
        most = self.count(node, "maxContains") if has_counts and "maxContains" in node.schema else None
        if most is not None and most < least:
            return False
        return Contains(item, least, most)

    def _unique(self, node: Node, _: Kind) -> Formula:
        return not node.schema["uniqueItems"] or Unique()

    def _least_items(self, node: Node, _: Kind) -> Formula:
        least = self.count(node, "minItems")
        if least > MOST_ITEMS:
            self._document.refuse(node, "minItems", f"minItems is {least}", f"up to {MOST_ITEMS}")
        return ItemCount(least)

    # Objects

    def _properties(self, node: Node, _: Kind) -> Formula:
        schema = node.schema
        by_name, by_pattern = self._map(node, "properties"), self._map(node, "patternProperties")
        for pattern in by_pattern:
            self._readable(node, pattern, "patternProperties")
        named = {name: self.part(node, value, "properties", name) for name, value in by_name.items()}
        values = {
            pattern: self.part(node, value, "patternProperties", pattern) for pattern, value in by_pattern.items()
        }
        of_all = [values.pop(pattern) for pattern in [*values] if patterns.is_universal(pattern)]
        others = self.part(node, schema.get("additionalProperties", True), "additionalProperties")
        shape = _shape(named, values, ANYTHING if of_all else others)  # a pattern of every name leaves no other one
        return all_of(Properties(shape), *(Properties(Shape({}, {}, value)) for value in of_all))

    def _required(self, node: Node, _: Kind) -> Formula:
        return all_of(*map(Required, self._names(node, "required", node.schema["required"])))

    def _dependent_required(self, node: Node, _: Kind) -> Formula:
        return self._dependencies(node, "dependentRequired")

    def _dependent_schemas(self, node: Node, _: Kind) -> Formula:
        return self._dependencies(node, "dependentSchemas")

    def _old_dependencies(self, node: Node, _: Kind) -> Formula:
        return self._dependencies(node, "dependencies")

    def _property_names(self, node: Node, _: Kind) -> Formula:
        name = self.part(node, node.schema["propertyNames"], "propertyNames")
        return name == ANYTHING or Names(name)

    # What no other keyword has evaluated

    def _unevaluated_properties(self, node: Node, kind: Kind) -> Formula:
        rest = self.part(node, node.schema["unevaluatedProperties"], "unevaluatedProperties")
        if rest == ANYTHING:
            return True
        return any_of(
            *(
                all_of(
                    condition,
                    seen.has_all
                    or Properties(
                        _shape(dict.fromkeys(seen.names, ANYTHING), dict.fromkeys(seen.patterns, ANYTHING), rest)
                    ),
                )
                for condition, seen in self._cases(node, kind, "unevaluatedProperties")
            )
        )

    def _unevaluated_items(self, node: Node, kind: Kind) -> Formula:
        rest = self.part(node, node.schema["unevaluatedItems"], "unevaluatedItems")
        if rest == ANYTHING:
            return True
        return any_of(
            *(
                all_of(condition, seen.has_all or Items((ANYTHING,) * seen.items, rest))
                for condition, seen in self._cases(node, kind, "unevaluatedItems")
            )
        )

    def _cases(self, node: Node, kind: Kind, keyword: str, is_inner: bool = False) -> list[_Case]:
        """The ways in which the node's other keywords evaluate parts of an instance for which they hold."""
        schema = node.schema
        cases: list[_Case] = [(True, self._own(node, kind, keyword if is_inner else None))]
        if "$ref" in schema:
            cases = self._times(node, keyword, cases, self._cases_of(self._reference(node, "$ref"), kind, keyword))
        for dynamic in ("$dynamicRef", "$recursiveRef"):
            if dynamic in schema and drafts.has(node.draft, dynamic):
                cases = self._times(node, keyword, cases, self._cases_of(self._reference(node, dynamic), kind, keyword))
        for n, each in enumerate(schema.get("allOf", ())):
            cases = self._times(node, keyword, cases, self._cases_of(self.sub(node, each, "allOf", n), kind, keyword))
        for word in ("anyOf", "oneOf"):
            for n, each in enumerate(schema.get(word, ())):
                option = self.sub(node, each, word, n)
                inside = self._cases_of(option, kind, keyword)
                if all(seen == _NONE for _, seen in inside):
                    continue
                split = [(all_of(option, condition), seen) for condition, seen in inside]
                cases = self._times(node, keyword, cases, [*split, (negation(option), _NONE)])
        if "if" in schema:
            condition = self.sub(node, schema["if"], "if")
            then = self.sub(node, schema.get("then", True), "then")
            otherwise = self.sub(node, schema.get("else", True), "else")
            met = self._times(
                node, keyword, self._cases_of(condition, kind, keyword), self._cases_of(then, kind, keyword)
            )
            split = [(all_of(condition, inner), seen) for inner, seen in met]
            split += [(all_of(negation(condition), c), s) for c, s in self._cases_of(otherwise, kind, keyword)]
            cases = self._times(node, keyword, cases, split)
        if kind == "object":
            for name, each in self._map(node, "dependentSchemas").items():
                inside = self._cases_of(self.sub(node, each, "dependentSchemas", name), kind, keyword)
                split = [(Absent(name), _NONE), *((all_of(Required(name), c), s) for c, s in inside)]
                cases = self._times(node, keyword, cases, split)
        return cases

    def _cases_of(self, formula: Formula, kind: Kind, keyword: str) -> list[_Case]:
        if isinstance(formula, Holds):
            return self._cases(formula.node, kind, keyword, is_inner=True)
        return [(formula, _NONE)]

    def _times(self, node: Node, keyword: str, first: list[_Case], second: list[_Case]) -> list[_Case]:
        cases = [(all_of(a, b), one.joined(other)) for a, one in first for b, other in second]
        cases = [case for case in cases if case[0] is not False]
        if len(cases) > MOST_CASES:
            problem = f"{keyword} depends on over {MOST_CASES} combinations of sub-schemas"
            self._document.refuse(node, None, problem, "additionalProperties or items, or fewer alternatives")
        return cases

    def _own(self, node: Node, kind: Kind, keyword: str | None) -> _Seen:
        schema = node.schema
        if keyword is not None and keyword in schema:
            return _Seen(has_all=True)
        if kind == "object":
            names, by_pattern = self._map(node, "properties"), self._map(node, "patternProperties")
            return _Seen(tuple(names), tuple(by_pattern), "additionalProperties" in schema)
        if "contains" in schema and node.draft >= Draft.DRAFT2020:
            problem = "no mask enforces unevaluatedItems beside contains"
            self._document.refuse(node, "contains", problem, "items, or contains alone")
        items = schema.get("items")
        if isinstance(items, list):
            return _Seen(has_all="additionalItems" in schema, items=len(items))
        first = schema.get("prefixItems", ()) if node.draft >= Draft.DRAFT2020 else ()
        return _Seen(has_all=items is not None, items=len(first))


def _shape(named: dict[str, Conjunction], by_pattern: dict[str, Conjunction], others: Conjunction) -> Shape:
    """A pattern of few names is read as properties: no answer begins one of them again, nor another one when all are
    there."""
    named, unlisted = {**named}, {}
    for pattern, value in by_pattern.items():
        names = patterns.texts_of(pattern)
        if names is None:
            unlisted[pattern] = value
            continue
        for name in names:
            named[name] = both(named.get(name, ANYTHING), value)
    return Shape(named, unlisted, others)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The parts of an instance that keywords have evaluated."""

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    has_all: bool = False
    items: int = 0

    def joined(self, other: _Seen) -> _Seen:
        return _Seen(
            tuple(dict.fromkeys((*self.names, *other.names))),
            tuple(dict.fromkeys((*self.patterns, *other.patterns))),
            self.has_all or other.has_all,
            max(self.items, other.items),
        )


_NONE = _Seen()
_Case = tuple[Formula, _Seen]

_Read = Callable[[Reader, Node, Kind], Formula]
_KEYWORDS: dict[str, tuple[Kind | None, _Read]] = {
    "$ref": (None, Reader._static),
    "$dynamicRef": (None, Reader._dynamic),
    "$recursiveRef": (None, Reader._recursive),
    "allOf": (None, Reader._all),
    "anyOf": (None, Reader._any),
    "oneOf": (None, Reader._one),
    "not": (None, Reader._not),
    "if": (None, Reader._if),
    "type": (None, Reader._type),
    "const": (None, Reader._const),
    "enum": (None, Reader._enum),
    "minimum": ("number", Reader._minimum),
    "maximum": ("number", Reader._maximum),
    "exclusiveMinimum": ("number", Reader._above),
    "exclusiveMaximum": ("number", Reader._below),
    "multipleOf": ("number", Reader._multiple),
    "minLength": ("string", lambda reader, node, _: Length(reader.count(node, "minLength"))),
    "maxLength": ("string", lambda reader, node, _: Length(0, reader.count(node, "maxLength"))),
    "pattern": ("string", Reader._pattern),
    "format": ("string", Reader._format),
    "items": ("array", Reader._items),
    "prefixItems": ("array", Reader._items),
    "additionalItems": ("array", Reader._items),
    "contains": ("array", Reader._contains),
    "uniqueItems": ("array", Reader._unique),
    "minItems": ("array", Reader._least_items),
    "maxItems": ("array", lambda reader, node, _: ItemCount(0, reader.count(node, "maxItems"))),
    "unevaluatedItems": ("array", Reader._unevaluated_items),
    "properties": ("object", Reader._properties),
    "patternProperties": ("object", Reader._properties),
    "additionalProperties": ("object", Reader._properties),
    "required": ("object", Reader._required),
    "minProperties": ("object", lambda reader, node, _: PropertyCount(reader.count(node, "minProperties"))),
    "maxProperties": ("object", lambda reader, node, _: PropertyCount(0, reader.count(node, "maxProperties"))),
    "dependencies": ("object", Reader._old_dependencies),
    "dependentRequired": ("object", Reader._dependent_required),
    "dependentSchemas": ("object", Reader._dependent_schemas),
    "propertyNames": ("object", Reader._property_names),
    "unevaluatedProperties": ("object", Reader._unevaluated_properties),
}


def constrains(node: Node) -> bool:
    """Whether the node says anything of any value."""
    return any(is_constraint(node, keyword) for keyword in node.schema)


def is_constraint(node: Node, keyword: str) -> bool:
    """Whether a keyword says something of values, in the draft of the node."""
    return keyword in _KEYWORDS and drafts.has(node.draft, keyword)


def named_types(node: Node) -> set[Kind] | None:
    """The types that the node's ``type`` names; ``None`` where it names none, or not in the form of a type."""
    names = node.schema.get("type")
    if names is None or ("$ref" in node.schema and node.draft < Draft.DRAFT2019):
        return None
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) and name in TYPES for name in names):
        return None
    return {TYPES[name] for name in names}


def _kind(value: Any) -> Kind:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
