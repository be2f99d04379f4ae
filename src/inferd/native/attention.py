"""What attention over a KV cache takes and returns: the batch, the scoring, and the protocol of every implementation.

A step's rows are flat: sequence ``i`` owns rows ``query_start[i]:query_start[i+1]``, its keys and
values lie in the blocks ``block_table[i]``, and after this step ``seq_len[i]`` of them are valid.

    row        0 1 2 3 4 5 6          query_start = 0 4 5 7
    sequence   a a a a b c c          seq_len     = 4 9 18   (a: fresh prefill, b: decode, c: chunk)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from inferd.native.low_rank import AdapterRows


@dataclass(slots=True)
class FlatBatch:
    """One step's rows as tensors. S sequences, T rows."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_start: Tensor  # [S + 1] int32
    seq_len: Tensor  # [S] int32, keys valid after this step
    block_table: Tensor  # [S, max_blocks] int32, padded with 0
    slots: Tensor  # [T] int64: block * block_size + offset where the row's K and V are written
    num_sequences: int
    output_rows: Tensor | None = None  # [W] int64, ascending: rows whose hidden states are needed; None: all
    adapters: AdapterRows | None = None  # None: every row is the base's
    cuts: Sequence[int] = ()  # rows, ascending, before which a pipeline's stages divide the step into micro-batches


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer turns products of queries and keys into attention weights."""

    scale: float  # factor of each product
    window: int | None = None  # a row sees only the last ``window`` keys, itself included; None: all before it
    softcap: float | None = None  # scores become ``softcap * tanh(scores / softcap)`` before the mask


@dataclass(frozen=True, slots=True, eq=False)
class HeadTransform:
    """What is done to each query's and key's head before attention: RMS norm, then rotation."""

    norms: tuple[Tensor, Tensor] | None  # weights [D] for queries and for keys
    eps: float  # of the norms
    table: tuple[Tensor, Tensor] | None  # cosines and sines [positions, R/2] of the rotation


class Attention(Protocol):
    """Writes the rows' keys and values into the KV cache, then attends over it. Causal."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """q [T, heads, D], k and v [T, kv_heads, D] -> [T, heads, D]."""
        ...


@runtime_checkable
class ProjectedAttention(Attention, Protocol):
    """An implementation that also norms, rotates and writes a projection's output, in fewer kernel launches."""

    def projected(self, layer: int, qkv: Tensor, num_heads: int, heads: HeadTransform, scoring: Scoring) -> Tensor:
        """qkv [T, (heads + 2 kv_heads) * D] -> [T, heads, D]."""
        ...
