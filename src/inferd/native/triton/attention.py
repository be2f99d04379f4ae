"""Launches paged attention in Triton: which tensors a kernel gets, and the sizes of its tiles.

``native.paged_attention.ReferenceAttention`` defines what is computed. Tiles and splits depend on shapes alone, never
on lengths, so a launch can be recorded in a graph and replayed for other sequences.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from inferd.native.attention import FlatBatch, HeadTransform, Scoring
from inferd.native.kv_cache import KVCache
from inferd.native.triton import switch
from inferd.native.triton.kernels import attention as kernels
from inferd.native.triton.kernels import rows as row_kernels

_LEAST = 16  # rows, columns and depth of a product in Triton
_PREFILL_ROWS = 64  # of queries times heads that share their keys
_KEYS = 64  # at a time
# Exact products of float32 are sums in registers, of which larger tiles need more than there are (bench.gpu.compile
# tells), as do wide heads.
_EXACT_ROWS, _FEWER_KEYS, _WIDE = 16, 32, 128
_MOST_SPLITS, _CHUNK_SPLITS = 64, 8


def pad(size: int, least: int = _LEAST) -> int:
    """The next power of two that is not below ``least``."""
    return max(least, 1 << (size - 1).bit_length())


@cache
def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def num_splits(num_programs: int, num_processors: int, *, is_decode: bool) -> int:
    """Number of parts that a sequence's keys are split into, so that every processor has two programs.

    A power of two for decoding steps. For other steps 1 or 8: each number is compiled separately, and such batches
    differ from step to step.
    """
    wanted = 2 * num_processors // max(num_programs, 1)
    if not is_decode:
        return _CHUNK_SPLITS if 2 * wanted >= _CHUNK_SPLITS else 1
    return min(1 << max(wanted, 1).bit_length() - 1, _MOST_SPLITS)


class TritonAttention:
    """Implements ``Attention`` and ``ProjectedAttention``: one launch norms and rotates heads and writes the cache."""

    __slots__ = ("batch", "cache")

    def __init__(self, cache: KVCache, batch: FlatBatch) -> None:
        assert cache.in_rows, "these kernels read keys and values as rows"
        self.cache = cache
        self.batch = batch

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        self.cache.write(layer, self.batch.slots, k, v)
        return self._attend(layer, q, scoring)

    def projected(self, layer: int, qkv: Tensor, num_heads: int, heads: HeadTransform, scoring: Scoring) -> Tensor:
        cache, batch = self.cache, self.batch
        rows, dim = qkv.shape[0], cache.head_dim
        assert qkv.stride(1) == 1
        queries = torch.empty((rows, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
        q_norm, k_norm = heads.norms or (None, None)
        cos, sin = heads.table or (None, None)
        key_scales, value_scales = _scales(cache, layer)
        row_kernels.turn_and_write[(rows, num_heads + 2 * cache.num_kv_heads)](
            qkv,
            queries,
            q_norm,
            k_norm,
            cos,
            sin,
            batch.positions,
            batch.slots,
            cache.keys[layer],
            cache.values[layer],
            key_scales,
            value_scales,
            qkv.stride(0),
            heads.eps,
            HEADS=num_heads,
            KV_HEADS=cache.num_kv_heads,
            D=dim,
            D_PAD=pad(dim),
            SIZE=cache.block_size,
            HALF=0 if cos is None else cos.shape[1],
            NORMS=q_norm is not None,
            IN_BYTES=cache.in_bytes,
            GROUPS=cache.key_groups,
            num_warps=1,
        )
        return self._attend(layer, queries, scoring)

    def _attend(self, layer: int, q: Tensor, scoring: Scoring) -> Tensor:
        cache, batch = self.cache, self.batch
        rows, heads, dim = q.shape
        if q.stride(2) != 1 or q.stride(1) != dim:
            q = q.contiguous()
        group = heads // cache.num_kv_heads
        one_each = batch.num_sequences == rows
        is_exact = q.dtype == torch.float32
        of_sequence = 1 if one_each else max((_EXACT_ROWS if is_exact else _PREFILL_ROWS) // group, 1)
        tiles = rows if one_each else rows // of_sequence + batch.num_sequences
        splits = num_splits(tiles * cache.num_kv_heads, num_processors(q.device), is_decode=one_each)
        out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
        parts = parts_max = parts_sum = None
        if splits > 1:
            parts = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=q.device)
            parts_max, parts_sum = torch.empty((2, rows, heads, splits), dtype=torch.float32, device=q.device)
        key_scales, value_scales = _scales(cache, layer)
        tall = pad(of_sequence * group)
        kernels.attend[(tiles, cache.num_kv_heads, splits)](
            q,
            cache.keys[layer],
            cache.values[layer],
            key_scales,
            value_scales,
            out,
            parts,
            parts_max,
            parts_sum,
            batch.query_start,
            batch.seq_len,
            batch.block_table,
            batch.block_table.stride(0),
            q.stride(0),
            batch.num_sequences,
            scoring.scale,
            scoring.window or 0,
            scoring.softcap or 0.0,
            KV_HEADS=cache.num_kv_heads,
            GROUP=group,
            D=dim,
            D_PAD=pad(dim),
            SIZE=cache.block_size,
            ROWS=of_sequence,
            ONE_EACH=one_each,
            M=tall,
            N=_FEWER_KEYS if is_exact or dim > _WIDE else _KEYS,
            SPLITS=splits,
            HAS_WINDOW=scoring.window is not None,
            HAS_SOFTCAP=scoring.softcap is not None,
            IN_BYTES=cache.in_bytes,
            GROUPS=cache.key_groups,
            WIDE=switch.is_interpreted() and q.dtype == torch.bfloat16,
            num_warps=4 if tall * pad(dim) <= 64 * 128 else 8,
            num_stages=3 if pad(dim) <= 128 else 2,
        )
        if splits > 1:
            kernels.combine[(rows * heads,)](
                parts, parts_max, parts_sum, out, D=dim, D_PAD=pad(dim), SPLITS=splits, num_warps=4
            )
        return out


def _scales(cache: KVCache, layer: int) -> tuple[Tensor | None, Tensor | None]:
    return (cache.key_scales[layer], cache.value_scales[layer]) if cache.in_bytes else (None, None)
