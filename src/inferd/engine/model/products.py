"""Products of a checkpoint's weights: several that read the same rows become one, as numbers or as integers."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.engine import ops
from inferd.engine.weights import Weights


class Reordered(ops.Linear):
    """A product whose columns are in another order than its inputs (act-order): the inputs are gathered first."""

    __slots__ = ("_order",)

    def by(self, order: Tensor) -> Reordered:
        """``order`` [in]: the input that each column belongs to."""
        self._order = order
        return self

    @property
    def described(self) -> None:
        """Nothing: the kernels' description knows no order."""
        return None

    def rows(self, ids: Tensor) -> Tensor:
        return super().rows(ids)[..., self._order.argsort()]

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, activation: str = "") -> Tensor:
        return super().__call__(x.index_select(-1, self._order), out_dtype, activation)


def merge(weights: Weights, parts: list[tuple[str, int]], width: int, *, bias: bool) -> ops.Linear:
    """One product of several projections (name, rows) of the same rows.

    Integers of a quantised checkpoint stay integers where all parts are and are of one form; else they are made numbers.
    """
    biases = [weights.take(f"{name}.bias", rows) for name, rows in parts] if bias else None
    integers = weights.integers(parts, width)
    if integers is None:
        plain = ops.Linear.stack([weights.lend(f"{name}.weight", rows, width) for name, rows in parts], biases)
        return plain if weights.around is None else weights.around(parts, biases, plain)
    held = [each.weight for each in integers]
    together = None if biases is None else torch.cat(biases)
    order = integers[0].order
    if order is None:
        return ops.Linear.quantized(held, together, dtype=weights.dtype)
    made = Reordered.quantized(held, together, dtype=weights.dtype)
    assert isinstance(made, Reordered)
    return made.by(order)
