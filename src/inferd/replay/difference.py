"""What two answers to one request differ in: texts, tensors, labels. Pure."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from inferd.compare.answers import EXACT, Tolerance
from inferd.predict.contract import Array
from inferd.replay.answers import Answer
from inferd.replay.edit_distance import common_ends, edit_distance

AROUND: Final = 40
"""Characters that are shown before and behind the first difference."""


class TextDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Two texts that differ."""

    place: str
    first: int  # the first character that differs, from 0
    first_word: int  # the word it is in, from 0
    length: int  # characters of the earlier text
    distance: int | None  # characters to insert, delete or replace; None: too long to count
    before: str  # an excerpt of the earlier text, from before the difference
    after: str


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Two tensors of one name that differ."""

    name: str
    problem: str = ""  # why they cannot be compared by value: other shapes or datatypes; else empty
    number: int = 0  # of values
    number_different: int = 0
    number_beyond: int = 0  # of those that differ: values outside of the tolerance
    max_abs: float = 0.0
    max_rel: float = 0.0  # of the absolute difference over the larger size of both values
    ulps: tuple[float, float, float, float] | None = None  # 50 %, 90 %, 99 % and 100 % quantile; None: no floats


class Flip(msgspec.Struct, frozen=True):
    """A label that changed."""

    before: str
    after: str


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What two answers differ in; all parts empty: they are equal to the bit."""

    is_equal: bool
    texts: tuple[TextDifference, ...] = ()
    tensors: tuple[TensorDifference, ...] = ()
    flips: tuple[Flip, ...] = ()
    num_labels: int = 0  # labels that both answers have
    finish: tuple[str, str] | None = None  # reasons for the end, where they differ
    other: str = ""  # a difference that is none of these

    @property
    def is_within(self) -> bool:
        """Whether the answers are equal but for numbers within the tolerance."""
        if self.is_equal:
            return True
        if self.texts or self.flips or self.finish is not None or self.other:
            return False
        return not any(one.problem or one.number_beyond for one in self.tensors)


def difference_of(before: Answer, after: Answer, tolerance: Tolerance = EXACT) -> Difference:
    """Compare two answers without errors, or two errors."""
    labels = list(zip(before.labels, after.labels, strict=False))
    if before.exact == after.exact and before.status == after.status:
        return Difference(is_equal=True, num_labels=len(labels))
    texts = tuple(
        text_difference(place, before.texts.get(place, ""), after.texts.get(place, ""))
        for place in dict.fromkeys((*before.texts, *after.texts))
        if before.texts.get(place, "") != after.texts.get(place, "")
    )
    tensors = tuple(
        found
        for name in dict.fromkeys((*before.tensors, *after.tensors))
        if (found := tensor_difference(name, before.tensors.get(name), after.tensors.get(name), tolerance)) is not None
    )
    flips = tuple(Flip(one, other) for one, other in labels if one != other)
    finish = (", ".join(before.finish), ", ".join(after.finish)) if before.finish != after.finish else None
    other = ""
    if before.status != after.status:
        other = f"status {before.status} became {after.status}"
    elif len(before.labels) != len(after.labels):
        other = f"{len(before.labels)} labels became {len(after.labels)}"
    elif not (texts or tensors or flips or finish):
        other = "other fields of the answer differ, such as log-probabilities"
    return Difference(
        is_equal=False, texts=texts, tensors=tensors, flips=flips, num_labels=len(labels), finish=finish, other=other
    )


def text_difference(place: str, before: str, after: str) -> TextDifference:
    """Where two texts that differ begin to differ, and by how much."""
    first, _ = common_ends(before, after)
    start = max(0, first - AROUND)
    return TextDifference(
        place=place,
        first=first,
        first_word=max(0, len(before[: first + 1].split()) - 1),
        length=len(before),
        distance=edit_distance(before, after),
        before=before[start : first + AROUND],
        after=after[start : first + AROUND],
    )


def tensor_difference(
    name: str, before: Array | None, after: Array | None, tolerance: Tolerance = EXACT
) -> TensorDifference | None:
    """None: they are equal to the bit. Words and whole numbers have no tolerance."""
    if before is None or after is None:
        return TensorDifference(name=name, problem="only one of the answers has it")
    if before.shape != after.shape or before.dtype != after.dtype:
        return TensorDifference(
            name=name, problem=f"{before.dtype} {[*before.shape]} became {after.dtype} {[*after.shape]}"
        )
    if before.dtype == object:
        number = sum(one != other for one, other in zip(before.ravel(), after.ravel(), strict=True))
        if not number:
            return None
        return TensorDifference(name=name, number=before.size, number_different=number, number_beyond=number)
    if before.tobytes() == after.tobytes():
        return None
    one, other = before.astype(np.float64).ravel(), after.astype(np.float64).ravel()
    different = ~((one == other) | (np.isnan(one) & np.isnan(other)))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        sizes = np.abs(one - other)
        relative = sizes / np.maximum(np.abs(one), np.abs(other))
        within = sizes <= tolerance.absolute + tolerance.relative * np.abs(one)
    is_float = before.dtype.kind == "f"
    beyond = different & ~within if is_float else different
    return TensorDifference(
        name=name,
        number=before.size,
        number_different=int(different.sum()),
        number_beyond=int(beyond.sum()),
        max_abs=_largest(sizes[different]),
        max_rel=_largest(relative[different]),
        ulps=_quantiles(ulps_between(before.ravel(), after.ravel())) if is_float else None,
    )


def _largest(values: npt.NDArray[np.float64]) -> float:
    """Infinity where one is not a number, because a value became one."""
    if not values.size:
        return 0.0
    found = float(values.max())
    return float("inf") if found != found else found


def ulps_between(one: Array, other: Array) -> npt.NDArray[np.float64]:
    """How many floating-point numbers lie between each pair of values of one format, at least.

    0 and -0 are one apart from the smallest numbers, and 0 apart from each other. A value that is not a number is
    infinitely far from every other, and 0 from another such value.
    """
    kind = np.dtype(f"i{one.dtype.itemsize}")
    places = []
    for values in (one, other):
        bits = np.ascontiguousarray(values).view(kind).astype(object if kind.itemsize == 8 else np.int64)
        places.append(np.where(bits < 0, -(bits + (1 << (8 * kind.itemsize - 1))), bits))
    found: npt.NDArray[np.float64] = np.abs(places[0] - places[1]).astype(np.float64)
    none, no_other = np.isnan(one.astype(np.float64)), np.isnan(other.astype(np.float64))
    found[none & no_other] = 0.0
    found[none ^ no_other] = np.inf
    return found


def _quantiles(values: npt.NDArray[np.float64]) -> tuple[float, float, float, float]:
    found = [float(np.quantile(values, part, method="inverted_cdf")) for part in (0.5, 0.9, 0.99, 1.0)]
    return found[0], found[1], found[2], found[3]
