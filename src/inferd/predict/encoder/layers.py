"""The layers of encoders, over flat rows [T, H].

The values between layers are float32 on the CPU, for any format of the weights. Only products are computed in bfloat16,
if the dtype is bfloat16, with float32 sums (``native.ops.Linear``).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from inferd.checkpoints.weights import Weights
from inferd.native import ops
from inferd.native.quantized import by_output

_FUSED: Final = {
    "gelu": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
    **dict.fromkeys(("silu", "swish"), "silu"),
}
"""Activations that have kernels, which compute them where a product or a gate is written."""
_PLAIN: Final = {"relu": torch.relu, "tanh": torch.tanh}
"""Those that torch computes, alike for each value wherever it lies in a tensor."""


def gated(gate_up: Tensor, name: str) -> Tensor:
    """[T, 2n] float32 -> [T, n]: the first half through an activation, times the second half."""
    if name in _FUSED:
        return ops.gate_and_mul(gate_up, _FUSED[name])
    value, gate = gate_up.chunk(2, dim=-1)
    return _PLAIN[name](value) * gate


class Product:
    """``x @ weight.T + bias``. The operands are float32, bfloat16, float16, or int8 if the kernels support it and the
    rows fill whole lanes (otherwise float32)."""

    __slots__ = ("_linear",)

    def __init__(
        self, weights: Weights, parts: list[tuple[str, int]], width: int, dtype: torch.dtype, *, bias: bool = True
    ) -> None:
        """Several projections (name, rows) of the same rows are computed as one."""
        biases = [weights.read(f"{name}.bias", rows) for name, rows in parts] if bias else None
        matrices = [weights.lend(f"{name}.weight", rows, width) for name, rows in parts]
        is_int8 = dtype == torch.int8 and width % 4 == 0
        dtype = between(dtype)
        if is_int8:
            joined = None if biases is None else torch.cat(biases)
            self._linear = ops.Linear.quantized([by_output(each) for each in matrices], joined, dtype=dtype)
            return
        biases = None if biases is None else [each.to(dtype) for each in biases]
        self._linear = ops.Linear.stack([each.to(dtype) for each in matrices], biases)

    @property
    def keeps_rows(self) -> bool:
        """Whether a row has the same bits among any other rows: the kernels compute it."""
        return self._linear.described is not None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] in any format -> [T, out] float32."""
        return self._linear(x.to(self._linear.dtype), torch.float32)

    def activated(self, x: Tensor, name: str) -> Tensor:
        """[T, in] -> [T, out] through an activation, in the format that is carried to another product."""
        dtype = self._linear.dtype
        if name in _FUSED:
            return self._linear(x.to(dtype), None, _FUSED[name])
        return _PLAIN[name](self._linear(x.to(dtype), torch.float32)).to(dtype)


def between(dtype: torch.dtype) -> torch.dtype:
    """The format of the values between products: int8 values are made only for the product."""
    return torch.float32 if dtype == torch.int8 else dtype


class Norm:
    """Layer norm with weights of its own. Old checkpoints call them gamma and beta."""

    __slots__ = ("_bias", "_dtype", "_eps", "_weight")

    def __init__(
        self, weights: Weights, name: str, size: int, eps: float, dtype: torch.dtype, *, bias: bool = True
    ) -> None:
        named = ("gamma", "beta") if f"{name}.gamma" in weights else ("weight", "bias")
        self._weight = weights.read(f"{name}.{named[0]}", size).float()
        self._bias = weights.read(f"{name}.{named[1]}", size).float() if bias else None
        self._eps, self._dtype = eps, between(dtype)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of ``x + residual`` [T, n]: in float32, and in the products' format."""
        return ops.layer_norm(x, residual, self._weight, self._bias, self._eps, self._dtype)
