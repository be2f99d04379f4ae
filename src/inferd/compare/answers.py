"""Two answers to one request: what is equal, where they differ, and by how much. Pure.

An answer is a sequence of named parts: texts, labels and numbers. ``reading.py`` finds them in the bodies of dialects.
What never says anything about the model, such as ids and times, is no part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec


class Text(msgspec.Struct, frozen=True, tag="text"):
    """A text that was generated. Equal texts have equal characters."""

    name: str
    value: str


class Label(msgspec.Struct, frozen=True, tag="label"):
    """A word from a closed set: a class, a finish reason, the name of a tool."""

    name: str
    value: str


class Numbers(msgspec.Struct, frozen=True, tag="numbers"):
    """A tensor, its values in row-major order. ``is_exact``: whole numbers, to which no tolerance applies."""

    name: str
    values: Sequence[float]
    shape: tuple[int, ...] = ()
    is_exact: bool = False


Part = Text | Label | Numbers
Answer = tuple[Part, ...]


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers are equal when they differ by at most ``absolute + relative * |the first one|``, as numpy's allclose has
    it. NaN equals NaN, and an infinity itself."""

    relative: float = 1e-3
    absolute: float = 1e-6


EXACT = Tolerance(relative=0.0, absolute=0.0)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference of a part.

    ``position`` is the first differing character of a text, or the index of the first number outside of the tolerance;
    None: the part is missing, of another kind or of another shape.
    """

    part: str
    kind: Literal["text", "label", "numbers", "form"]
    position: int | None = None
    one: str = ""  # what the first answer has there, shortened
    other: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What came of comparing two answers. The errors are of all numbers, also of those within the tolerance."""

    differences: tuple[Difference, ...] = ()
    num_parts: int = 0
    max_abs: float = 0.0  # largest absolute difference of two numbers; infinite: one of them is not finite
    max_rel: float = 0.0  # likewise, relative to the first answer's number

    @property
    def is_equal(self) -> bool:
        return not self.differences


def compare(one: Answer, other: Answer, tolerance: Tolerance = EXACT) -> Comparison:
    """Compare two answers part by part, in the order of the first."""
    differences: list[Difference] = []
    max_abs = max_rel = 0.0
    there = {part.name: part for part in other}
    for part in one:
        twin = there.pop(part.name, None)
        if isinstance(part, Numbers) and isinstance(twin, Numbers) and _is_of_one_shape(part, twin):
            found, largest_abs, largest_rel = _compare_numbers(part, twin, tolerance)
            max_abs, max_rel = max(max_abs, largest_abs), max(max_rel, largest_rel)
        elif isinstance(part, Text) and isinstance(twin, Text):
            found = _compare_texts(part, twin)
        elif isinstance(part, Label) and isinstance(twin, Label):
            is_same = part.value == twin.value
            found = None if is_same else _difference(part.name, "label", 0, part.value, twin.value)
        else:
            found = _difference(part.name, "form", None, _form(part), _form(twin))
        if found is not None:
            differences.append(found)
    differences += [_difference(name, "form", None, _form(None), _form(part)) for name, part in there.items()]
    return Comparison(differences=tuple(differences), num_parts=len(one) + len(there), max_abs=max_abs, max_rel=max_rel)


def first_difference(one: str, other: str) -> int | None:
    """The index of the first character that differs, or at which one of the texts ends; None: they are equal.

    Takes O(log n) comparisons of slices, which the interpreter makes at the speed of memory.
    """
    if one == other:
        return None
    low, high = 0, min(len(one), len(other))  # equal up to low; a difference or an end at high, at the latest
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _is_of_one_shape(one: Numbers, other: Numbers) -> bool:
    return one.shape == other.shape and len(one.values) == len(other.values)


def _compare_texts(one: Text, other: Text) -> Difference | None:
    at = first_difference(one.value, other.value)
    return None if at is None else _difference(one.name, "text", at, one.value[at:], other.value[at:])


def _compare_numbers(one: Numbers, other: Numbers, tolerance: Tolerance) -> tuple[Difference | None, float, float]:
    """The first difference, the largest absolute one and the largest relative one."""
    relative, absolute = tolerance.relative, tolerance.absolute
    if one.is_exact or other.is_exact:
        relative = absolute = 0.0
    found: Difference | None = None
    max_abs = max_rel = 0.0
    for place, (mine, its) in enumerate(zip(one.values, other.values, strict=True)):
        if mine == its or (mine != mine and its != its):
            continue
        error = abs(mine - its)
        is_finite = error < math.inf  # False also for NaN
        max_abs = max(max_abs, error if is_finite else math.inf)
        max_rel = max(max_rel, error / abs(mine) if is_finite and mine else math.inf)
        if found is None and not (is_finite and error <= absolute + relative * abs(mine)):
            found = _difference(one.name, "numbers", place, repr(mine), repr(its))
    return found, max_abs, max_rel


def _difference(
    part: str, kind: Literal["text", "label", "numbers", "form"], position: int | None, one: str, other: str
) -> Difference:
    return Difference(part=part, kind=kind, position=position, one=one[:64], other=other[:64])


def _form(part: Part | None) -> str:
    """The kind of a part in words, for a difference of kinds."""
    match part:
        case None:
            return "nothing"
        case Text():
            return "a text"
        case Label():
            return "a label"
        case Numbers():
            return f"{len(part.values)} numbers of shape {list(part.shape)}"
