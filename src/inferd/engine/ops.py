"""The arithmetic that model definitions are written in.

One function per idea; each has a plain torch form, which is the oracle, and may have a native one.
Shapes: T rows (tokens of all sequences of a step), H hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """``x @ weight.T + bias``; weight [out, in]. Takes ownership of the weight and may repack it."""

    __slots__ = ("bias", "in_features", "out_features", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Head:
    """The output projection: hidden [R, H] -> logits [R, V] float32.

    Its weight [V, H] may be the embedding table as well, so it is never repacked in place.
    """

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in float32 (Zhang & Sennrich 2019)."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``r = x + residual``; returns (rms_norm(r), r)."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2I] -> [T, I]: silu(first half) * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding, half-split layout (Su et al. 2021, as in Llama checkpoints).

    q [T, heads, D], k [T, kv_heads, D], positions [T]; cos, sin [max_positions, R/2] with R <= D the
    rotated part. Returns rotated copies or the same tensors changed in place.
    """
    half = cos.shape[-1]
    c = cos[positions].unsqueeze(1)
    s = sin[positions].unsqueeze(1)

    def turn(x: Tensor) -> Tensor:
        x1, x2, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
        return torch.cat(((x1 * c - x2 * s).to(x.dtype), (x2 * c + x1 * s).to(x.dtype), rest), dim=-1)

    return turn(q), turn(k)
