"""How far estimates of speed were from measured ones, as data that ``python -m bench.plan`` writes."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import msgspec

from inferd.planning.shape import Format


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One shape in one format: tokens per second of all requests together while they are decoded."""

    model: str
    form: Format
    requests: int
    estimated: float
    measured: float

    @property
    def error(self) -> float:
        """How far the estimate is above (positive) or below the measured speed, as a part of it."""
        return self.estimated / self.measured - 1.0


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared, where and when."""

    machine: str
    date: str
    rows: tuple[Row, ...]

    @property
    def worst(self) -> float:
        """The largest error of any row, without its sign."""
        return max((abs(row.error) for row in self.rows), default=0.0)

    @property
    def within(self) -> str:
        """The whole percent that no error exceeds, with how many of the rows are within 20 %."""
        near = sum(abs(row.error) <= 0.2 for row in self.rows)
        return f"{math.ceil(100 * self.worst)} % ({near} of {len(self.rows)} within 20 %)"


@cache
def bundled() -> Measured:
    """The last comparison that was written down."""
    return msgspec.json.decode((Path(__file__).parent / "measured.json").read_bytes(), type=Measured)
