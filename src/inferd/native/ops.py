"""The arithmetic that model definitions are written in.

One function per operation. Each has a plain torch form, which is the oracle of the tests, and may have a kernel, which
is used wherever it accepts the tensors. Shapes: T rows (tokens of all sequences of a step), H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from inferd.native import compiled, elementwise
from inferd.native.packed import Packed, PackedInts, PackedWeight
from inferd.native.quantized import QuantizedWeight, product, stacked
from inferd.native.triton import switch

if TYPE_CHECKING:
    from inferd import _kernels as kernels


ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
"""Those that products and gates have kernels of. In torch's vector code the last bit of one value may depend on its
place in the tensor, in the kernels it does not."""


class Linear:
    """``x @ weight.T + bias``; weight [out, in]. Takes ownership of the weight and may repack it.

    On the CPU the weight is packed for the compiled kernel. On one thread of an AVX-512 BF16 core it reads weights for
    one row 1.9 times as fast as oneDNN with pre-packed weights. It is faster than torch's product by 50 % at 32 rows
    and 5 % at 512 (bench/micro_linear.py). A row's result does not depend on the number of rows.
    """

    __slots__ = ("_bias", "_ints", "_packed", "_plain", "dtype", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._setup([weight], bias)

    @classmethod
    def stack(cls, weights: list[Tensor], biases: list[Tensor] | None = None) -> Linear:
        """One product with several weights [out_i, in], without an unpacked copy of the whole."""
        linear = cls.__new__(cls)
        linear._setup(weights, torch.cat(biases) if biases else None)
        return linear

    @classmethod
    def quantized(
        cls,
        weight: QuantizedWeight | Sequence[QuantizedWeight],
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Linear:
        """A product with one integer matrix, or with several of one ``format`` stacked.

        ``dtype``: the number format of the activations before and after it, and of ``rows``.
        """
        linear = cls.__new__(cls)
        ints = weight if isinstance(weight, QuantizedWeight) else stacked(weight)
        linear.out_features, linear.in_features = ints.values.shape
        linear.dtype, linear._bias = dtype, bias
        linear._plain, linear._packed, linear._ints = None, None, ints.stored()
        if compiled.takes_dtype(dtype) and PackedInts.fits(ints):
            linear._packed, linear._bias, linear._ints = PackedInts.of(ints, bias), None, None
        return linear

    @classmethod
    def packed(cls, packed: PackedInts, dtype: torch.dtype) -> Linear:
        """Like ``quantized``, for integers that are already packed."""
        linear = cls.__new__(cls)
        linear.out_features, linear.in_features, linear.dtype = packed.out_features, packed.in_features, dtype
        linear._packed, linear._plain, linear._ints, linear._bias = packed, None, None, None
        return linear

    def _setup(self, weights: list[Tensor], bias: Tensor | None) -> None:
        self.in_features = weights[0].shape[1]
        self.out_features = sum(w.shape[0] for w in weights)
        self.dtype = weights[0].dtype
        self._packed: Packed | None = None
        self._plain: Tensor | None = None
        self._ints: QuantizedWeight | None = None
        self._bias: Tensor | None = None
        if all(PackedWeight.fits(w) for w in weights) and compiled.level() != "generic":
            self._packed = PackedWeight(weights, bias)
        else:
            # A copy even of a single one: it may be a mapped file, which can change under us.
            self._plain = torch.cat(weights)
            self._bias = bias

    @property
    def described(self) -> kernels.Weights | None:
        """The kernels' description of this product, valid as long as it lives; None where torch computes it."""
        return None if self._packed is None else self._packed.described

    @property
    def weight(self) -> Tensor:
        """[out, in], unpacked if necessary: for inspection, not for the hot path."""
        if self._plain is not None:
            return self._plain
        return self.rows(torch.arange(self.out_features))

    @property
    def nbytes(self) -> int:
        """Memory the weight and the bias take, in bytes."""
        if self._packed is not None:
            return self._packed.nbytes
        held = self._ints.nbytes if self._plain is None and self._ints is not None else 0
        held += 0 if self._plain is None else self._plain.nbytes
        return held + (0 if self._bias is None else self._bias.nbytes)

    def rows(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., in]: rows of the weight, so that a tied embedding table exists once."""
        if self._ints is not None:
            return self._ints.rows(ids.flatten()).to(self.dtype).view(*ids.shape, self.in_features)
        if self._packed is not None:
            return self._packed.rows(ids, self.dtype)
        assert self._plain is not None
        return F.embedding(ids, self._plain)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, activation: str = "") -> Tensor:
        """x [..., in] -> [..., out], in the product's format or float32 (``out_dtype``).

        float32 is exact and free for logits. ``activation``: of ``ACTIVATIONS``, applied to the result.
        """
        flat = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        if self._packed is not None:
            y = self._packed.product(flat.to(self.dtype), out_dtype or self.dtype, activation)
        else:
            if self._ints is not None:
                y = product(flat, self._ints, self._bias)
            else:
                assert self._plain is not None
                y = F.linear(flat, self._plain, self._bias)
            if activation:
                y = ACTIVATIONS[activation](y)
            y = y.to(out_dtype or self.dtype)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in float32 (Zhang & Sennrich 2019)."""
    if elementwise.takes_rms_norm(x, weight):
        return elementwise.rms_norm(x, weight, eps)[0]
    if switch.takes(x):
        from inferd.native.triton import rows

        return rows.rms_norm(x, weight, eps)
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``r = x + residual``; returns (rms_norm(r), r)."""
    if (
        x.dim() == 2
        and elementwise.takes_rms_norm(x, weight)
        and residual.dtype == x.dtype
        and residual.is_contiguous()
    ):
        return elementwise.rms_norm(x, weight, eps, residual)
    if x.dim() == 2 and switch.takes(x):
        from inferd.native.triton import rows

        return rows.add_rms_norm(x, residual, weight, eps)
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Layer norm (Ba et al. 2016) of ``x + residual`` [T, n] float32, and the same in the format ``dtype``."""
    if elementwise.takes_layer_norm(x, weight) and dtype in (torch.float32, torch.bfloat16):
        return elementwise.layer_norm(x, residual, weight, bias, eps, narrow=dtype == torch.bfloat16)
    y = F.layer_norm(x if residual is None else x + residual, weight.shape, weight, bias, eps)
    return y, y.to(dtype)


def gate_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """[T, 2I] -> [T, I]: activation(first half) * second half. ``activation``: of ``ACTIVATIONS``."""
    if gate_up.dim() == 2 and compiled.takes(gate_up) and gate_up.stride(1) == 1:
        return elementwise.gate_and_mul(gate_up, activation)
    if gate_up.dim() == 2 and switch.takes(gate_up):
        from inferd.native.triton import rows

        return rows.gate_and_mul(gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding, half-split layout (Su et al. 2021, as in Llama checkpoints).

    q [T, heads, D], k [T, kv_heads, D], positions [T]; cos, sin [max_positions, R/2] with R <= D the rotated part.
    Returns rotated copies, or the same tensors changed in place.
    """
    if elementwise.takes_rotary(q, positions, cos, sin) and elementwise.takes_rotary(k, positions, cos, sin):
        elementwise.rotary(q, positions, cos, sin)
        elementwise.rotary(k, positions, cos, sin)
        return q, k
    half = cos.shape[-1]
    c = cos[positions].unsqueeze(1)
    s = sin[positions].unsqueeze(1)

    def turn(x: Tensor) -> Tensor:
        x1, x2, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
        return torch.cat(((x1 * c - x2 * s).to(x.dtype), (x2 * c + x1 * s).to(x.dtype), rest), dim=-1)

    return turn(q), turn(k)
