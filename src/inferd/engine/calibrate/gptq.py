"""GPTQ (Frantar et al. 2022): rounding that makes up for its own errors, column by column.

With H = X^T X over the inputs X that a product sees, rounding column i by e_i changes the output least if the columns after
it take up -e_i * U[i, i+1:] / U[i, i], where U is the upper Cholesky factor of H's inverse. Columns go in blocks: within a
block each error is spread at once, over the rest of the matrix when the block is done, as one product.

Two things decide how good it is. *Damping*: a part of H's mean diagonal is added to it, as calibration sees little of many
directions. *Order*: columns with the largest inputs first, when nothing has been spread on them yet. The groups stay those of
neighbouring inputs (their grids are chosen from the weights as they were), so no product needs to gather its inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.engine.calibrate.rounding import Form, grid, made
from inferd.native.quantized import QuantizedWeight

_BLOCK = 128
_MOST_DAMPING = 10.0


def gptq(
    weight: Tensor, moments: Tensor, form: Form, *, damping: float = 0.01, by_size: bool = True
) -> QuantizedWeight:
    """``weight`` [out, in] as integers that change the product with calibration's inputs little.

    ``moments``: X^T X [in, in] float32 over the inputs (any multiple of it). ``by_size``: the order above; else as the columns
    come, with each group's grid chosen when its turn comes.
    """
    work = weight.float().clone()
    out, inputs = work.shape
    size = form.group_size or inputs
    diagonal = moments.diagonal()
    order = diagonal.argsort(descending=True, stable=True) if by_size else torch.arange(inputs)
    work = work[:, order]
    group_of = order // size
    factor = _inverse_factor(moments[order][:, order].clone(), damping)
    importance = diagonal.clamp(min=0) + damping * diagonal.mean() + 1e-12
    scale, zero = torch.empty((out, inputs // size)), torch.zeros((out, inputs // size))
    if by_size:
        scale, zero = grid(weight.float().view(out, -1, size), form, importance.view(-1, size))
    values = torch.empty((out, inputs), dtype=torch.int8)
    for first in range(0, inputs, _BLOCK):
        last = min(first + _BLOCK, inputs)
        errors = torch.empty((out, last - first))
        for i in range(first, last):
            g = int(group_of[i])
            if not by_size and i % size == 0:
                # What the columns of this group have taken up by now counts; those of a later block take up more.
                ahead = work[:, i : i + size]
                scale[:, g], zero[:, g] = grid(ahead, form, importance[i : i + size])
            column = work[:, i]
            whole = (column / scale[:, g] + zero[:, g]).round().clamp(form.low, form.high)
            values[:, i] = whole.to(torch.int8)
            error = (column - (whole - zero[:, g]) * scale[:, g]) / factor[i, i]
            work[:, i + 1 : last].addr_(error, factor[i, i + 1 : last], alpha=-1)
            errors[:, i - first] = error
        work[:, last:].addmm_(errors, factor[first:last, last:], alpha=-1)
    return made(values[:, order.argsort()].contiguous(), scale, zero, form)


def _inverse_factor(moments: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of ``moments``, damped until there is one."""
    diagonal = moments.diagonal()
    mean = float(diagonal.mean())
    diagonal[diagonal == 0] = mean or 1.0  # an input that calibration never saw
    while True:
        damped = moments + torch.eye(len(moments)) * (damping * mean or 1.0)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
        if damping > _MOST_DAMPING:
            return torch.eye(len(moments))  # nothing to learn from: each column by itself
        damping = max(damping * 10, 1e-4)
