"""What every measurement's report is made of: medians with their spread, ratios, tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """Repetitions of one measurement."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("A figure needs at least one measurement, got none.")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median; 0 where the median is 0."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0

    def __str__(self) -> str:
        digits = 0 if self.median >= 100 else 1 if self.median >= 10 else 2
        if len(self.values) == 1:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({min(self.values):.{digits}f}-{max(self.values):.{digits}f})"


def ratio(ours: Figure, others: Sequence[Figure], *, lower_is_better: bool = False) -> float | None:
    """How many times better our median is than the best of theirs; None where there is nobody to compare with."""
    medians = [figure.median for figure in others]
    if not medians:
        return None
    best = min(medians) if lower_is_better else max(medians)
    over, under = (best, ours.median) if lower_is_better else (ours.median, best)
    return over / under if under else None


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; every row must be as long as the head."""
    for row in rows:
        if len(row) != len(head):
            raise ValueError(f"A row has {len(row)} cells, but the head has {len(head)}: {list(row)}")
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"
