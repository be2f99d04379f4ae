"""Which matrices of a model become integers at load, with how many bits, and how much memory they take. Knows no
tensor.

The loader and the planner both use these rules, so their figures agree. The rules follow from measured perplexity
(docs/quantisation.md):

- Products take the requested form: int8 with one scale for each output, or int4 in groups of 64 inputs with zero points
  (4.375 bits). Groups of 32 have a fifth less squared error on normal weights, but multiply many rows a seventh slower.
- The embedding and the output layer are never narrower than int8, because every token passes both.
- Models whose hidden states have fewer than 512 elements take int8 in groups of 64. Their sums are too short for errors
  to cancel out: a model of 192 loses a third of its quality in 4 bits. Such models fit into processor caches anyway.
- Norms, biases, learned positions and the routers of experts stay as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NARROW = 512  # elements of a hidden state
PANEL_ROWS = 64  # outputs that lie together in the kernels' layout (kernels/table.h)
_TABLES = re.compile(r"(^|\.)(embed_tokens|lm_head|wte|embed_in|embed_out)\.weight$")
_ROUTER = re.compile(r"(^|\.)(gate|router)\.weight$")
_NUMBERS = re.compile(r"(^|\.)(gate|router|wpe)\.weight$|norm[^.]*\.weight$")


@dataclass(frozen=True, slots=True)
class Form:
    """Integers of a matrix."""

    bits: int  # 4 or 8
    group_size: int  # inputs that share a scale; 0: all of an output
    has_zero: bool  # groups have zero points
    is_float: bool = False  # 8-bit floats (e4m3), on CUDA

    @property
    def name(self) -> str:
        if self.is_float:
            return "fp8"
        return f"int{self.bits}" + (f"/{self.group_size}" if self.group_size else "")

    @property
    def has_total(self) -> bool:
        """Whether each output has the sum of its integers, which activations with zero points need."""
        return not self.group_size and not self.has_zero and not self.is_float

    def packed_bytes(self, out: int, size: int, panel: int = 1) -> int:
        """Memory of the integers of a matrix [out, size], with the scales (2 bytes) and zero points of groups.

        See kernels/ints.h. ``panel``: the number of outputs is rounded up to a multiple of it.
        """
        lane = 4 if self.bits == 8 else 8  # inputs that lie together
        group = self.group_size or size
        head = (2 if self.group_size else 0) + (1 if self.has_zero else 0)
        return -(-out // panel) * panel * -(-size // group) * (-(-group // lane) * 4 + head)

    def nbytes(self, out: int, size: int) -> int:
        """Memory of a matrix [out, size], with each output's own scale, and its total where it has one."""
        return self.packed_bytes(out, size) + out * (8 if self.has_total else 4)


@dataclass(frozen=True, slots=True)
class Rule:
    """The form of each of a model's matrices, by name."""

    asked: str  # what the configuration says: auto, none, int8, int4 or fp8
    hidden_size: int

    def form(self, name: str) -> Form | None:
        """The form of the matrix ``name``; None: it is not quantised."""
        if self.asked not in ("int8", "int4", "fp8") or not name.endswith(".weight") or _NUMBERS.search(name):
            return None
        if self.asked == "fp8":
            return Form(8, 0, False, is_float=True)
        if self.hidden_size < NARROW:
            return Form(8, 64, False)
        return Form(4, 64, True) if self.asked == "int4" and not _TABLES.search(name) else Form(8, 0, False)


UNTOUCHED = Rule("none", 0)


def padded(out: int) -> int:
    """Outputs of a packed matrix, which has whole panels."""
    return -(-out // PANEL_ROWS) * PANEL_ROWS


def padding(name: str, out: int, size: int) -> int:
    """Numbers [out, size] that packing adds to the matrix ``name``.

    Only routers are counted, of which they are most: 8 experts are 64 outputs. Other products have thousands of
    outputs, mostly in whole panels, and several are packed as one. A device does not pad; the difference is small.
    """
    return (padded(out) - out) * size if _ROUTER.search(name) else 0
