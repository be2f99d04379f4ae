"""Makes integers of weights: which scale and zero point lose least, and the nearest integers.

Knows one matrix at a time. 8 bits: the largest of an output (or group) is 127, the others go to the nearest. 4 bits: each
group of inputs has a scale and a zero point, fitted by least squares over a few ranges, the narrower of which cut off the
group's ends (in groups of 32 the squared error of normal weights is 0.64 of what rounding to the nearest over the whole
range leaves, with symmetric integers, and 0.53 for heavy tails). At load nothing else is known, and the kernels do the same
(kernels/rounding.h); the torch form is their oracle. Calibration (``engine.calibrate``) fits with the same function, by what
each input weighs.
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
        values, scale, zero = compiled.round_weights(weight, bits, group_size)
        return QuantizedWeight(values, scale, zero, bits, group_size)
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


def to_integers(groups: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """[..., n] numbers -> the nearest of their group's grid as whole numbers, float32. ``scale``, ``zero``: [...]."""
    half = 1 << (bits - 1)
    least, most = (-half + 1, half - 1) if bits == 8 else (-half, half - 1)
    middle = torch.zeros_like(scale) if zero is None else zero
    # The zero point is added behind the rounding, as a kernel may want it: a whole number changes nothing there.
    return ((groups / scale.unsqueeze(-1)).round() + middle.unsqueeze(-1)).clamp(least, most)


def fitted_bytes(groups: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., n] -> scales [...] of 8 bits, symmetric. ``dtype``: what scales are stored in."""
    return storable(groups.abs().amax(-1).clamp(min=TINY) / 127.0, dtype)


def fitted_nibbles(
    groups: Tensor, *, symmetric: bool = False, importance: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """[..., n] -> scales and zero points [...] of 4 bits, float32; the zero points are whole numbers from -8 to 7.

    Every group takes, of a few ranges tried, the one with the least squared error, each input's weighted by ``importance``
    (which broadcasts over the groups), where scale and integers are fitted to each other twice. ``symmetric``: zero points are
    0, and scales may be negative, as the integers reach one further on one side. ``dtype``: what scales are stored in.
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
    """Scale and integers fitted to each other; the scale and what is lost with it."""

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
