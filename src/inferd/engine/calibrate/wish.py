"""Settings of a quantisation. Knows no tensor and no file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from inferd.engine.calibrate.rounding import Form

Method = Literal["int8", "int4", "gptq", "tuned"]

_NARROW, _NARROW_GROUP = 512, 64
"""Models whose hidden states are narrower than this have 8 bits in groups: sums of so few terms do not average errors
out, and activations that share a scale with fewer others lose less (docs/quantisation.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The settings of one quantisation. Lengths are in tokens."""

    method: Method
    bits: int = 4  # of gptq
    tuning_tokens: int | None = (
        None  # of tuned: learned from, repetitions counted; None: a million, fewer for large models
    )
    group_size: int = 32  # of 4 bits
    symmetric: bool = False  # of 4 bits: without zero points
    num_samples: int = 128  # windows of calibration
    context: int = 512  # of a window, in calibration and measurement
    damping: float = 0.01
    by_size: bool = True  # gptq's act-order
    mixed: bool = False  # the products that lose most in 4 bits get 8, as many as max_change asks for
    held_out: float = 0.2  # the end of the text, that is for measuring alone
    most_measured: int = 100_000  # tokens
    max_change: float | None = None  # of perplexity, as a part of it: more is a failure

    @property
    def calibrates(self) -> bool:
        """Whether the method learns from a text."""
        return self.method in ("gptq", "tuned")

    def form(self, hidden_size: int, widths: Collection[int]) -> Form:
        """The form of the weights of products with so many inputs."""
        if self.method in ("int4", "tuned") or (self.method == "gptq" and self.bits == 4):
            return Form(4, self.group_size, self.symmetric)
        in_groups = hidden_size < _NARROW and all(width % _NARROW_GROUP == 0 for width in widths)
        return Form(8, _NARROW_GROUP if in_groups else 0)
