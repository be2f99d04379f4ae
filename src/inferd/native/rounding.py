"""Quantises weights: chooses scales and zero points with the least error, then the nearest integers.

Knows one matrix at a time. In 8 bits the largest number of an output (or group) becomes 127. In 4 bits each group of
inputs has a scale and a zero point, fitted by least squares over a few ranges, of which the narrower ones cut off the
group's extremes. In groups of 32 the squared error of normal weights is 0.64 of that of rounding over the whole range
with symmetric integers, and 0.53 for heavy tails.

At load nothing else is known of the inputs; kernels/rounding.h computes the same and the torch form here is its oracle.
Calibration (``engine.calibrate``) uses the same function with a weight for each input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inferd.native import compiled
from inferd.native.quantized import QuantizedWeight

VERSION = 1  # of the method: integers that were kept by another one are made again
RANGES = (1.0, 0.925, 0.85, 0.775, 0.7)  # of a group's own
TINY = 1e-12  # the least scale


def rounded_weight(weight: Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """[out, in] floats in ``bits`` bits (4 or 8), ``group_size`` inputs to a scale (0: all)."""
    weight = weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()
    if compiled.takes(weight) and weight.numel():
        return _rounded_by_kernel(weight, bits, group_size)
    out, size = weight.shape
    width = group_size or size
    groups = F.pad(weight.float(), (0, -size % width)).view(out, -1, width)
    if bits == 8:
        scale, zero = fitted_bytes(groups), None
    else:
        scale, zero = fitted_nibbles(groups)
    values = to_integers(groups, scale, zero, bits)
    values = values.view(out, -1)[:, :size].to(torch.int8).contiguous()
    return QuantizedWeight(values, scale, None if zero is None else zero.to(torch.int8), bits, group_size)


def _rounded_by_kernel(weight: Tensor, bits: int, group_size: int) -> QuantizedWeight:
    out, size = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    groups = -(-size // group_size) if group_size else 1
    values, scale = torch.empty((out, size), dtype=torch.int8), torch.empty((out, groups))
    zero = torch.empty((out, groups), dtype=torch.int8) if bits == 4 else None
    compiled.kernels.round_weights(
        compiled.CODES[weight.dtype],
        bits,
        weight.data_ptr(),
        weight.stride(0),
        out,
        size,
        group_size,
        values.data_ptr(),
        scale.data_ptr(),
        0 if zero is None else zero.data_ptr(),
        torch.get_num_threads(),
    )
    return QuantizedWeight(values, scale, zero, bits, group_size)


def to_integers(groups: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """[..., n] -> the nearest whole numbers on their group's grid, float32. ``scale``, ``zero``: [...]."""
    half = 1 << (bits - 1)
    least, most = (-half + 1, half - 1) if bits == 8 else (-half, half - 1)
    middle = torch.zeros_like(scale) if zero is None else zero
    # The zero point is added behind the rounding, as a kernel may want it: a whole number changes nothing there.
    return ((groups / scale.unsqueeze(-1)).round() + middle.unsqueeze(-1)).clamp(least, most)


def fitted_bytes(groups: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., n] -> scales [...] of 8 bits, symmetric. ``dtype``: the format that scales are stored in."""
    return storable(groups.abs().amax(-1).clamp(min=TINY) / 127.0, dtype)


def fitted_nibbles(
    groups: Tensor, *, symmetric: bool = False, importance: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """[..., n] -> scales and zero points [...] of 4 bits, float32; zero points are whole numbers from -8 to 7.

    A few ranges are tried for each group, and the one with the least squared error is chosen. ``importance`` weights
    each input's error and broadcasts over the groups. For each range, scale and integers are fitted to each other
    twice. ``symmetric``: zero points are 0, and scales may be negative, because integers reach one further on the
    negative side. ``dtype``: the format that scales are stored in.
    """
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    best = torch.full_like(low, torch.inf)
    fitted, middle = torch.full_like(low, TINY), torch.full_like(low, 8.0)
    for part in RANGES:
        if symmetric:
            middle_here = torch.full_like(low, 8.0)
            starts = [torch.maximum(high / 7, -low / 8) * part, -torch.maximum(high / 8, -low / 7) * part]
        else:
            first = ((high - low) * part / 15).clamp(min=TINY)
            middle_here = (7.5 - (high + low) / 2 / first).round().clamp(0, 15)
            starts = [first]
        for scale in starts:
            scale, error = _fit(groups, _not_zero(scale), middle_here, importance, dtype)
            is_better = error < best
            best = torch.where(is_better, error, best)
            fitted, middle = torch.where(is_better, scale, fitted), torch.where(is_better, middle_here, middle)
    return fitted.squeeze(-1), middle.squeeze(-1) - 8


def _fit(
    groups: Tensor, scale: Tensor, zero: Tensor, importance: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale and integers fitted to each other: the scale, and the error that remains."""

    def nearest(scale: Tensor) -> Tensor:
        return torch.maximum(-zero, torch.minimum(15 - zero, (groups / scale).round()))

    def total(x: Tensor) -> Tensor:
        return (x if importance is None else x * importance).sum(-1, keepdim=True)

    for _ in range(2):
        q = nearest(scale)
        squares = total(q * q)
        scale = _not_zero(torch.where(squares > 0, total(groups * q) / squares, scale))
    scale = storable(scale, dtype)
    return scale, total((groups - nearest(scale) * scale).square())


def _not_zero(scale: Tensor) -> Tensor:
    return torch.where(scale < 0, scale.clamp(max=-TINY), scale.clamp(min=TINY))


def storable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest scales that ``dtype`` has, none of them 0."""
    least = max(TINY, torch.finfo(dtype).smallest_normal)
    return torch.where(scale < 0, scale.clamp(max=-least), scale.clamp(min=least)).to(dtype).float()
