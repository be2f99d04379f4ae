"""Conjunctions of schemas as unions of states: for each type, which values there are.

A state says the whole condition of a value of one type. The conditions of its parts are conjunctions again, which are
expanded in their turn, so that recursive schemas come to an end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb
from typing import Any

from inferd.structured.schema import patterns
from inferd.structured.schema.arrays import Contains, Lists
from inferd.structured.schema.document import Document, Node
from inferd.structured.schema.formulas import (
    ANYTHING,
    KINDS,
    NOTHING,
    All,
    Conjunction,
    Formula,
    Holds,
    Kind,
    Lost,
    both,
    negation,
)
from inferd.structured.schema.formulas import Any as AnyOf
from inferd.structured.schema.keywords import Reader, named_types
from inferd.structured.schema.numbers import Numbers
from inferd.structured.schema.objects import EVERY_OBJECT, Objects, SomeProperty
from inferd.structured.schema.strings import TextIn, Texts

State = Any
EVERY: dict[Kind, State] = {
    "null": None,
    "boolean": frozenset((True, False)),
    "number": Numbers(),
    "string": Texts(),
    "array": Lists(),
    "object": EVERY_OBJECT,
}
MOST_STEPS = 200_000  # of all expansions of one schema
MOST_STATES = 1_000  # of one conjunction
DEEPEST_PROOF = 20  # levels of parts that are expanded to prove that no value meets a conjunction
MOST_NAME_CHOICES = 256  # of optional properties that a number of properties depends on


@dataclass(frozen=True, slots=True)
class Expansion:
    """The states of a conjunction by type, and what was lost of it."""

    states: dict[Kind, list[State]]
    lost: dict[Kind, Lost]

    @property
    def is_anything(self) -> bool:
        return all(self.states.get(kind) == [EVERY[kind]] for kind in KINDS)


class Expander:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._reader = Reader(document, self._is_disjoint)
        self._known: dict[tuple[frozenset[Any], Kind], tuple[list[State], Lost | None]] = {}
        self._active: set[tuple[frozenset[Any], Kind]] = set()
        self._empty: dict[Conjunction, bool] = {}
        self._steps = 0

    def expand(self, conjunction: Conjunction) -> Expansion:
        states, lost = {}, {}
        for kind in _possible(conjunction):
            found, problem = self._expand(conjunction, kind)
            if found:
                states[kind] = found
            if problem is not None:
                lost[kind] = problem
        return Expansion(states, lost)

    def is_empty(self, conjunction: Conjunction) -> bool:
        """Whether provably no value meets the conjunction."""
        if conjunction == NOTHING:
            return True
        if not conjunction or (len(conjunction) == 1 and conjunction[0][1] and not _may_be_empty(conjunction[0][0])):
            return False
        known = self._empty.get(conjunction)
        if known is None:
            kinds = _possible(conjunction)
            known = all(self._is_empty(conjunction, kind) for kind in kinds)
            if known or not self._active:
                self._empty[conjunction] = known
        return known

    def _is_empty(self, conjunction: Conjunction, kind: Kind) -> bool:
        key = (frozenset(conjunction), kind)
        if key in self._active or (key not in self._known and len(self._active) >= DEEPEST_PROOF):
            return False
        states, lost = self._expand(conjunction, kind)
        return not states and lost is None

    def _is_disjoint(self, first: Conjunction, second: Conjunction, kind: Kind) -> bool:
        return self._is_empty(both(first, second), kind)

    def _expand(self, conjunction: Conjunction, kind: Kind) -> tuple[list[State], Lost | None]:
        if conjunction == NOTHING:
            return [], None
        key = (frozenset(conjunction), kind)
        known = self._known.get(key)
        if known is not None:
            return known
        self._active.add(key)
        try:
            losses: list[Lost] = []
            start: list[Formula] = [Holds(node, is_true) for node, is_true in conjunction if node is not None]
            states = []
            for state in self._solutions(kind, start, EVERY[kind], losses, conjunction):
                if state not in states:
                    states.append(state)
                if len(states) > MOST_STATES:
                    self._refuse_size(conjunction)
        finally:
            self._active.discard(key)
        result = self._known[key] = states, losses[0] if losses else None
        return result

    def _refuse_size(self, conjunction: Conjunction) -> None:
        node = next((node for node, _ in conjunction if node is not None), self._document.root)
        problem = "the combinations of its sub-schemas (anyOf, oneOf, not, if, dependencies) are too many to enforce"
        self._document.refuse(node, None, problem, "fewer alternatives, or alternatives that a const tells apart")

    def _solutions(
        self, kind: Kind, pending: list[Formula], state: State, losses: list[Lost], of: Conjunction
    ) -> Iterator[State]:
        choices: list[AnyOf] = []
        late: list[Contains | SomeProperty] = []
        stack = pending[::-1]
        while stack:
            self._steps += 1
            if self._steps > MOST_STEPS:
                self._refuse_size(of)
            formula = stack.pop()
            if formula is True:
                continue
            if formula is False:
                return
            if isinstance(formula, Holds):
                inner = self._reader.formula(formula.node, kind)
                stack.append(inner if formula.is_true else negation(inner))
            elif isinstance(formula, All):
                stack.extend(reversed(formula.parts))
            elif isinstance(formula, AnyOf):
                choices.append(formula)
            elif isinstance(formula, Lost):
                losses.append(formula)
                return
            elif isinstance(formula, Contains | SomeProperty):
                late.append(formula)
            else:
                narrowed = formula.narrow(state, self.is_empty)  # type: ignore[attr-defined]
                if isinstance(narrowed, Lost):
                    losses.append(narrowed)
                    return
                if narrowed is None:
                    return
                state = narrowed
        if choices:
            first, *rest = choices
            for option in first.parts:
                yield from self._solutions(kind, [option, *late, *rest], state, losses, of)
        elif late:
            (condition, *others) = late
            ways = condition.ways(state) if isinstance(condition, Contains) else condition.ways(state, self.is_empty)
            yield from self._solutions(kind, [ways, *others], state, losses, of)
        else:
            yield from self._finished(kind, state, losses)

    def _finished(self, kind: Kind, state: State, losses: list[Lost]) -> Iterator[State]:
        if kind == "object":
            for named in self._with_names(state, losses):
                yield from self._counted(named, losses)
        else:
            yield state

    # Objects: rules for names and numbers of properties, written out by name

    def _with_names(self, objects: Objects, losses: list[Lost]) -> Iterator[Objects]:
        if objects.names == ANYTHING:
            yield objects
            return
        is_name = {
            name: self._is_name(name, objects.names) for name in dict.fromkeys((*objects.named, *objects.required))
        }
        if not all(is_name[name] for name in objects.required):
            return
        named = {name: value if is_name[name] else NOTHING for name, value in objects.named.items()}
        plain = Objects(named, objects.by_pattern, objects.others, objects.required, objects.least, objects.most)
        texts, lost = self._expand(objects.names, "string")
        if lost is not None:
            losses.append(lost)
        if Texts() in texts or plain.is_closed(self.is_empty):
            yield plain
        elif all(text.values is not None for text in texts):
            known = {name: plain.value(name) for text in texts for name in text.values if name not in named}
            yield Objects({**named, **known}, {}, NOTHING, plain.required, plain.least, plain.most)
        elif not objects.by_pattern and (pattern := _pattern_of_names(texts)) is not None:
            yield Objects(named, {pattern: plain.others}, NOTHING, plain.required, plain.least, plain.most)
        else:
            remedy = "one pattern, length or enum in propertyNames, without patternProperties"
            losses.append(Lost("no mask enforces these rules for names of properties together", remedy))

    def _is_name(self, name: str, names: Conjunction) -> bool:
        start: list[Formula] = [Holds(node, is_true) for node, is_true in names if node is not None]
        return any(True for _ in self._solutions("string", [TextIn((name,)), *start], Texts(), [], names))

    def _counted(self, objects: Objects, losses: list[Lost]) -> Iterator[Objects]:
        """The same objects where a number of properties is asked of unnamed properties alone."""
        present = [name for name in objects.named if name not in objects.required]
        optional = [name for name in present if not self.is_empty(objects.named[name])]
        fixed = len(objects.required)
        if objects.least <= fixed and (objects.most is None):
            yield _without_counts(objects)
            return
        is_closed = objects.is_closed(self.is_empty)
        if not optional:
            if is_closed and objects.least > fixed:
                return
            yield objects if not is_closed else _without_counts(objects)
            return
        most = objects.most if objects.most is not None else fixed + len(optional)
        if is_closed and objects.least <= fixed and most >= fixed + len(optional):
            yield _without_counts(objects)
            return
        if objects.most is None and objects.least <= fixed + len(optional):
            yield from self._at_least(objects, optional, is_closed, losses)
            return
        sizes = range(min(most - fixed, len(optional)) + 1)
        if sum(comb(len(optional), size) for size in sizes) > MOST_NAME_CHOICES:
            losses.append(_too_many_choices())
            return
        for names in (names for size in sizes for names in combinations(optional, size)):
            picked = _with_just(objects, optional, names)
            if not is_closed:
                yield picked
            elif objects.least <= len(picked.required):
                yield _without_counts(picked)

    def _at_least(
        self, objects: Objects, optional: list[str], is_closed: bool, losses: list[Lost]
    ) -> Iterator[Objects]:
        missing = objects.least - len(objects.required)
        fewer = range(0 if is_closed else missing)
        if sum(comb(len(optional), size) for size in (*fewer, missing)) > MOST_NAME_CHOICES:
            losses.append(_too_many_choices())
            return
        for names in combinations(optional, missing):
            yield replace(_without_counts(objects), required=(*objects.required, *names))
        for names in (names for size in fewer for names in combinations(optional, size)):
            yield _with_just(objects, optional, names)


def _with_just(objects: Objects, optional: list[str], names: tuple[str, ...]) -> Objects:
    """The objects that have these of the optional properties and no other of them."""
    absent = {name: NOTHING for name in optional if name not in names}
    return replace(objects, named={**objects.named, **absent}, required=(*objects.required, *names))


def _too_many_choices() -> Lost:
    remedy = "fewer optional properties, or no minProperties and maxProperties"
    return Lost("a number of properties depends on too many choices of optional ones", remedy)


def _without_counts(objects: Objects) -> Objects:
    return replace(objects, least=0, most=None)


def _pattern_of_names(texts: list[Texts]) -> str | None:
    """One pattern of all these texts; ``None`` where there is none."""
    found = []
    for text in texts:
        if text.values is not None:
            found.append(patterns.of_texts(text.values))
            continue
        own = text.all_patterns()
        if text.least or text.most is not None:
            own.append(patterns.of_length(text.least, text.most))
        if len(own) != 1:
            return None
        found.append(own[0])
    return found[0] if len(found) == 1 else "|".join(f"(?:{pattern})" for pattern in found)


def _may_be_empty(node: Node | None) -> bool:
    """Whether a schema is worth the question. Most are not: it is asked of every part of every state."""
    return node is None or any(word in node.schema for word in ("not", "enum", "$ref", "allOf", "anyOf", "oneOf"))


def _possible(conjunction: Conjunction) -> list[Kind]:
    """The types that the keyword ``type`` of the schemas leaves. It only spares work: formulas say the same."""
    types = [named for node, is_true in conjunction if is_true and node and (named := named_types(node)) is not None]
    return [kind for kind in KINDS if all(kind in kinds for kinds in types)]
