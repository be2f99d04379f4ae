"""Grids of small integers for rows of weights: which scale and zero point lose least.

The range of a group is not simply its extremes: a slightly smaller one rounds all others finer and clips few. Every row of
every group takes, of a few ranges tried, the one with the least squared error, each input weighted by ``importance`` where
that is known (how large it is in the calibration data: the error of a product is that of its weights times its inputs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.quantized import QuantizedWeight

_SHRINKS = tuple(1.0 - 0.025 * i for i in range(17))  # of the extremes: 1 to 0.6
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


def grid(group: Tensor, form: Form, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The best scale [out] and zero point [out], float32, for a group's weights [out, n].

    ``importance`` [n]: of each input's error.
    """
    lowest, highest = group.amin(1).clamp(max=0), group.amax(1).clamp(min=0)
    best = torch.full_like(lowest, torch.inf)
    scale, zero = torch.ones_like(lowest), torch.zeros_like(lowest)
    for shrink in _SHRINKS if form.bits < 8 else (1.0,):
        if form.symmetric:
            # The integers reach one further below than above: either end may be the one that fits.
            reach = torch.maximum(highest / form.high, -lowest / -form.low)
            tried, at = reach * shrink, torch.zeros_like(lowest)
        else:
            tried = (highest - lowest) * shrink / (form.high - form.low)
            at = (form.low - lowest * shrink / tried.clamp(min=1e-30)).round().clamp(form.low, form.high)
        tried = tried.clamp(min=1e-7).to(form.scale_dtype).float()
        lost = (to_grid(group, tried, at, form) - group).square()
        lost = lost.sum(1) if importance is None else lost @ importance
        better = lost < best
        best = torch.where(better, lost, best)
        scale, zero = torch.where(better, tried, scale), torch.where(better, at, zero)
    return scale, zero


def to_integers(weight: Tensor, scale: Tensor, zero: Tensor, form: Form) -> Tensor:
    """[out, n] -> the nearest integers, float32."""
    return (weight / scale.unsqueeze(1) + zero.unsqueeze(1)).round().clamp(form.low, form.high)


def to_grid(weight: Tensor, scale: Tensor, zero: Tensor, form: Form) -> Tensor:
    """[out, n] -> the nearest numbers that the grid has."""
    return (to_integers(weight, scale, zero, form) - zero.unsqueeze(1)) * scale.unsqueeze(1)


def nearest(weight: Tensor, form: Form, importance: Tensor | None = None) -> QuantizedWeight:
    """Every weight [out, in] to the nearest number of its group's best grid."""
    out, inputs = weight.shape
    size = form.group_size or inputs
    values = torch.empty((out, inputs), dtype=torch.int8)
    scale, zero = torch.empty((out, inputs // size)), torch.empty((out, inputs // size))
    for first in range(0, out, _ROWS):
        rows = slice(first, min(first + _ROWS, out))
        for g in range(inputs // size):
            columns = slice(g * size, (g + 1) * size)
            part = weight[rows, columns].float()
            mine = None if importance is None else importance[columns]
            scale[rows, g], zero[rows, g] = grid(part, form, mine)
            values[rows, columns] = to_integers(part, scale[rows, g], zero[rows, g], form).to(torch.int8)
    return made(values, scale, zero, form)


def made(values: Tensor, scale: Tensor, zero: Tensor, form: Form) -> QuantizedWeight:
    whole = None if form.symmetric else zero.to(torch.int8)
    return QuantizedWeight(values, scale, whole, form.bits, form.group_size)
