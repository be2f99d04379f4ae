"""The layers of encoders, over flat rows [T, H].

The values between layers are float32 on the CPU, for any format of the weights. Only products are computed in bfloat16,
if the dtype is bfloat16, with float32 sums (``native.ops.Linear``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from inferd.checkpoints.weights import Weights
from inferd.native import ops
from inferd.native.quantized import by_output

_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


# Those that a product applies to what it writes.
_FUSED: Final = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    return _ACTIVATIONS[name]


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

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] in any format -> [T, out] float32."""
        return self._linear(x.to(self._linear.dtype), torch.float32)

    def activated(self, x: Tensor, name: str) -> Tensor:
        """[T, in] -> [T, out] through an activation, in the format that is carried to another product."""
        fused = _FUSED.get(name)
        dtype = self._linear.dtype
        if fused is not None:
            return self._linear(x.to(dtype), None, fused)
        return activation(name)(self._linear(x.to(dtype), torch.float32)).to(dtype)


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
