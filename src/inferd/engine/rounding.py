"""Makes integers of weights at load, without any data.

Knows one matrix at a time. 8 bits: the largest of an output (or group) is 127, the others go to the nearest. 4 bits: each
group of inputs has a scale and a zero point, fitted by least squares over a few ranges, the narrower of which cut off the
group's ends (in groups of 32 the squared error of normal weights is 0.64 of what rounding to the nearest over the whole
range leaves, with symmetric integers, and 0.53 for heavy tails). The kernels do the same (kernels/rounding.h); the torch
form is their oracle.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inferd.engine import native
from inferd.engine.quantized import QuantizedWeight

VERSION = 1  # of the method: integers that were kept by another one are made again
_RANGES = (1.0, 0.925, 0.85, 0.775, 0.7)
_TINY = 1e-12


def rounded_weight(weight: Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """[out, in] floats in ``bits`` bits (4 or 8), ``group_size`` inputs to a scale (0: all)."""
    weight = weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()
    if native.takes(weight) and weight.numel():
        values, scale, zero = native.round_weights(weight, bits, group_size)
        return QuantizedWeight(values, scale, zero, bits, group_size)
    out, size = weight.shape
    width = group_size or size
    groups = F.pad(weight.float(), (0, -size % width)).view(out, -1, width)
    values, scale, zero = _nibbles(groups) if bits == 4 else _bytes(groups)
    return QuantizedWeight(values.view(out, -1)[:, :size].to(torch.int8).contiguous(), scale, zero, bits, group_size)


def _bytes(groups: Tensor) -> tuple[Tensor, Tensor, None]:
    scale = groups.abs().amax(2).clamp(min=_TINY) / 127.0
    return (groups / scale.unsqueeze(2)).round().clamp(-127, 127), scale, None


def _nibbles(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    best = torch.full_like(low, torch.inf)
    found, fitted, middle = torch.zeros_like(groups), torch.full_like(low, _TINY), torch.full_like(low, 8.0)
    for part in _RANGES:
        scale = ((high - low) * part / 15).clamp(min=_TINY)
        zero = (7.5 - (high + low) / 2 / scale).round().clamp(0, 15)
        for _ in range(2):
            q = torch.maximum(-zero, torch.minimum(15 - zero, (groups / scale).round()))
            squares = (q * q).sum(2, keepdim=True)
            scale = torch.where(squares > 0, (groups * q).sum(2, keepdim=True) / squares, scale).clamp(min=_TINY)
        q = torch.maximum(-zero, torch.minimum(15 - zero, (groups / scale).round()))
        error = (groups - q * scale).square().sum(2, keepdim=True)
        is_better = error < best
        best = torch.where(is_better, error, best)
        fitted, middle = torch.where(is_better, scale, fitted), torch.where(is_better, zero, middle)
        found = torch.where(is_better, q, found)
    return found + middle - 8, fitted.squeeze(2), (middle - 8).squeeze(2).to(torch.int8)
