"""Wraps a product and accumulates the second moments of its inputs, for GPTQ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inferd.native import ops


class Observed(ops.Linear):
    """A wrapper around a product, and around its replacement, while calibration runs."""

    __slots__ = ("_inner", "biases", "is_seeing", "moments", "num_rows", "parts")

    _inner: ops.Linear
    biases: Sequence[Tensor] | None
    is_seeing: bool
    moments: Tensor  # [in, in] float32: X^T X of all inputs seen
    num_rows: int
    parts: tuple[tuple[str, int], ...]

    @classmethod
    def around(cls, parts: Sequence[tuple[str, int]], biases: Sequence[Tensor] | None, inner: ops.Linear) -> Observed:
        """``parts``: names and rows of the projections that the product is made of."""
        made = cls.__new__(cls)
        made._inner, made.parts, made.biases = inner, tuple(parts), biases
        made.in_features, made.out_features, made.dtype = inner.in_features, inner.out_features, inner.dtype
        made.moments = torch.zeros(inner.in_features, inner.in_features)
        made.num_rows = 0
        made.is_seeing = True
        return made

    @property
    def described(self) -> None:
        """None, because the kernels' step would not call the wrapper."""
        return None

    def replace(self, weights: Sequence[Tensor]) -> None:
        """Compute with these weights [rows, in] of the parts from now on, and stop observing."""
        self._inner = ops.Linear.stack(
            [weight.to(self.dtype) for weight in weights], None if self.biases is None else list(self.biases)
        )
        self.moments, self.is_seeing = torch.empty(0), False

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, activation: str = "") -> Tensor:
        if self.is_seeing:
            rows = x.reshape(-1, self.in_features).float()
            self.moments.addmm_(rows.t(), rows)
            self.num_rows += rows.shape[0]
        return self._inner(x, out_dtype, activation)
