"""Low-rank products of adapters (LoRA, Hu et al. 2021): ``y += scale * B A x`` for the rows of a step, each with its
own adapter or none.

``LoadedAdapter`` holds the matrices of one adapter by layer and product, ``AdapterRows`` says which row of a step uses
which. The plain torch form is the oracle of the kernel (kernels/low_rank.h) and computes on other devices. In the
kernel a row's result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.native import compiled
from inferd.native.compiled import CODES, kernels
from inferd.native.forms import PANEL_ROWS, padded


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """One module of an adapter: ``y[:, first : first + outputs] += scale * (x @ a.T) @ b.T``."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank], or in panels [ceil(outputs / 64), rank, 64]
    first: int
    outputs: int
    scale: float

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    @property
    def plain_b(self) -> Tensor:
        """[outputs, rank]"""
        if self.b.dim() == 2:
            return self.b
        return self.b.transpose(1, 2).reshape(-1, self.a.shape[0])[: self.outputs]


def low_rank(a: Tensor, b: Tensor, first: int, scale: float) -> LowRank:
    """a [rank, inputs], b [outputs, rank], copied into the layout that the device computes with."""
    outputs, rank = b.shape
    a = a.contiguous().clone()
    if compiled.takes(a):
        whole = torch.zeros((padded(outputs), rank), dtype=b.dtype)
        whole[:outputs] = b
        b = whole.view(-1, PANEL_ROWS, rank).transpose(1, 2)
    return LowRank(a, b.contiguous().clone(), first, outputs, scale)


class LoadedAdapter:
    """The matrices of one adapter, by layer and product. Steps hold it as long as they use it."""

    __slots__ = ("__weakref__", "_layers", "_parts", "_plans", "identity", "is_native", "name", "nbytes")

    def __init__(
        self, name: str, identity: bytes, num_layers: int, parts: dict[tuple[int, int], list[LowRank]]
    ) -> None:
        """``identity``: a digest of its files and of the base. ``parts``: by (layer, product)."""
        self.name, self.identity, self._parts = name, identity, parts
        self._layers = range(num_layers)
        self.nbytes = sum(part.nbytes for each in parts.values() for part in each)
        self.is_native = all(part.b.dim() == 3 for each in parts.values() for part in each) and compiled.BUILT
        self._plans: dict[range, kernels.Adapter] = {}  # as the kernels need them, by layers
        if self.is_native:
            self.plan()  # not in the first step that uses it

    def plan(self, layers: range | None = None) -> kernels.Adapter:
        """The matrices of some layers for the kernels, which count layers from the first of these; None: of all. Only
        where ``is_native``."""
        layers = self._layers if layers is None else layers
        made = self._plans.get(layers)
        if made is None:
            made = self._plans[layers] = kernels.Adapter(len(layers))
            for (layer, product), each in self._parts.items():
                for part in each if layer in layers else ():
                    made.add(
                        layer=layer - layers.start,
                        product=product,
                        a=part.a.data_ptr(),
                        b=part.b.data_ptr(),
                        rank=part.a.shape[0],
                        size=part.a.shape[1],
                        first=part.first,
                        count=part.outputs,
                        scale=part.scale,
                    )
        return made

    def parts(self, layer: int, product: int) -> Sequence[LowRank]:
        return self._parts.get((layer, product), ())


class AdapterRows:
    """Which rows of a step use which adapter."""

    __slots__ = ("_rows", "adapters", "of")

    def __init__(self, adapters: list[LoadedAdapter], of: Tensor) -> None:
        """``of`` [T] int32 on the CPU: each row's place in ``adapters``; -1: the base alone."""
        self.adapters, self.of = adapters, of
        self._rows: list[Tensor] | None = None

    def plans(self, layers: range | None = None) -> list[kernels.Adapter]:
        """What the kernels need for some layers; None: for all. Only where ``is_native``."""
        return [adapter.plan(layers) for adapter in self.adapters]

    @property
    def is_native(self) -> bool:
        """Whether the kernels can compute all of them."""
        return compiled.is_on() and all(adapter.is_native for adapter in self.adapters)

    def add(self, layer: int, product: int, x: Tensor, y: Tensor) -> Tensor:
        """``y`` [T, outputs], changed in place: plus what each row's adapter makes of ``x`` [T, inputs]."""
        if self.is_native and compiled.takes(x) and x.stride(1) == 1 and y.stride(1) == 1:
            kernels.low_rank(
                CODES[x.dtype],
                x.data_ptr(),
                x.stride(0),
                CODES[y.dtype],
                y.data_ptr(),
                y.stride(0),
                x.shape[0],
                self.plans(),
                self.of.data_ptr(),
                layer,
                product,
                torch.get_num_threads(),
            )
            return y
        if self._rows is None:
            self._rows = [(self.of == i).nonzero().flatten().to(x.device) for i in range(len(self.adapters))]
        for adapter, rows in zip(self.adapters, self._rows, strict=True):
            for part in adapter.parts(layer, product):
                add_low_rank(part, rows, x, y)
        return y


def add_low_rank(part: LowRank, rows: Tensor, x: Tensor, y: Tensor) -> None:
    """The plain form for the rows of one adapter, in float32, rounded once where it is added."""
    h = (x[rows].float() @ part.a.float().T) * part.scale
    last = part.first + part.outputs
    y[rows, part.first : last] = (y[rows, part.first : last].float() + h @ part.plain_b.float().T).to(y.dtype)
