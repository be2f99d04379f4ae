"""The compiled kernels of norms, gates and rotation (kernels/elementwise.h); ``ops`` has their torch forms."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.native.compiled import ACTIVATIONS, CODES, kernels, takes


def takes_rms_norm(x: Tensor, weight: Tensor) -> bool:
    """[T, n] or [T, groups, n] with the groups of a row side by side."""
    return (
        takes(x)
        and weight.dtype in (x.dtype, torch.float32)
        and x.stride(-1) == 1
        and weight.is_contiguous()
        and (x.dim() == 2 or (x.dim() == 3 and x.stride(1) == x.shape[2]))
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual`` [T, n], and the sum; without a residual the norm of x, and x."""
    out, added = torch.empty(x.shape, dtype=x.dtype), x if residual is None else torch.empty(x.shape, dtype=x.dtype)
    groups = x.shape[1] if x.dim() == 3 else 1
    size = x.shape[-1]
    kernels.rms_norm(
        CODES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else added.data_ptr(),
        weight.data_ptr(),
        CODES[weight.dtype],
        out.data_ptr(),
        groups * size,
        x.shape[0],
        groups,
        size,
        eps,
        torch.get_num_threads(),
    )
    return out, added


def takes_layer_norm(x: Tensor, weight: Tensor) -> bool:
    """[T, n] float32, the rows side by side."""
    return takes(x) and x.dtype == weight.dtype == torch.float32 and x.is_contiguous()


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *, narrow: bool
) -> tuple[Tensor, Tensor]:
    """Layer norm of ``x + residual``: (float32, bfloat16 where ``narrow``, else the same tensor again)."""
    out = torch.empty_like(x)
    copy = torch.empty(x.shape, dtype=torch.bfloat16) if narrow else None
    kernels.layer_norm(
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        0 if copy is None else copy.data_ptr(),
        x.shape[0],
        x.shape[1],
        eps,
        torch.get_num_threads(),
    )
    return out, out if copy is None else copy


def gate_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    rows, width = gate_up.shape
    out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
    kernels.gate_and_mul(
        CODES[gate_up.dtype],
        ACTIVATIONS[activation],
        gate_up.data_ptr(),
        gate_up.stride(0),
        out.data_ptr(),
        rows,
        width // 2,
        torch.get_num_threads(),
    )
    return out


def takes_rotary(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return (
        takes(x)
        and x.dim() == 3
        and x.stride(2) == 1
        and x.stride(1) == x.shape[2]
        and cos.dtype == sin.dtype == torch.float32
        and cos.is_contiguous()
        and sin.is_contiguous()
        and positions.dtype == torch.int64
        and positions.is_contiguous()
    )


def rotary(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates [T, heads, D] where it lies."""
    kernels.rotary(
        CODES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        x.shape[1],
        x.shape[2],
        positions.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[-1],
        torch.get_num_threads(),
    )
