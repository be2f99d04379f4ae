"""Which part of each stored tensor a rank holds: the one place that says how the layers of a decoder are split.

Outputs of the first products of attention and of feed-forward are divided, and inputs of the second ones. ``Peers`` is
how the ranks put their results together again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inferd.checkpoints.adapter import GATE_UP, QKV, Pair, places
from inferd.checkpoints.decoder_config import DecoderConfig
from inferd.checkpoints.stored.layout import Layout
from inferd.checkpoints.weights import Weights
from inferd.engine.model.share import Share
from inferd.errors import ModelLoadError


class Peers(Protocol):
    """The ranks that compute a step together, as one of them sees them."""

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of the partial sums of all ranks of this stage, added in the order of the ranks."""
        ...

    def gather(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks of this stage, in their order. All have one shape."""
        ...

    def collect(self, part: Tensor) -> list[Tensor]:
        """In the first rank of this stage, the parts of all in their order; elsewhere its own. All have one shape."""
        ...

    def receive(self, into: Tensor, rank: int) -> Tensor:
        """``into``, filled by what ``rank`` sends."""
        ...

    def send(self, tensor: Tensor, rank: int) -> None:
        """To another rank, which receives it."""


def cuts(share: Share, whole: DecoderConfig) -> Callable[[str, Tensor], Tensor] | None:
    """What gives this rank's part of a stored tensor, by its name; None: tensors stay whole.

    The part is a view of the stored tensor where its numbers lie in one place, so the rest is not read.
    """
    if share.tensor == 1:
        return None
    dim = whole.head_dim
    copies = max(1, share.tensor // whole.num_kv_heads)  # ranks that have the same keys and values
    parts = share.tensor // copies

    def piece(tensor: Tensor, axis: int, place: int, of: int) -> Tensor:
        size = tensor.shape[axis] // of
        return tensor.narrow(axis, place * size, size)

    def own(tensor: Tensor, axis: int = 0) -> Tensor:
        return piece(tensor, axis, share.place, share.tensor)

    def of_heads(tensor: Tensor) -> Tensor:
        return piece(tensor, 0, share.place // copies, parts)

    def cut(name: str, tensor: Tensor) -> Tensor:
        product, _, kind = name.rpartition(".")
        product = product.rpartition(".")[2]
        match product:
            case "q_proj" | "gate_proj" | "up_proj" | "w1" | "w3":
                return own(tensor)
            case "k_proj" | "v_proj":
                return of_heads(tensor)
            case "o_proj" | "down_proj" | "w2":  # _BY_INPUTS
                return own(tensor, 1) if kind == "weight" else tensor
            case "qkv_proj":
                sizes = [whole.num_heads * dim, whole.num_kv_heads * dim, whole.num_kv_heads * dim]
                q, k, v = torch.split(tensor, sizes)
                return torch.cat([own(q), of_heads(k), of_heads(v)])
            case "gate_up_proj":
                return torch.cat([own(half) for half in tensor.chunk(2)])
            case "embed_tokens" | "lm_head":
                mine = share.tokens(whole.vocab_size)
                return tensor[mine.start : mine.stop]
        return tensor

    return cut


_BY_INPUTS = ("o_proj", "down_proj", "w2")


def check_groups(share: Share, weights: Weights) -> None:
    """Raises ModelLoadError where a group of inputs, which shares a scale, would lie in two ranks."""
    for layout in weights.quantised:
        if share.tensor == 1 or not layout.name.endswith(_BY_INPUTS) or not layout.is_integer:
            continue
        problem = ""
        if layout.has_order and not _is_ordered(layout, weights):
            problem = "has its inputs in act-order"
        elif layout.num_groups > 1 and layout.num_groups % share.tensor:
            problem = f"has {layout.num_groups} groups of inputs"
        if problem:
            raise ModelLoadError(
                f"parallel.tensor is {share.tensor}, but the quantised weight {layout.name!r} {problem}, which cannot "
                "be divided by it. Take pipeline instead, or the checkpoint's numbers with quantization: int8 or int4.",
                param="parallel",
            )


def _is_ordered(layout: Layout, weights: Weights) -> bool:
    """Whether each group is a run of inputs."""
    part = next(part for part in layout.parts if part.endswith("g_idx"))
    groups = weights.stored(layout.tensor(part))
    return bool((groups[1:] >= groups[:-1]).all())


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
        if cut is not None and product in (QKV, GATE_UP):
            b = cut(f"{pair.module}.weight", b)
        elif cut is not None:
            a = cut(f"{pair.module}.weight", a)
        yield AdapterPiece(layer, product, places(part, layer)[pair.module].first, pair.scale, a, b)
