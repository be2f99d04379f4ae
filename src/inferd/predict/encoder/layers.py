"""The parts that encoders are made of, over flat rows [T, H].

What is carried from layer to layer is float32 on the CPU, whatever the weights' format: products alone are computed
in bfloat16 where that was asked for, with float32 sums (``engine.ops.Linear``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from inferd.engine import ops
from inferd.engine.weights import Weights

Norm = Callable[[Tensor], Tensor]

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


def activation(name: str) -> Callable[[Tensor], Tensor]:
    return _ACTIVATIONS[name]


class Product:
    """``x @ weight.T + bias`` of float32 rows, into float32 rows."""

    __slots__ = ("_linear", "nbytes")

    def __init__(
        self, weights: Weights, parts: list[tuple[str, int]], width: int, dtype: torch.dtype, *, bias: bool = True
    ) -> None:
        """Several projections (name, rows) of the same rows are computed as one, in the format ``dtype``."""
        biases = [weights.take(f"{name}.bias", rows).to(dtype) for name, rows in parts] if bias else None
        matrices = [weights.lend(f"{name}.weight", rows, width).to(dtype) for name, rows in parts]
        self._linear = ops.Linear.stack(matrices, biases)
        self.nbytes = self._linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x.to(self._linear.dtype), torch.float32)


def norm(weights: Weights, name: str, size: int, eps: float, *, bias: bool = True) -> Norm:
    """Layer norm (Ba et al. 2016). Old checkpoints call its weights gamma and beta."""
    named = ("gamma", "beta") if f"{name}.gamma" in weights else ("weight", "bias")
    scale = weights.take(f"{name}.{named[0]}", size).float()
    shift = weights.take(f"{name}.{named[1]}", size).float() if bias else None
    return lambda x: F.layer_norm(x, (size,), scale, shift, eps)
