"""The arithmetic that model definitions are written in.

One function per idea; each has a plain torch form, which is the oracle, and may have a native one, which is
used wherever the kernels take the tensors (``native``). Shapes: T rows (tokens of all sequences of a step), H
hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inferd.engine import native


class Linear:
    """``x @ weight.T + bias``; weight [out, in]. Takes ownership of the weight and may repack it.

    On the CPU the weight is packed for our kernel: on one thread of an AVX-512 BF16 core it reads weights for one
    row 1.9 times as fast as oneDNN with pre-packed weights and is level with it at 512 rows
    (bench/micro_linear.py), and a row's result does not depend on how many rows there are.
    """

    __slots__ = ("_packed", "_plain", "bias", "dtype", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._setup([weight], bias)

    @classmethod
    def stack(cls, weights: list[Tensor], biases: list[Tensor] | None = None) -> Linear:
        """One product with the weights [out_i, in] above each other, without an unpacked copy of the whole."""
        linear = cls.__new__(cls)
        linear._setup(weights, torch.cat(biases) if biases else None)
        return linear

    def _setup(self, weights: list[Tensor], bias: Tensor | None) -> None:
        self.in_features = weights[0].shape[1]
        self.out_features = sum(w.shape[0] for w in weights)
        self.dtype = weights[0].dtype
        self._packed: native.PackedWeight | None = None
        self._plain: Tensor | None = None
        if all(native.PackedWeight.fits(w) for w in weights) and native.level() != "generic":
            self._packed = native.PackedWeight(weights)
            self.bias = None if bias is None else bias.float()
        else:
            # A copy even of a single one: it may be a mapped file, which can change under us.
            self._plain = torch.cat(weights)
            self.bias = bias

    @property
    def weight(self) -> Tensor:
        """[out, in], unpacked if need be: for inspection, not for the hot path."""
        if self._plain is not None:
            return self._plain
        return self.rows(torch.arange(self.out_features))

    @property
    def nbytes(self) -> int:
        """Memory the weight and the bias take, in bytes."""
        held = self._plain if self._packed is None else self._packed.data
        assert held is not None
        return held.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def rows(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., in]: rows of the weight. With it a tied embedding table is kept once."""
        if self._packed is not None:
            return self._packed.rows(ids)
        assert self._plain is not None
        return F.embedding(ids, self._plain)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, activation: str = "") -> Tensor:
        """x [..., in] -> [..., out], in x's format or float32 (``out_dtype``), which is exact and free for logits.

        ``activation``: "gelu" or "gelu_tanh" of what comes out, on its way."""
        if self._packed is None:
            assert self._plain is not None
            y = F.linear(x, self._plain, self.bias)
            if activation:
                y = F.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
            return y if out_dtype is None else y.to(out_dtype)
        flat = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        y = self._packed.product(flat.to(self.dtype), self.bias, out_dtype or self.dtype, activation)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in float32 (Zhang & Sennrich 2019)."""
    if native.takes_rms_norm(x, weight):
        return native.rms_norm(x, weight, eps)
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``r = x + residual``; returns (rms_norm(r), r)."""
    if x.dim() == 2 and native.takes_rms_norm(x, weight) and residual.dtype == x.dtype and residual.is_contiguous():
        return native.add_rms_norm(x, residual, weight, eps)
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Layer norm (Ba et al. 2016) of ``x + residual`` [T, n] float32, and the same in the format ``dtype``."""
    if native.takes_layer_norm(x, weight) and dtype in (torch.float32, torch.bfloat16):
        return native.layer_norm(x, residual, weight, bias, eps, narrow=dtype == torch.bfloat16)
    y = F.layer_norm(x if residual is None else x + residual, weight.shape, weight, bias, eps)
    return y, y.to(dtype)


def gate_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """[T, 2I] -> [T, I]: activation(first half) * second half. ``activation``: "silu", "gelu" or "gelu_tanh"."""
    if gate_up.dim() == 2 and native.takes(gate_up) and gate_up.stride(1) == 1:
        return native.gate_and_mul(gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding, half-split layout (Su et al. 2021, as in Llama checkpoints).

    q [T, heads, D], k [T, kv_heads, D], positions [T]; cos, sin [max_positions, R/2] with R <= D the
    rotated part. Returns rotated copies or the same tensors changed in place.
    """
    if native.takes_rotary(q, positions, cos, sin) and native.takes_rotary(k, positions, cos, sin):
        native.rotary(q, positions, cos, sin)
        native.rotary(k, positions, cos, sin)
        return q, k
    half = cos.shape[-1]
    c = cos[positions].unsqueeze(1)
    s = sin[positions].unsqueeze(1)

    def turn(x: Tensor) -> Tensor:
        x1, x2, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
        return torch.cat(((x1 * c - x2 * s).to(x.dtype), (x2 * c + x1 * s).to(x.dtype), rest), dim=-1)

    return turn(q), turn(k)
