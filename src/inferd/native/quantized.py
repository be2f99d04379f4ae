"""Weights as small integers: what a quantised matrix is, and its product in plain torch.

The product here is the oracle of the kernel (``packed.PackedInts``), and computes where there are no kernels. Does
not know how weights are quantised, nor their layout for a kernel.

Activations are quantised to 8 bits for each product, each row by itself, so that a row's result never depends on other
rows. Where each output has one scale, a row has one scale and one zero point (Dettmers et al. 2022). Where weights have
groups of inputs, a row has a scale for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS_AT_ONCE = 4096  # of a weight that are made floats at once


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A matrix [out, in] of ``(values - zero) * scale``, with a scale for each output and group of inputs."""

    values: Tensor  # int8 [out, in]: -8 to 7 in 4 bits, -128 to 127 in 8
    scale: Tensor  # float32 [out, groups]
    zero: Tensor | None  # int8 [out, groups]; None: all are 0
    bits: int  # 4 or 8
    group_size: int  # inputs of a group, the last of which may be shorter; 0: all inputs are one group
    order: Tensor | None = None  # int64 [in]: the input that each column of values takes (act-order); None: its own

    def __post_init__(self) -> None:
        out, size = self.values.shape
        groups = -(-size // self.group_size) if self.group_size else 1
        assert self.bits in (4, 8), self.bits
        assert self.values.dtype == torch.int8, self.values.dtype
        assert self.scale.dtype == torch.float32, self.scale.dtype
        assert self.scale.shape == (out, groups), (self.scale.shape, self.values.shape, self.group_size)
        assert self.zero is None or (self.zero.dtype == torch.int8 and self.zero.shape == self.scale.shape)
        assert self.order is None or self.order.shape == (size,)

    @property
    def format(self) -> tuple[int, int]:
        """Bits and group size. Stacked matrices have the same format and the same order."""
        return self.bits, self.group_size

    def is_ordered_like(self, other: QuantizedWeight) -> bool:
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    def cut(self, cut: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """The part that ``cut`` gives of a matrix [out, ...], with some of its outputs."""
        zero = None if self.zero is None else cut(self.zero).clone()
        return replace(self, values=cut(self.values).clone(), scale=cut(self.scale).clone(), zero=zero)

    def scale_parts(self) -> tuple[Tensor, Tensor]:
        """``scale`` as float32 [out] times float16 [out, groups].

        An output's own part is a power of two. No precision of float16 and bfloat16 scales is lost where the scales of
        an output differ by less than a factor of 16,000.
        """
        largest = self.scale.abs().amax(1).clamp(min=1e-30)
        own = torch.exp2(torch.floor(torch.log2(largest)))
        return own, (self.scale / own.unsqueeze(1)).half()

    def stored(self) -> QuantizedWeight:
        """This matrix with the precision that products use: scales of groups pass through ``scale_parts``."""
        if not self.group_size:
            return self
        own, parts = self.scale_parts()
        return replace(self, scale=parts.float() * own.unsqueeze(1))

    def dense(self) -> Tensor:
        """[out, in] float32: the whole matrix."""
        return self.rows(torch.arange(self.values.shape[0]))

    def rows(self, ids: Tensor) -> Tensor:
        """[n] int64 -> [n, in] float32: these rows of the matrix, in the inputs' own order."""
        width = self.group_size or self.values.shape[1]
        values = self.values[ids].float()
        if self.zero is not None:
            values -= _spread(self.zero[ids].float(), width, values.shape[1])
        values *= _spread(self.scale[ids], width, values.shape[1])
        return values if self.order is None else values[:, self.order.argsort()]


def by_output(weight: Tensor) -> QuantizedWeight:
    """[out, in] floats in 8 bits with one scale per output, rounded to nearest; an output's largest becomes 127."""
    weight = weight.float()
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127.0
    return QuantizedWeight((weight / scale).round().to(torch.int8), scale, None, 8, 0)


def stacked(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The matrices, all of one format, stacked along the outputs."""
    first = weights[0]
    assert all(each.format == first.format for each in weights), [each.format for each in weights]
    assert all(each.is_ordered_like(first) for each in weights)
    zero = None
    if any(each.zero is not None for each in weights):
        zero = torch.cat([torch.zeros_like(w.scale, dtype=torch.int8) if w.zero is None else w.zero for w in weights])
    values, scale = torch.cat([w.values for w in weights]), torch.cat([w.scale for w in weights])
    return QuantizedWeight(values, scale, zero, first.bits, first.group_size, first.order)


def rounded(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """x [T, in] as the product with ``weight`` uses it: quantised to 8 bits and back, float32."""
    if weight.order is not None:  # groups are of columns
        return rounded(x[:, weight.order], replace(weight, order=None))[:, weight.order.argsort()]
    x = x.float()
    if not weight.group_size and weight.zero is None:
        low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
        inverse = _steps(high - low, 255)
        zero = (-low * inverse).round()
        return (((x * inverse).round() + zero).clamp(0, 255) - zero) * ((high - low) / 255)
    size, width = x.shape[1], weight.group_size or x.shape[1]
    groups = F.pad(x, (0, -size % width)).view(x.shape[0], -1, width)
    peak = groups.abs().amax(2, keepdim=True)
    return ((groups * _steps(peak, 127)).round() * (peak / 127)).view(x.shape[0], -1)[:, :size]


def _steps(span: Tensor, count: int) -> Tensor:
    """count / span, rounded once (a number divided by a tensor is a product with its reciprocal); 0 where span is 0."""
    return torch.where(span > 0, torch.full_like(span, count) / span, 0.0)


def product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """[T, in] -> [T, out] float32."""
    x = rounded(x, weight)
    out = torch.empty((x.shape[0], weight.values.shape[0]), dtype=torch.float32, device=x.device)
    for first in range(0, out.shape[1], _ROWS_AT_ONCE):
        ids = torch.arange(first, min(first + _ROWS_AT_ONCE, out.shape[1]), device=x.device)
        out[:, first : first + _ROWS_AT_ONCE] = x @ weight.rows(ids).T
    return out if bias is None else out + bias.float()


def _spread(per_group: Tensor, width: int, size: int) -> Tensor:
    """[n, groups] -> [n, size]."""
    return per_group.repeat_interleave(width, dim=1)[:, :size]
