"""GPTQ (Frantar et al. 2022): rounding column by column, where later columns compensate the errors of earlier ones.

Let H = X^T X over the inputs X of a product, and U the upper Cholesky factor of H's inverse. Rounding column i by an
error e_i changes the output least if each later column is changed by -e_i * U[i, i+1:] / U[i, i]. Columns are handled
in blocks: errors are spread within a block at once, and over the rest of the matrix as one product per block.

Two choices decide the quality. *Damping*: a part of H's mean diagonal is added to it, because calibration sees little
of many directions. *Order*: columns with the largest inputs come first, when no error has been spread on them yet.
Groups stay runs of neighbouring inputs, with grids chosen from the original weights, so no product has to permute its
inputs.
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
    """``weight`` [out, in] as integers that change the product of calibration's inputs little.

    ``moments``: X^T X [in, in] float32 over the inputs, or a multiple of it. ``by_size``: the order described above;
    otherwise columns keep their order, and each group's grid is chosen when its first column is reached.
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
                # The grid follows the columns as corrected so far. Columns of later blocks will be corrected further.
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
    """The upper Cholesky factor of the inverse of ``moments``, damped until it exists."""
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
