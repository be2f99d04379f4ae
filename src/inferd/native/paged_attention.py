"""Paged attention over a ragged batch: the plain torch form, the compiled kernel, and which of them computes.

The plain form is the oracle of the others; see ``triton.attention`` for CUDA devices.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from inferd.native import compiled
from inferd.native.attention import Attention, FlatBatch, Scoring
from inferd.native.compiled import kernels
from inferd.native.kv_cache import KVCache, to_bytes


class OneLayer:
    """Attention over a KV cache of one layer, which each layer of a model overwrites in turn."""

    __slots__ = ("_attention",)

    def __init__(self, attention: Attention) -> None:
        self._attention = attention

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        return self._attention(0, q, k, v, scoring)


class ReferenceAttention:
    """Plain torch, one sequence at a time: slow and easy to verify."""

    __slots__ = ("batch", "cache")

    def __init__(self, cache: KVCache, batch: FlatBatch) -> None:
        self.cache = cache
        self.batch = batch

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        batch, cache = self.batch, self.cache
        cache.write(layer, batch.slots, k, v)
        if cache.in_bytes:  # products of bytes use queries in bytes too
            whole, scales = to_bytes(q, cache.key_groups)
            columns = cache.head_dim // cache.key_groups
            seen = (whole * scales.repeat_interleave(columns, -1)).float()
        else:
            seen = q.float()
        groups = q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        starts, lengths = batch.query_start.tolist(), batch.seq_len.tolist()
        for i in range(batch.num_sequences):
            first, last, length = starts[i], starts[i + 1], lengths[i]
            table = batch.block_table[i, : -(-length // cache.block_size)].long()
            ks, vs = (part.repeat_interleave(groups, 0) for part in cache.read(layer, table, length))
            qs = seen[first:last].transpose(0, 1)
            scores = qs @ ks.transpose(1, 2) * scoring.scale
            if scoring.softcap is not None:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            at = batch.positions[first:last].unsqueeze(1)
            key_at = torch.arange(length, device=q.device).unsqueeze(0)
            hidden = key_at > at
            if scoring.window is not None:
                hidden |= key_at <= at - scoring.window
            scores = scores.masked_fill(hidden, float("-inf"))
            out[first:last] = (scores.softmax(-1) @ vs).transpose(0, 1).to(out.dtype)
        return out


class NativeAttention:
    """The compiled kernel (kernels/attention.h), parallel over sequences, heads and tiles of rows.

    It reads the cache in place. A row's result does not depend on the other rows of the batch.
    """

    __slots__ = ("batch", "cache")

    def __init__(self, cache: KVCache, batch: FlatBatch) -> None:
        self.cache = cache
        self.batch = batch

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        batch, cache, kept = self.batch, self.cache, q.dtype
        dtype = cache.dtype
        q, k, v = _rows_of_heads(q, dtype), _rows_of_heads(k, dtype), _rows_of_heads(v, dtype)
        rows, heads, head_dim = q.shape
        out = torch.empty((rows, heads, head_dim), dtype=dtype)
        call = _KernelCall(
            dtype=compiled.CODES[dtype],
            keys=cache.keys[layer].data_ptr(),
            values=cache.values[layer].data_ptr(),
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            out=out.data_ptr(),
            q_stride=q.stride(0),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            query_start=batch.query_start.data_ptr(),
            seq_len=batch.seq_len.data_ptr(),
            block_table=batch.block_table.data_ptr(),
            slots=batch.slots.data_ptr(),
            table_stride=batch.block_table.stride(0),
            sequences=batch.num_sequences,
            rows=rows,
            heads=heads,
            kv_heads=k.shape[1],
            head_dim=head_dim,
            block_size=cache.block_size,
            scale=scoring.scale,
            window=scoring.window or 0,
            softcap=scoring.softcap or 0.0,
            key_scales=cache.key_scales[layer].data_ptr() if cache.in_bytes else 0,
            value_scales=cache.value_scales[layer].data_ptr() if cache.in_bytes else 0,
            key_groups=cache.key_groups,
            threads=torch.get_num_threads(),
        )
        kernels.attention(*call)
        return out.to(kept)


def _rows_of_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, heads, D] with the heads of a row side by side, as the kernel reads it."""
    x = x.to(dtype)
    if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        x = x.contiguous()
    return x


class _KernelCall(NamedTuple):
    """Arguments of ``kernels.attention``, in its order; tensors as addresses, strides in elements."""

    dtype: int
    keys: int
    values: int
    q: int
    k: int
    v: int
    out: int
    q_stride: int
    k_stride: int
    v_stride: int
    query_start: int
    seq_len: int
    block_table: int
    slots: int
    table_stride: int
    sequences: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    window: int  # 0: none
    softcap: float  # 0: none
    key_scales: int  # 0: the cache has none
    value_scales: int
    key_groups: int
    threads: int


def native_available(dtype: torch.dtype, head_dim: int, *, in_bytes: bool = False) -> bool:
    """Whether the compiled kernel was built and supports this number format, head size and cache format."""
    return compiled.takes_dtype(dtype) and head_dim % (4 if in_bytes else 2) == 0 and 2 <= head_dim <= 256


AttentionKind = Literal["auto", "reference", "native", "triton"]


def uses_kernel(kind: AttentionKind, cache: KVCache) -> bool:
    """Whether ``create_attention`` takes the compiled kernel, in which a row has the same bits in any batch."""
    on_cpu = cache.keys[0].is_cpu and not cache.in_rows
    available = native_available(cache.dtype, cache.head_dim, in_bytes=cache.in_bytes)
    return kind == "native" or (kind == "auto" and on_cpu and available)


def create_attention(kind: AttentionKind, cache: KVCache, batch: FlatBatch) -> Attention:
    """The implementation for one step. ``auto``: the compiled kernel where available, else the reference."""
    if kind == "triton":
        from inferd.native.triton.attention import TritonAttention  # with it comes Triton

        return TritonAttention(cache, batch)
    return NativeAttention(cache, batch) if uses_kernel(kind, cache) else ReferenceAttention(cache, batch)
