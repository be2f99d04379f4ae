"""Short texts of a normalised schema: of each value, of each member of an object, and of what must still follow in an
object or a list.

They are hints for the search for the end of an answer (``closing``), which tries each of them where it stands. A text
that does not fit there costs a trial and nothing else, so that nothing here needs to know the place in an answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import count, islice
from typing import Any, Final

from inferd.answer_form import JSON

Spell = Callable[[JSON], str | None]
"""The text of a value whose schema has a pattern or a format; None: none is known."""

_MOST_TEXTS: Final = 512
_MOST_FREE: Final = 3  # names of an object that the schema does not name
_LONGEST: Final = 4096  # characters of a text
_MOST_ROUNDS: Final = 64  # in which shorter texts of definitions are looked for
_REFERENCE: Final = "#/$defs/"


class Outline:
    """The texts of one schema, as ``normalise`` writes it."""

    def __init__(self, schema: JSON, spell: Spell) -> None:
        self._spell = spell
        self._spelled: dict[str, str | None] = {}
        definitions: JSON = schema.get("$defs", {})
        self._known: dict[str, str] = {}  # the shortest text so far, by definition
        for _ in range(_MOST_ROUNDS):
            before = dict(self._known)
            for name, one in definitions.items():
                text = self._shortest(one)
                if text is not None and len(text) < len(self._known.get(name, text + " ")):
                    self._known[name] = text
            if self._known == before:
                break
        found: dict[str, None] = {}
        whole = self._shortest(schema)
        if whole is not None:
            found[whole] = None
        texts = (text for node in _nodes([schema, *definitions.values()]) for text in self._texts(node))
        for text in texts:
            if len(found) >= _MOST_TEXTS:
                break
            found[text] = None
        self.texts = tuple(found)

    def _texts(self, node: JSON) -> Iterator[str]:
        """The texts that occur at or within a value of this schema."""
        value = self._shortest(node)
        if value is not None:
            yield value
            yield f":{value}"
        kind = node.get("type")
        if kind == "object":
            members = [(name, self._member(name, part)) for name, part in node.get("properties", {}).items()]
            yield from (member for _, member in members if member is not None)
            others = self._shortest(node.get("additionalProperties", True))
            if others is not None:
                yield from (f"{_dump(name)}:{others}" for name in islice(_free(dict(members)), _MOST_FREE))
            yield from _rests([member for name, member in members if name in node.get("required", ())], "}")
        elif kind == "array":
            yield from _rests(self._items(node), "]")

    def _shortest(self, node: JSON | bool) -> str | None:
        """The shortest text of a value, as far as the texts of the definitions are known."""
        if node is True:
            return "0"
        if node is False:
            return None
        text: str | None
        if "$ref" in node:
            text = self._known.get(node["$ref"].removeprefix(_REFERENCE))
        elif "anyOf" in node:
            text = min((t for t in map(self._shortest, node["anyOf"]) if t is not None), key=len, default=None)
        elif "const" in node or "enum" in node:
            text = min(map(_dump, node.get("enum", [node.get("const")])), key=len)
        else:
            match node.get("type"):
                case "null":
                    text = "null"
                case "boolean":
                    text = "true"
                case "integer" | "number":
                    text = _number(node)
                case "string":
                    text = self._text(node)
                case "array":
                    items = self._items(node)
                    text = None if None in items else f"[{','.join(filter(None, items))}]"
                case _:
                    text = self._object(node)
        return None if text is None or len(text) > _LONGEST else text

    def _text(self, node: JSON) -> str | None:
        if node.keys() <= {"type", "minLength", "maxLength"}:
            return f'"{"a" * node.get("minLength", 0)}"'
        key = json.dumps(node, sort_keys=True)
        if key not in self._spelled:
            self._spelled[key] = self._spell(node)
        return self._spelled[key]

    def _items(self, node: JSON) -> list[str | None]:
        """The items that a list must have."""
        least, prefix = node.get("minItems", 0), node.get("prefixItems", [])
        if least > _LONGEST:
            return [None]
        return [self._shortest(prefix[i] if i < len(prefix) else node["items"]) for i in range(least)]

    def _object(self, node: JSON) -> str | None:
        required = node.get("required", ())
        members = {name: self._member(name, part) for name, part in node.get("properties", {}).items()}
        chosen = {name: member for name, member in members.items() if name in required}
        missing = node.get("minProperties", 0) - len(chosen)
        if missing > 0:
            others = {name: m for name, m in members.items() if m is not None and name not in chosen}
            for name in sorted(others, key=lambda name: len(others[name]))[:missing]:
                chosen[name] = others[name]
            free = self._shortest(node.get("additionalProperties", True))
            for name in islice(_free(members), max(node["minProperties"] - len(chosen), 0)):
                chosen[name] = None if free is None else f"{_dump(name)}:{free}"
        names_in_order = dict.fromkeys((*(name for name in members if name in chosen), *chosen))
        in_order = [chosen[name] for name in names_in_order]
        return None if None in in_order else "{" + ",".join(filter(None, in_order)) + "}"

    def _member(self, name: str, part: JSON | bool) -> str | None:
        value = self._shortest(part)
        return None if value is None else f"{_dump(name)}:{value}"


def _rests(parts: list[str | None], end: str) -> Iterator[str]:
    """What follows behind each of the parts, with and without the comma before it."""
    for first in range(len(parts)):
        rest = parts[first:]
        if None not in rest:
            text = ",".join(filter(None, rest)) + end
            if len(text) <= _LONGEST:
                yield f",{text}"
                yield text


def _free(names: Container[str]) -> Iterator[str]:
    """Names of properties that are none of these."""
    return (name for name in map(str, count()) if name not in names)


def _nodes(roots: list[JSON | bool]) -> Iterator[JSON]:
    """All schemas within these, from the outside in."""
    waiting = list(roots)
    for node in waiting:
        if isinstance(node, dict):
            yield node
            waiting += node.get("anyOf", [])
            waiting += node.get("prefixItems", [])
            waiting += node.get("properties", {}).values()
            waiting += node.get("patternProperties", {}).values()
            waiting += [node[name] for name in ("items", "additionalProperties") if name in node]


def _number(node: JSON) -> str:
    """A number of few digits within the bounds."""
    low, high = node.get("minimum", 0), node.get("maximum", 0)
    if low <= 0 <= high:
        return "0"
    step = Fraction(str(node.get("multipleOf", 1)))
    bound = Fraction(str(low if low > 0 else high))
    steps = math.ceil(bound / step) if low > 0 else math.floor(bound / step)
    return _dump_number(steps * step)


def _dump_number(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return format(Decimal(value.numerator) / Decimal(value.denominator), "f")


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
