"""Parameters of a rotary position table, as config.json gives them; ``rope_tables`` computes the table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal

from inferd.errors import ModelLoadError

# Of each variant that checkpoints use, the parameters that it cannot do without: numbers, and lists of one per
# frequency.
_NEEDED: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": ((), ()),
    "longrope": ((), ("short_factor", "long_factor")),
}


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

    def check(self) -> None:
        """Raises ModelLoadError for an unknown variant, and for parameters that define no table."""
        if self.variant not in _NEEDED:
            raise ModelLoadError(
                f"config.json: rope_type is {self.variant!r}; supported are {', '.join(_NEEDED)}.",
                param="rope_scaling",
            )
        numbers, lists = _NEEDED[self.variant]
        for name in numbers:
            self.number(name)
        for name in lists:
            self.numbers(name)
        if self.variant == "llama3" and (low := self.number("low_freq_factor")) >= self.number("high_freq_factor"):
            raise ModelLoadError(
                f"config.json: rope parameter 'low_freq_factor' is {low}; it must be below high_freq_factor, "
                f"{self.number('high_freq_factor')}.",
                param="low_freq_factor",
            )
        if self.variant == "yarn" and self.theta <= 1:
            raise ModelLoadError(
                f"config.json: rope_theta is {self.theta}; yarn needs one above 1.", param="rope_theta"
            )

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
                f"config.json: rope parameter {name!r} must be a list of {self.dim // 2} positive numbers for "
                f"{self.variant}.",
                param=name,
            )
        return [float(v) for v in value]
