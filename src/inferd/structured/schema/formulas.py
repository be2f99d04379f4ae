"""Boolean formulas over what one instance of one JSON type must be, and conjunctions of schemas.

A schema says nothing of types that its keywords do not concern, so each of the six types has a formula of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from inferd.structured.schema.document import Node

Kind = Literal["null", "boolean", "number", "string", "array", "object"]
KINDS: tuple[Kind, ...] = ("null", "boolean", "number", "string", "array", "object")

# All of these schemas hold (True) or do not hold (False) of a value. The empty conjunction holds of every value.
Conjunction = tuple[tuple["Node | None", bool], ...]
Emptiness = Callable[[Conjunction], bool]  # whether provably no value meets a conjunction
ANYTHING: Conjunction = ()
NOTHING: Conjunction = ((None, False),)


def both(first: Conjunction, second: Conjunction) -> Conjunction:
    if not first or first == second:
        return second
    if not second:
        return first
    if first == NOTHING or second == NOTHING:
        return NOTHING
    known = set(first)
    joined = first + tuple(literal for literal in second if literal not in known)
    return NOTHING if any((node, not holds) in known for node, holds in second) else joined


def opposite(conjunction: Conjunction) -> Conjunction:
    """The negation of a conjunction of at most one schema."""
    if not conjunction:
        return NOTHING
    if conjunction == NOTHING:
        return ANYTHING
    ((node, is_true),) = conjunction
    return ((node, not is_true),)


class Atom:
    """A condition on an instance of one type that the states of that type can hold."""

    def negated(self) -> Formula:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class All:
    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Any:
    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Holds:
    """A schema that applies to the same instance, or (``is_true`` false) its negation."""

    node: Node
    is_true: bool = True


@dataclass(frozen=True, slots=True)
class Lost:
    """Instances that exist and that no mask can enforce. They are left out; where nothing else is left, the schema is
    refused."""

    problem: str
    remedy: str


Formula = bool | All | Any | Holds | Lost | Atom


def all_of(*parts: Formula) -> Formula:
    kept = tuple(part for part in parts if part is not True)
    if any(part is False for part in kept):
        return False
    return kept[0] if len(kept) == 1 else All(kept) if kept else True


def any_of(*parts: Formula) -> Formula:
    kept = tuple(part for part in parts if part is not False)
    if any(part is True for part in kept):
        return True
    return kept[0] if len(kept) == 1 else Any(kept) if kept else False


def negation(formula: Formula) -> Formula:
    if isinstance(formula, bool):
        return not formula
    if isinstance(formula, All):
        return any_of(*map(negation, formula.parts))
    if isinstance(formula, Any):
        return all_of(*map(negation, formula.parts))
    if isinstance(formula, Holds):
        return Holds(formula.node, not formula.is_true)
    assert isinstance(formula, Atom)
    return formula.negated()
