"""Integer grids for the rows of a weight, as a checkpoint stores them.

``Form`` says which integers a checkpoint has. ``native.rounding`` finds the scales and zero points with the least
error, here weighted by ``importance``: an input's size in the calibration data, by which a weight's error is
multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.native import rounding
from inferd.native.quantized import QuantizedWeight

_ROWS = 1024  # at once


@dataclass(frozen=True, slots=True)
class Form:
    """What integers a weight becomes: ``group_size`` inputs share a scale, 0: all of a row."""

    bits: int
    group_size: int
    symmetric: bool = True  # no zero points
    scale_dtype: torch.dtype = torch.float32  # that scales are stored in, so they are chosen among its numbers

    @property
    def low(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def fits(self, inputs: int) -> bool:
        return self.group_size == 0 or inputs % self.group_size == 0


def grid(groups: Tensor, form: Form, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The best scales and zero points [...], float32, for groups of weights [..., n].

    ``importance``: weight of each input's error; broadcasts over the groups.
    """
    if form.bits == 8:
        scale = rounding.fitted_bytes(groups, form.scale_dtype)
        return scale, torch.zeros_like(scale)
    return rounding.fitted_nibbles(groups, symmetric=form.symmetric, importance=importance, dtype=form.scale_dtype)


def storable(scale: Tensor, form: Form) -> Tensor:
    """The nearest scales that the checkpoint can store."""
    return rounding.storable(scale, form.scale_dtype)


def nearest(weight: Tensor, form: Form) -> QuantizedWeight:
    """Every weight [out, in] rounded to its group's best grid."""
    out, inputs = weight.shape
    size = form.group_size or inputs
    values = torch.empty((out, inputs), dtype=torch.int8)
    scale, zero = torch.empty((out, inputs // size)), torch.empty((out, inputs // size))
    for first in range(0, out, _ROWS):
        rows = slice(first, min(first + _ROWS, out))
        groups = weight[rows].float().view(-1, inputs // size, size)
        scale[rows], zero[rows] = grid(groups, form)
        whole = rounding.to_integers(groups, scale[rows], zero[rows], form.bits)
        values[rows] = whole.view(-1, inputs).to(torch.int8)
    return made(values, scale, zero, form)


def made(values: Tensor, scale: Tensor, zero: Tensor, form: Form) -> QuantizedWeight:
    whole = None if form.symmetric else zero.to(torch.int8)
    return QuantizedWeight(values, scale, whole, form.bits, form.group_size)
