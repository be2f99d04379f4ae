"""One line of the table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    value: float
    unit: str
    passed: bool | None = None  # None: a figure, not a check
    of: float | None = None  # share of the limit or of the peer
    note: str = ""

    @property
    def line(self) -> str:
        verdict = "" if self.passed is None else "ok" if self.passed else "FAILED"
        share = "" if self.of is None else f"{self.of:.2f}x"
        return f"{self.name:<58} {self.value:>12.4g} {self.unit:<14} {share:>7} {verdict:<7} {self.note}"
