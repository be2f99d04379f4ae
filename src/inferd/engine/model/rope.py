"""Parameters of a rotary position table, as config.json gives them. ``rope_tables`` computes the table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from inferd.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Rope:
    """Parameters of one table. ``dim`` is the rotated part of a head."""

    dim: int
    theta: float
    variant: str = "default"
    options: dict[str, object] = field(default_factory=dict)
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int | None = None
    factors: Literal["short", "long"] | None = None  # of LongRoPE; None: by the table's length

    def number(self, name: str, default: float | None = None) -> float:
        value = self.options.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ModelLoadError(
                f"config.json: rope parameter {name!r} is {value!r}; {self.variant} needs a positive number there.",
                param=name,
            )
        return float(value)

    def numbers(self, name: str) -> list[float]:
        value = self.options.get(name)
        if (
            not isinstance(value, list)
            or len(value) != self.dim // 2
            or not all(isinstance(v, int | float) and v > 0 for v in value)
        ):
            raise ModelLoadError(
                f"config.json: rope parameter {name!r} must be a list of {self.dim // 2} positive numbers for {self.variant}.",
                param=name,
            )
        return [float(v) for v in value]
