"""Which matrices of a model are made integers at load, of how many bits, and what they take. Knows no tensor.

The loader and the planner both ask here, so they agree. The rule, by measured perplexity (docs/quantisation.md):

- Products take what was asked for: int8 with one scale for each output, or int4 in groups of 64 inputs with zero points
  (4.375 bits; groups of 32 have a fifth less squared error on normal weights, but multiply many rows a seventh slower).
- The embedding and the output layer are never narrower than int8: every token goes through both.
- Models whose hidden states have fewer than 512 elements take int8 in groups of 64. Their sums are too short for errors to
  cancel out (one of 192 loses a third in 4 bits), and models that narrow are read from the processor's caches anyway.
- Norms, biases, learned positions and the routers of experts stay as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NARROW = 512  # elements of a hidden state
_TABLES = re.compile(r"(^|\.)(embed_tokens|lm_head|wte|embed_in|embed_out)\.weight$")
_NUMBERS = re.compile(r"(^|\.)(gate|router|wpe)\.weight$|norm[^.]*\.weight$")


@dataclass(frozen=True, slots=True)
class Form:
    """Integers of a matrix."""

    bits: int  # 4 or 8
    group_size: int  # inputs that share a scale; 0: all of an output
    has_zero: bool  # groups have zero points
    is_float: bool = False  # numbers of 8 bits with a point (e4m3), on CUDA

    @property
    def name(self) -> str:
        if self.is_float:
            return "fp8"
        return f"int{self.bits}" + (f"/{self.group_size}" if self.group_size else "")

    @property
    def has_total(self) -> bool:
        """Whether outputs have the sums of their integers, for activations with zero points."""
        return not self.group_size and not self.has_zero and not self.is_float

    def packed_bytes(self, out: int, size: int, panel: int = 1) -> int:
        """Memory of the integers of a matrix [out, size], with the scales (2 bytes) and zero points of groups; see
        kernels/ints.h. ``panel``: outputs that are filled up to a multiple of it."""
        lane = 4 if self.bits == 8 else 8  # inputs that lie together
        group = self.group_size or size
        head = (2 if self.group_size else 0) + (1 if self.has_zero else 0)
        return -(-out // panel) * panel * -(-size // group) * (-(-group // lane) * 4 + head)

    def nbytes(self, out: int, size: int) -> int:
        """Memory of a matrix [out, size], with an output's own scale, and its total where it has one."""
        return self.packed_bytes(out, size) + out * (8 if self.has_total else 4)


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of a model's matrices by their names."""

    asked: str  # what the configuration says: auto, none, int8, int4 or fp8
    hidden_size: int

    def form(self, name: str) -> Form | None:
        """The form of the matrix ``name``; None: it stays as it is."""
        if self.asked not in ("int8", "int4", "fp8") or not name.endswith(".weight") or _NUMBERS.search(name):
            return None
        if self.asked == "fp8":
            return Form(8, 0, False, is_float=True)
        if self.hidden_size < NARROW:
            return Form(8, 64, False)
        return Form(4, 64, True) if self.asked == "int4" and not _TABLES.search(name) else Form(8, 0, False)


UNTOUCHED = Rule("none", 0)
