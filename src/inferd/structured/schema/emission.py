"""The schema that the masks are compiled from: a union of plain states for each conjunction, nothing else.

It has no keyword beside those of one type, no sibling of ``anyOf`` and ``$ref``, and no intersection of two schemas
(but for several patterns of one text), so that nothing is left to be merged behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from inferd.answer_form import JSON
from inferd.structured.schema import patterns
from inferd.structured.schema.arrays import Lists
from inferd.structured.schema.document import Document
from inferd.structured.schema.expansion import EVERY, Expander, State
from inferd.structured.schema.formulas import ANYTHING, KINDS, NOTHING, Conjunction, Kind, Lost
from inferd.structured.schema.numbers import Numbers
from inferd.structured.schema.objects import Objects

DEEPEST_ANYTHING = 12  # levels of lists and objects of a value that a schema says nothing about
MOST_SEQUENCES = 400  # of a list whose items are unique
MOST_PARTS = 24_000  # the mask engine takes somewhat more
MOST_PROPERTIES = 1_000  # of one object; the mask engine's work grows with their square
DEEPEST_BODY = 16  # levels of one definition, behind which another one begins

Key = frozenset[Any]
_WHOLE = ("string", "array", "object")  # types that are never lost as a whole: the schema is refused


class Emitter:
    def __init__(self, document: Document, expander: Expander) -> None:
        self._document = document
        self._expander = expander
        self._states: dict[Key, list[tuple[Kind, State, Any]]] = {}  # what is emitted of each, see _emit_state
        self._order: list[Conjunction] = []
        self._productive: set[Key] = set()
        self._uses: dict[Key, int] = {}
        self._parts = 0
        self._names: dict[Key, str] = {}
        self._named: list[tuple[str, Conjunction]] = []  # definitions that are still to be written
        self._depth = 0

    def schema(self, root: Conjunction) -> JSON:
        self._discover(root)
        self._find_productive()
        if frozenset(root) not in self._productive:
            problem = "no finite value is valid against the schema"
            self._refuse(self._unproductive(root), Lost(problem, "a schema with at least one valid value"))
        for conjunction in self._order:
            key = frozenset(conjunction)
            if self._uses[key] > 1 and key in self._productive:
                self._name(conjunction)
        body = self._body(root)
        definitions: dict[str, JSON] = {}
        while self._named:
            name, conjunction = self._named.pop()
            definitions[name] = self._body(conjunction)
        return {**body, "$defs": {**dict(sorted(definitions.items())), **_anything()}}

    def _name(self, conjunction: Conjunction) -> str:
        name = self._names[frozenset(conjunction)] = f"d{len(self._names)}"
        self._named.append((name, conjunction))
        return name

    # Which conjunctions there are, and which of them have a finite value

    def _discover(self, root: Conjunction) -> None:
        rest = [root]
        self._uses[frozenset(root)] = 1  # at the top
        while rest:
            conjunction = rest.pop()
            key = frozenset(conjunction)
            if key in self._states:
                continue
            self._order.append(conjunction)
            expansion = self._expander.expand(conjunction)
            pieces: list[tuple[Kind, State, Any]] = []
            missing: Lost | None = None
            for kind in KINDS:
                own: list[tuple[Kind, State, Any]] = []
                lost = expansion.lost.get(kind)
                for state in expansion.states.get(kind, ()):
                    emitted = self._emit_scalars(kind, state)
                    if isinstance(emitted, Lost):
                        lost = lost or emitted
                    else:
                        own.append((kind, state, emitted))
                if not own and lost is not None:
                    missing = lost
                    if kind in _WHOLE:
                        self._refuse(conjunction, lost)
                pieces.extend(own)
            if not pieces and missing is not None:
                self._refuse(conjunction, missing)
            self._states[key] = pieces
            for kind, state, emitted in pieces:
                if kind == "object" and len(state.named) > MOST_PROPERTIES:
                    self._refuse_width(conjunction, len(state.named))
                if emitted is None:
                    for part in _parts(kind, state):
                        self._count_part(conjunction)
                        if part not in (ANYTHING, NOTHING):
                            self._uses[frozenset(part)] = self._uses.get(frozenset(part), 0) + 1
                            rest.append(part)

    def _count_part(self, conjunction: Conjunction) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            self._refuse(conjunction, Lost("the schema has too many parts when it is written out", "a simpler schema"))

    def _refuse(self, conjunction: Conjunction, lost: Lost) -> None:
        node = next((node for node, _ in conjunction if node is not None), self._document.root)
        self._document.refuse(node, None, lost.problem, lost.remedy)

    def _refuse_width(self, conjunction: Conjunction, count: int) -> None:
        node = next((node for node, _ in conjunction if node is not None and "properties" in node.schema), None)
        remedy = f"up to {MOST_PROPERTIES}, or patternProperties"
        problem = f"an object has {count} named properties"
        if node is None:
            self._refuse(conjunction, Lost(problem, remedy))
        else:
            self._document.refuse(node, "properties", problem, remedy)

    def _find_productive(self) -> None:
        """The conjunctions with a finite value: the least set in which each has a state whose needed parts are."""
        waiting = list(self._order)
        while True:
            kept = []
            for conjunction in waiting:
                if any(
                    self._is_productive(kind, state, out) for kind, state, out in self._states[frozenset(conjunction)]
                ):
                    self._productive.add(frozenset(conjunction))
                else:
                    kept.append(conjunction)
            if len(kept) == len(waiting):
                return
            waiting = kept

    def _is_productive(self, kind: Kind, state: State, emitted: Any) -> bool:
        if emitted is not None:
            return bool(emitted != [])  # there are too few values for a list without repeated items
        return all(map(self._has_value, self._needed(kind, state))) and (kind == "array" or self._has_enough(state))

    def _has_enough(self, objects: Objects) -> bool:
        """Whether an object has as many properties with a value as it needs."""
        missing = objects.least - len(objects.required)
        if missing <= 0 or any(map(self._has_value, (objects.others, *objects.by_pattern.values()))):
            return True
        optional = (value for name, value in objects.named.items() if name not in objects.required)
        return sum(map(self._has_value, optional)) >= missing

    def _needed(self, kind: Kind, state: State) -> Iterator[Conjunction]:
        """The parts without which a list or an object has no value."""
        if kind == "array":
            return (state.item(position) for position in range(min(state.least, len(state.prefix) + 1)))
        return (state.value(name) for name in state.required)

    def _unproductive(self, root: Conjunction) -> Conjunction:
        """The innermost conjunction without a value that is the only reason why ``root`` has none."""
        found, seen = root, {frozenset(root)}
        while True:
            states = self._states[frozenset(found)]
            if len(states) != 1:
                return found
            kind, state, emitted = states[0]
            needed = self._needed(kind, state) if emitted is None else iter(())
            part = next((part for part in needed if not self._has_value(part)), NOTHING)
            if part == NOTHING or frozenset(part) in seen:
                return found
            seen.add(frozenset(part))
            found = part

    def _has_value(self, part: Conjunction) -> bool:
        return part == ANYTHING or (part != NOTHING and frozenset(part) in self._productive)

    # What is written

    def _emit_scalars(self, kind: Kind, state: State) -> list[JSON] | Lost | None:
        """The schemas of a state without parts; ``None`` for lists and objects."""
        if kind == "null":
            return [{"type": "null"}]
        if kind == "boolean":
            return [{"type": "boolean"}] if len(state) == 2 else [{"const": next(iter(state))}]
        if kind == "number" and state in _SHARED:
            return [{"$ref": f"#/$defs/{_SHARED[state]}"}]
        if kind in ("number", "string"):
            emitted: list[JSON] | Lost = state.emitted()
            return emitted
        if kind == "array" and state.is_unique and (state.most is None or state.most > 1):
            return self._sequences(state)
        return None

    def _sequences(self, lists: Lists) -> list[JSON] | Lost:
        """Lists without repeated items, one by one, where the items are few."""
        lost = Lost("no mask enforces uniqueItems here", "uniqueItems over an enum of at most 5 values, or maxItems 1")
        by_position = [self._finite(item) for item in lists.prefix]
        others = self._finite(lists.tail)
        if others is None or None in by_position:
            return lost
        most = len(by_position) + len(others) if lists.most is None else lists.most
        sequences: list[list[Any]] = []
        longest: list[list[Any]] = [[]]
        for size in range(most + 1):
            if size >= lists.least:
                sequences.extend(longest)
            choices = by_position[size] if size < len(by_position) else others
            longest = [
                [*sequence, value]
                for sequence in longest
                for value in choices or ()
                if not any(_is_same(value, other) for other in sequence)
            ]
            if len(sequences) + len(longest) > MOST_SEQUENCES:
                return lost
            if not longest:
                break
        return [{"enum": sequences}] if sequences else []

    def _finite(self, item: Conjunction) -> list[Any] | None:
        """All values of an item, where they are finitely many scalars."""
        values: list[Any] = []
        expansion = self._expander.expand(item)
        if expansion.lost:
            return None
        for kind in KINDS:
            for state in expansion.states.get(kind, ()):
                own = _values(kind, state)
                if own is None:
                    return None
                values.extend(value for value in own if not any(_is_same(value, other) for other in values))
        return values

    def _body(self, conjunction: Conjunction) -> JSON:
        options: list[JSON] = []
        for kind, state, emitted in self._states[frozenset(conjunction)]:
            if emitted is not None:
                options.extend(emitted)
            elif self._is_productive(kind, state, emitted):
                options.append(self._array(state) if kind == "array" else self._object(state))
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _part(self, part: Conjunction) -> JSON | bool:
        if part == ANYTHING:
            return {"$ref": f"#/$defs/any{DEEPEST_ANYTHING}"}
        if not self._has_value(part):
            return False
        name = self._names.get(frozenset(part))
        if name is None and self._depth >= DEEPEST_BODY:
            name = self._name(part)
        if name is not None:
            return {"$ref": f"#/$defs/{name}"}
        self._depth += 1
        try:
            return self._body(part)
        finally:
            self._depth -= 1

    def _array(self, lists: Lists) -> JSON:
        schema: JSON = {"type": "array"}
        if lists.prefix:
            schema["prefixItems"] = [self._part(item) for item in lists.prefix]
        schema["items"] = self._part(lists.tail)
        if lists.least:
            schema["minItems"] = lists.least
        if lists.most is not None:
            schema["maxItems"] = lists.most
        return schema

    def _object(self, objects: Objects) -> JSON:
        named = dict(objects.named)
        named.update((name, objects.value(name)) for name in objects.required if name not in named)
        schema: JSON = {"type": "object", "properties": {name: self._part(value) for name, value in named.items()}}
        if objects.by_pattern:
            by_pattern = {pattern: self._part(value) for pattern, value in objects.by_pattern.items()}
            self._spare_intersections(objects, named, schema["properties"], by_pattern)
            written = {patterns.for_masks(pattern): value for pattern, value in by_pattern.items()}
            schema["patternProperties"] = written if len(written) == len(by_pattern) else by_pattern
        schema["additionalProperties"] = self._part(objects.others)
        if objects.required:
            schema["required"] = list(objects.required)
        if objects.least > len(objects.required):
            schema["minProperties"] = objects.least
        if objects.most is not None:
            schema["maxProperties"] = objects.most
        return schema

    def _spare_intersections(
        self, objects: Objects, named: dict[str, Conjunction], properties: JSON, by_pattern: JSON
    ) -> None:
        """Let nothing be merged where a name matches a pattern: what is merged into ``true`` stays as it is. The
        condition of a name has that of its patterns already."""
        for name, value in named.items():
            for pattern, other in objects.by_pattern.items():
                if patterns.matches(pattern, name):
                    if value == other:
                        properties[name] = True
                    elif other == ANYTHING:
                        by_pattern[pattern] = True


def _parts(kind: Kind, state: State) -> list[Conjunction]:
    if kind == "array":
        return [*state.prefix, state.tail]
    unnamed = [state.value(name) for name in state.required if name not in state.named]
    return [*state.named.values(), *unnamed, *state.by_pattern.values(), state.others]


def _values(kind: Kind, state: State) -> list[Any] | None:
    """All values of a state, where they are finitely many scalars."""
    if kind == "null":
        return [None]
    if kind == "boolean":
        return sorted(state)
    if kind == "string" and state.values is not None:
        return list(state.values)
    if kind == "number" and state.values is not None:
        emitted = state.emitted()
        return None if isinstance(emitted, Lost) else emitted[0]["enum"]
    return None


def _is_same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and value == other


# What many schemas have, as definitions, because a range of numbers takes a millisecond to compile.
_SHARED = {EVERY["number"]: "number", Numbers(step=Fraction(1)): "integer"}


def _anything() -> dict[str, JSON]:
    """Any number, and any value nested to a bounded depth, as definitions that lead to each other."""
    numbers = {name: _only(state.emitted()) for state, name in _SHARED.items()}
    scalars: list[JSON] = [{"type": "null"}, {"type": "boolean"}, {"type": "string"}, {"$ref": "#/$defs/number"}]
    definitions: dict[str, JSON] = {**numbers, "any0": {"anyOf": scalars}}
    for depth in range(1, DEEPEST_ANYTHING + 1):
        inner = {"$ref": f"#/$defs/any{depth - 1}"}
        compound: list[JSON] = [{"type": "array", "items": inner}, {"type": "object", "additionalProperties": inner}]
        definitions[f"any{depth}"] = {"anyOf": [*scalars, *compound]}
    return definitions


def _only(schemas: list[JSON] | Lost) -> JSON:
    assert isinstance(schemas, list)
    (schema,) = schemas
    return schema
