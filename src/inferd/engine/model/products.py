"""Builds products from a checkpoint's weights; those with the same inputs become one, as numbers or as integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from inferd.checkpoints.weight_cache import WeightCache
from inferd.checkpoints.weights import Weights
from inferd.native import compiled, ops
from inferd.native.forms import PANEL_ROWS, Form
from inferd.native.packed import PackedInts, allocate_packed
from inferd.native.quantized import QuantizedWeight, stacked
from inferd.native.rounding import rounded_weight

_AT_ONCE = 1 << 21  # integers that are rounded before they are packed


def product(
    weights: Weights,
    parts: Sequence[tuple[str, tuple[int, int]]],
    width: int,
    bias: Tensor | None = None,
    change: Callable[[Tensor], Tensor] = lambda weight: weight,
) -> ops.Linear:
    """One product of the stacked matrices (name, shape as stored), with ``width`` inputs.

    The weights are integers where the model is to be quantised. ``change``: turns a stored matrix into [out, in].
    """
    form = weights.form([name for name, _ in parts])
    if form is None:
        return ops.Linear.stack(
            [change(weights.lend(name, *shape)) for name, shape in parts], None if bias is None else [bias]
        )
    stored = [weights.lend_for(form, name, shape, width) for name, shape in parts]
    if weights.device.type == "cuda":
        return _on_cuda(stored, form, change, bias, weights)
    shape = (sum(tensor.numel() for tensor in stored) // width, width)
    if not compiled.takes_dtype(weights.dtype) or 0 in shape:
        pieces = [rounded_weight(change(tensor), form.bits, form.group_size) for tensor in stored]
        return ops.Linear.quantized(pieces, bias, dtype=weights.dtype)
    label = f"{form.name} {[*shape]} {'+'.join(name for name, _ in parts)}"
    packed = None if weights.weight_cache is None else _found(weights.weight_cache, label, shape, form, bias)
    if packed is None:
        packed = PackedInts.of_rows(_rounded([change(tensor) for tensor in stored], form), shape, form, bias)
    if weights.weight_cache is not None:
        for part, tensor in packed.parts.items():
            weights.weight_cache.hold(f"{label}.{part}", tensor)
    return ops.Linear.packed(packed, weights.dtype)


def _on_cuda(
    stored: list[Tensor], form: Form, change: Callable[[Tensor], Tensor], bias: Tensor | None, weights: Weights
) -> ops.Linear:
    from inferd.native.triton import eight_bit

    parts = [eight_bit.rounded_to(form, change(tensor.to(weights.device))) for tensor in stored]
    return eight_bit.EightBitLinear.of(eight_bit.stacked(parts), bias, weights.dtype)


def _rounded(matrices: list[Tensor], form: Form) -> Iterator[QuantizedWeight]:
    """Quantises a few rows at a time, as they are packed.

    The integers need hardly any extra memory and stay in the processor's caches.
    """
    if any(matrix.shape[0] % PANEL_ROWS for matrix in matrices[:-1]):
        yield stacked([rounded_weight(matrix, form.bits, form.group_size) for matrix in matrices])
        return
    for matrix in matrices:
        rows = -(-_AT_ONCE // matrix.shape[1] // PANEL_ROWS) * PANEL_ROWS
        for first in range(0, matrix.shape[0], rows):
            yield rounded_weight(matrix[first : first + rows], form.bits, form.group_size)


def _found(
    weight_cache: WeightCache, label: str, shape: tuple[int, int], form: Form, bias: Tensor | None
) -> PackedInts | None:
    """A matrix that an earlier load packed; None where a part of it is missing or has another size."""
    parts: dict[str, Tensor] = {}
    for part, (dtype, count) in PackedInts.sizes(shape, form).items():
        found = weight_cache.find(f"{label}.{part}")
        if found is None or (found.dtype, found.numel()) != (dtype, count):
            return None
        parts[part] = allocate_packed(found.nbytes).view(dtype).copy_(found)
    return PackedInts(parts, shape, form, bias)


def merge(weights: Weights, parts: list[tuple[str, int]], width: int, *, bias: bool) -> ops.Linear:
    """One product of several projections (name, rows) with the same inputs.

    The integers of a quantised checkpoint are used where all parts have one form; otherwise they become numbers.
    """
    biases = [weights.read(f"{name}.bias", rows) for name, rows in parts] if bias else None
    integers = weights.integers(parts, width)
    if integers is None:
        together = torch.cat(biases) if biases else None
        plain = product(weights, [(f"{name}.weight", (rows, width)) for name, rows in parts], width, together)
        return plain if weights.around is None else weights.around(parts, biases, plain)
    together = None if biases is None else torch.cat(biases)
    return ops.Linear.quantized(integers, together, dtype=weights.dtype)
