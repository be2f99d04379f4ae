"""Norms and gates of rows in Triton; their torch forms in ``native.ops`` are the oracles."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.native.triton.kernels import rows as kernels

_KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_GATE_COLUMNS = 1024  # of a row in one program


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n], weight [n] -> like x."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return _norm(flat, None, weight, eps)[0].view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [T, n] -> the norm of their sum, and the sum."""
    return _norm(x, residual.contiguous(), weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    wide = 1 << (columns - 1).bit_length()
    kernels.norm[(rows,)](
        x,
        residual,
        weight,
        y,
        total,
        x.stride(0),
        eps,
        COLUMNS=columns,
        WIDE=wide,
        ADDS=residual is not None,
        num_warps=min(max(wide // 256, 1), 16),
    )
    return y, total


def gate_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """[T, 2I] -> [T, I]; see ``ops.gate_and_mul``."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((rows, columns), dtype=gate_up.dtype, device=gate_up.device)
    wide = min(1 << (columns - 1).bit_length(), _GATE_COLUMNS)
    kernels.gate[(rows, -(-columns // wide))](
        gate_up, y, gate_up.stride(0), COLUMNS=columns, WIDE=wide, KIND=_KINDS[activation]
    )
    return y
