"""Paged attention over a ragged batch: one function, several backends.

A step's rows are flat: sequence ``i`` owns rows ``query_start[i]:query_start[i+1]``, its keys and
values lie in the blocks ``block_table[i]``, and after this step ``seq_len[i]`` of them are valid.

    row        0 1 2 3 4 5 6          query_start = 0 4 5 7
    sequence   a a a a b c c          seq_len     = 4 9 18   (a: fresh prefill, b: decode, c: chunk)

The reference here is plain torch and the oracle of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from inferd.engine import native


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
    wanted: Tensor | None = None  # [W] int64, ascending: rows whose hidden states will be looked at; None: all


class KVCache:
    """The arena: per layer, keys and values [num_blocks, kv_heads, block_size, head_dim]."""

    __slots__ = ("block_size", "keys", "num_blocks", "values")

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Not cleared: what was never written is never read, and untouched pages cost no memory.
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer: copy-on-write of shared blocks."""
        if not pairs:
            return
        src = torch.tensor([p[0] for p in pairs], device=self.keys[0].device)
        dst = torch.tensor([p[1] for p in pairs], device=self.keys[0].device)
        for arena in (*self.keys, *self.values):
            arena[dst] = arena[src]


class Attention(Protocol):
    """Writes the rows' keys and values into the arena, then attends over it."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """q [T, heads, D], k and v [T, kv_heads, D] -> [T, heads, D].

        Causal. ``window``: a row sees only the last ``window`` keys, itself included. ``softcap``:
        scores become ``softcap * tanh(scores / softcap)`` before the mask.
        """
        ...


class ReferenceAttention:
    """Plain torch, one sequence at a time. Slow, obviously right."""

    __slots__ = ("batch", "cache")

    def __init__(self, cache: KVCache, batch: FlatBatch) -> None:
        self.cache = cache
        self.batch = batch

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        batch, cache = self.batch, self.cache
        size = cache.block_size
        keys, values = cache.keys[layer], cache.values[layer]
        block, offset = batch.slots // size, batch.slots % size
        keys[block, :, offset] = k.to(keys.dtype)
        values[block, :, offset] = v.to(values.dtype)
        groups = q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        starts, lengths = batch.query_start.tolist(), batch.seq_len.tolist()
        for i in range(batch.num_sequences):
            first, last, length = starts[i], starts[i + 1], lengths[i]
            table = batch.block_table[i, : (length + size - 1) // size].long()
            # [blocks, kv_heads, size, D] -> [kv_heads, length, D]
            ks = keys[table].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(groups, 0).float()
            vs = values[table].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(groups, 0).float()
            qs = q[first:last].transpose(0, 1).float()
            scores = qs @ ks.transpose(1, 2) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            at = batch.positions[first:last].unsqueeze(1)
            key_at = torch.arange(length, device=q.device).unsqueeze(0)
            hidden = key_at > at
            if window is not None:
                hidden |= key_at <= at - window
            scores = scores.masked_fill(hidden, float("-inf"))
            out[first:last] = (scores.softmax(-1) @ vs).transpose(0, 1).to(out.dtype)
        return out


class NativeAttention:
    """The compiled kernel (kernels/attention.h): reads the arena in place, parallel over sequences, heads and
    tiles of rows. A row's result does not depend on the other rows of the batch."""

    __slots__ = ("batch", "cache")

    def __init__(self, cache: KVCache, batch: FlatBatch) -> None:
        self.cache = cache
        self.batch = batch

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return native.attention(self.batch, keys, values, q, k, v, scale, window, softcap).to(q.dtype)


def native_available(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the compiled kernel is there and takes this number format and head size."""
    return native.takes_dtype(dtype) and head_dim % 2 == 0 and 2 <= head_dim <= 256


def create_attention(kind: Literal["auto", "reference", "native"], cache: KVCache, batch: FlatBatch) -> Attention:
    """The backend for one step. ``auto``: native where it is available, else the reference."""
    arena = cache.keys[0]
    if kind == "native" or (kind == "auto" and arena.is_cpu and native_available(arena.dtype, arena.shape[3])):
        return NativeAttention(cache, batch)
    return ReferenceAttention(cache, batch)
