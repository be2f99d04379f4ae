"""The parts of stored tensors and of adapters that a rank holds, as ``Share`` says.

``Peers`` is how the ranks put their results together again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inferd.checkpoints.adapter import GATE_UP, QKV, Pair, places
from inferd.checkpoints.decoder_config import DecoderConfig
from inferd.engine.model.share import Share
from inferd.native.compiled import kernels


class Transfer(Protocol):
    """A tensor on its way from or to another rank."""

    def wait(self) -> None:
        """Until it has arrived, or has left."""


class Peers(Protocol):
    """The ranks that compute a step together, as one of them sees them."""

    @property
    def cuts_steps(self) -> bool:
        """Whether a rank may have several tensors on their way at a time, so that a step may pass the stages in
        micro-batches."""
        ...

    @property
    def meeting(self) -> kernels.Meeting | None:
        """Where the kernels may do what ``sum`` and ``concat`` do; None: they ask these."""
        ...

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of the float32 partial sums of all ranks of this stage, added in the order of the ranks."""
        ...

    def gather(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks of this stage, in their order. All have one shape."""
        ...

    def concat(self, part: Tensor) -> Tensor:
        """[T, n] -> [T, ranks x n]: the parts of all ranks of this stage side by side, in their order."""
        ...

    def collect(self, part: Tensor) -> list[Tensor]:
        """In the first rank of this stage, the parts of all in their order; elsewhere its own. All have one shape."""
        ...

    def receive(self, into: Tensor, rank: int) -> Transfer:
        """Begin to fill ``into``, which is contiguous, with the next tensor that ``rank`` sends."""
        ...

    def send(self, tensor: Tensor, rank: int) -> Transfer:
        """Begin to send to another rank, which receives in the order of the sends. The tensor must not change until
        then. Waits for no rank."""
        ...


def cuts(share: Share, whole: DecoderConfig) -> Callable[[str, Tensor], Tensor] | None:
    """What gives this rank's part of a stored tensor, by its name; None: tensors stay whole.

    The part is a view of the stored tensor where its numbers lie in one place, so the rest is not read.
    """
    if share.tensor == 1:
        return None

    def cut(name: str, tensor: Tensor) -> Tensor:
        found = share.runs(name, tuple(tensor.shape), whole)
        if found is None:
            return tensor
        axis, runs = found
        parts = [tensor.narrow(axis, run.start, len(run)) for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, axis)

    return cut


@dataclass(frozen=True, slots=True)
class AdapterPiece:
    """A rank's part of what an adapter adds to one product of a layer."""

    layer: int  # of the rank's
    product: int
    first: int  # of the outputs of the rank's product
    scale: float
    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank]


def adapter_pieces(
    share: Share, whole: DecoderConfig, matrices: Iterable[tuple[Pair, Tensor, Tensor]]
) -> Iterator[AdapterPiece]:
    """This rank's part of an adapter, divided as the product that it changes: B by outputs, or A by inputs.

    ``matrices``: A [rank, inputs] and B [outputs, rank] of each module of the adapter.
    """
    cut, part = cuts(share, whole), share.config(whole)
    mine = share.layers(whole.num_layers)
    for pair, a, b in matrices:
        if pair.layer not in mine:
            continue
        layer, product = pair.layer - mine.start, pair.place.product
        if cut is not None and (share.by_outputs or product in (QKV, GATE_UP)):
            b = cut(f"{pair.module}.weight", b)
        elif cut is not None:
            a = cut(f"{pair.module}.weight", a)
        yield AdapterPiece(layer, product, places(part, layer)[pair.module].first, pair.scale, a, b)
