"""Objects: properties by name and by pattern, required and absent ones, how many, and which names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from inferd.structured.schema import patterns
from inferd.structured.schema.formulas import (
    ANYTHING,
    NOTHING,
    Atom,
    Conjunction,
    Emptiness,
    Formula,
    Lost,
    all_of,
    any_of,
    both,
    opposite,
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the value of each name is: by name, by pattern, and of all other names. A name has the schemas of some
    keywords; a pattern, and all other names, have one schema at most."""

    named: Mapping[str, Conjunction]
    by_pattern: Mapping[str, Conjunction]
    others: Conjunction = ANYTHING

    def value(self, name: str) -> Conjunction:
        matching = [value for pattern, value in self.by_pattern.items() if patterns.matches(pattern, name)]
        if name not in self.named and not matching:
            return self.others
        value = self.named.get(name, ANYTHING)
        for other in matching:
            value = both(value, other)
        return value

    def matching(self, pattern: str) -> Conjunction:
        """What the value of an unnamed property is that matches ``pattern`` and no other pattern."""
        return self.by_pattern.get(pattern, self.others)


@dataclass(frozen=True, slots=True)
class Objects:
    """``named`` has the whole condition of each of its names, with that of patterns that match them."""

    named: Mapping[str, Conjunction]
    by_pattern: Mapping[str, Conjunction]
    others: Conjunction = ANYTHING
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    names: Conjunction = ANYTHING

    def value(self, name: str) -> Conjunction:
        if name in self.named:
            return self.named[name]
        return Shape({}, self.by_pattern, self.others).value(name)

    def settled(self, is_empty: Emptiness) -> Objects | None:
        if any(is_empty(self.value(name)) for name in self.required):
            return None
        if self.most is not None and max(self.least, len(self.required)) > self.most:
            return None
        return self

    def is_closed(self, is_empty: Emptiness) -> bool:
        """Whether no property but the named ones is possible."""
        return is_empty(self.others) and all(is_empty(value) for value in self.by_pattern.values())


EVERY_OBJECT = Objects({}, {})


@dataclass(frozen=True, slots=True)
class Required(Atom):
    name: str

    def negated(self) -> Formula:
        return Absent(self.name)

    def narrow(self, objects: Objects, is_empty: Emptiness) -> Objects | None:
        if self.name in objects.required:
            return objects
        return replace(objects, required=(*objects.required, self.name)).settled(is_empty)


@dataclass(frozen=True, slots=True)
class Absent(Atom):
    name: str

    def negated(self) -> Formula:
        return Required(self.name)

    def narrow(self, objects: Objects, is_empty: Emptiness) -> Objects | None:
        if self.name in objects.required:
            return None
        return replace(objects, named={**objects.named, self.name: NOTHING})


@dataclass(frozen=True, eq=False, slots=True)
class Properties(Atom):
    shape: Shape

    def negated(self) -> Formula:
        shape = self.shape
        wrong = [
            all_of(Required(name), PropertyIs(name, opposite((schema,))))
            for name, value in shape.named.items()
            for schema in value
        ]
        by_pattern = [
            SomeProperty(opposite(value), pattern=pattern)
            for pattern, value in shape.by_pattern.items()
            if value != ANYTHING
        ]
        others = shape.others != ANYTHING and SomeProperty(opposite(shape.others), outside=shape)
        return any_of(*wrong, *by_pattern, others)

    def narrow(self, objects: Objects, is_empty: Emptiness) -> Objects | None:
        shape = self.shape
        names = dict.fromkeys((*objects.named, *shape.named))
        named = {name: both(objects.value(name), shape.value(name)) for name in names}
        other = Shape({}, objects.by_pattern, objects.others)
        by_pattern = {
            pattern: both(other.matching(pattern), shape.matching(pattern))
            for pattern in dict.fromkeys((*objects.by_pattern, *shape.by_pattern))
        }
        others = both(objects.others, shape.others)
        return replace(objects, named=named, by_pattern=by_pattern, others=others).settled(is_empty)


@dataclass(frozen=True, slots=True)
class PropertyIs(Atom):
    """Where the property is there, the conjunction holds of it."""

    name: str
    value: Conjunction

    def negated(self) -> Formula:
        return all_of(Required(self.name), PropertyIs(self.name, opposite(self.value)))

    def narrow(self, objects: Objects, is_empty: Emptiness) -> Objects | None:
        value = both(objects.value(self.name), self.value)
        return replace(objects, named={**objects.named, self.name: value}).settled(is_empty)


@dataclass(frozen=True, eq=False, slots=True)
class SomeProperty(Atom):
    """There is a property with a value that meets a conjunction: one that matches a pattern, or one outside of a
    shape's names and patterns."""

    value: Conjunction
    pattern: str | None = None
    outside: Shape | None = None

    def negated(self) -> Formula:
        raise AssertionError("is itself made by a negation only")

    def _concerns(self, name: str) -> bool:
        if self.outside is not None:
            shape = self.outside
            return name not in shape.named and not any(patterns.matches(pattern, name) for pattern in shape.by_pattern)
        return self.pattern is not None and patterns.matches(self.pattern, name)

    def ways(self, objects: Objects, is_empty: Emptiness) -> Formula:
        """The same condition by name. Properties that nothing names are lost, where there can be any."""
        names = [name for name in dict.fromkeys((*objects.named, *objects.required)) if self._concerns(name)]
        by_name = [all_of(Required(name), PropertyIs(name, self.value)) for name in names]
        lost = Lost("no mask enforces that there is a property of unknown name", "a required property with a name")
        return any_of(*by_name, not objects.is_closed(is_empty) and lost)


@dataclass(frozen=True, slots=True)
class PropertyCount(Atom):
    least: int = 0
    most: int | None = None

    def negated(self) -> Formula:
        above = self.most is not None and PropertyCount(self.most + 1)
        return any_of(self.least > 0 and PropertyCount(0, self.least - 1), above)

    def narrow(self, objects: Objects, is_empty: Emptiness) -> Objects | None:
        most = objects.most
        if self.most is not None:
            most = self.most if most is None else min(self.most, most)
        return replace(objects, least=max(objects.least, self.least), most=most).settled(is_empty)


@dataclass(frozen=True, slots=True)
class Names(Atom):
    """Every name meets a conjunction."""

    name: Conjunction

    def negated(self) -> Formula:
        return Lost("no mask enforces that a property's name breaks a rule", "no propertyNames below 'not'")

    def narrow(self, objects: Objects, is_empty: Emptiness) -> Objects | None:
        return replace(objects, names=both(objects.names, self.name))
