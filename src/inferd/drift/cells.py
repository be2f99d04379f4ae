"""Cells that the values of a stream are counted in: a fixed number of them, whatever the values are.

The cells of numbers lie between a few edges, those of names are the names. The first values of a reference choose the
cells, and are then dropped: the counts of the reference begin after them. So the cells do not depend on any value that
is counted, which the exact test needs.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

MAX_NAMES: Final = 31
"""Names with a cell of their own. All other names share one."""

NUM_PARTS: Final = 10
"""Parts of equal size into which edges divide numbers."""

FEW: Final = 5
"""So few different numbers have a cell each."""

Value = float | str


class Cells(msgspec.Struct, frozen=True, kw_only=True):
    """Either ``edges`` or ``names``. A number is in cell i if ``edges[i-1] < number <= edges[i]``. A name that is not
    among ``names`` is in the last cell."""

    edges: tuple[float, ...] | None = None
    names: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.edges or self.names or ()) + 1

    def count(self, values: Sequence[Value], counts: list[float]) -> None:
        """Add values to the counts of the cells, which are as many as the cells."""
        if self.edges is not None:
            edges = self.edges
            for value in values:
                counts[bisect_left(edges, value)] += 1
            return
        assert self.names is not None, "cells have edges or names"
        places: dict[Value, int] = {name: place for place, name in enumerate(self.names)}
        other = len(places)
        for value in values:
            counts[places.get(value, other)] += 1


class Compared(NamedTuple):
    """A set of values whose share of a window and of the reference is compared."""

    words: str  # as in "is at most 0.3"
    reference: int
    window: int


def chosen_cells(values: Sequence[Value]) -> Cells:
    """The cells for values like these, of which there is at least one."""
    if isinstance(values[0], str):
        common = Counter(str(value) for value in values).most_common(MAX_NAMES)
        return Cells(names=tuple(sorted(name for name, _ in common)))
    numbers = sorted(float(value) for value in values)
    different = sorted(set(numbers))
    if len(different) <= FEW:
        edges = {edge for number in different for edge in (math.nextafter(number, -math.inf), number)}
    else:
        edges = {numbers[len(numbers) * part // NUM_PARTS] for part in range(1, NUM_PARTS)}
    return Cells(edges=tuple(sorted(edges)))


def cell_words(cells: Cells) -> list[str]:
    """What is in each cell: "up to 12", "above 12 up to 20", "from 3 below 5", "4", a name, or "others"."""
    if cells.edges is None:
        assert cells.names is not None, "cells have edges or names"
        return [*cells.names, "others"]
    bounds = [_bound(edge) for edge in cells.edges]
    words = [f"{'up to' if bounds[0].is_in_lower else 'below'} {bounds[0].shown}"]
    for low, high in itertools.pairwise(bounds):
        if low.shown == high.shown and not low.is_in_lower:
            words.append(low.shown)  # the edges enclose this number alone
            continue
        begin, end = "above" if low.is_in_lower else "from", "up to" if high.is_in_lower else "below"
        words.append(f"{begin} {low.shown} {end} {high.shown}")
    return [*words, f"{'above' if bounds[-1].is_in_lower else 'from'} {bounds[-1].shown}"]


class _Bound(NamedTuple):
    shown: str
    is_in_lower: bool  # whether the number that is shown is in the cell below the edge


def _bound(edge: float) -> _Bound:
    shown = float(f"{edge:.6g}")
    return _Bound(f"{shown:.6g}", shown <= edge)


def compared(cells: Cells, reference: Sequence[int], window: Sequence[int]) -> Iterator[Compared]:
    """What a window is compared with its reference in: the names, or the numbers up to each edge.

    A change of a number's distribution moves many values a little, which the sums up to an edge show and single cells
    do not: the largest difference between them is that of Kolmogorov and Smirnov, at the edges alone.
    """
    if cells.edges is not None:
        before = now = 0
        for edge, old, new in zip(cells.edges, reference, window, strict=False):
            before, now = before + old, now + new
            yield Compared(_edge_words(edge), before, now)
        return
    assert cells.names is not None, "cells have edges or names"
    for name, old, new in zip((*cells.names, None), reference, window, strict=True):
        yield Compared("is another one" if name is None else f"is {name!r}", old, new)


def num_compared(cells: Cells) -> int:
    """The number of sets that ``compared`` has."""
    return len(cells) - 1 if cells.edges is not None else len(cells)


def _edge_words(edge: float) -> str:
    bound = _bound(edge)
    return f"is {'at most' if bound.is_in_lower else 'below'} {bound.shown}"
