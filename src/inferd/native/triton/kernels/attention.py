"""Attention of a ragged batch over paged keys and values, and the merging of its parts.

A program has some rows of one sequence with all query heads that share a key head (M rows of a product). It reads the
sequence's keys N at a time with a running maximum (Dao et al. 2022). Where rows are few, several programs share the
keys, and each writes a partial result (Dao et al. 2023, flash decoding).
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scales(pointer, base, offset, d, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, ok):
    """The scale of each column and key: [D, N] of [block, head, group, offset]."""
    group = tl.minimum(d // COLUMNS, GROUPS - 1)
    return tl.load(
        pointer + (base * GROUPS * SIZE + offset)[None, :] + group[:, None] * SIZE, mask=ok[None, :], other=0.0
    )


# What changes from step to step is not compiled for: a step would wait for the compiler.
@triton.jit(do_not_specialize=["table_stride", "num_sequences"])
def attend(
    q,  # [T, heads, D], rows q_stride apart
    keys,  # [blocks, kv_heads, SIZE, D]
    values,  # likewise
    key_scales,  # [blocks, kv_heads, GROUPS, SIZE] where IN_BYTES
    value_scales,  # [blocks, kv_heads, SIZE] where IN_BYTES
    out,  # [T, heads, D]
    parts,  # [T, heads, SPLITS, D] float32, where SPLITS > 1: not yet divided by the sum
    parts_max,  # [T, heads, SPLITS], in units of log 2
    parts_sum,  # [T, heads, SPLITS]
    query_start,  # [S + 1]
    seq_len,  # [S]
    table,  # [S, ...], rows table_stride apart
    table_stride,
    q_stride,
    num_sequences,
    scale,
    window,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a key head
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SIZE: tl.constexpr,  # tokens of a block
    ROWS: tl.constexpr,  # of a sequence in one program
    ONE_EACH: tl.constexpr,  # every sequence has exactly one row
    M: tl.constexpr,  # ROWS * GROUP, filled up to what products take
    N: tl.constexpr,  # keys at a time
    SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IN_BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDE: tl.constexpr,  # products in float32: Triton's interpreter has none of bfloat16
):
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ONE_EACH:
        sequence = tile
        first = tile
        end = tile + 1
        row0 = tile
    else:
        # Sequence i has the tiles from query_start[i] // ROWS + i: at least as many as its rows fill.
        low = 0
        high = num_sequences
        while low < high:
            middle = (low + high) // 2
            if tl.load(query_start + middle) // ROWS + middle <= tile:
                low = middle + 1
            else:
                high = middle
        sequence = low - 1
        first = tl.load(query_start + sequence)
        end = tl.load(query_start + sequence + 1)
        row0 = first + (tile - first // ROWS - sequence) * ROWS
    if row0 >= end:
        return
    length = tl.load(seq_len + sequence)
    before = length - (end - first)  # keys that were there before this step

    m = tl.arange(0, M)
    d = tl.arange(0, D_PAD)
    row = row0 + m // GROUP
    is_row = (m < ROWS * GROUP) & (row < end)
    query_head = head * GROUP + m % GROUP
    at = before + row - first  # each row's position
    queries = tl.load(
        q + row.to(tl.int64)[:, None] * q_stride + query_head[:, None] * D + d[None, :],
        mask=is_row[:, None] & (d < D)[None, :],
        other=0.0,
    )
    if WIDE:
        queries = queries.to(tl.float32)

    last = before + tl.minimum(row0 + ROWS, end) - first  # keys that the last row sees
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(before + row0 - first - window + 1, 0) // N * N
    per_split = tl.cdiv(tl.cdiv(last - begin, N), SPLITS) * N
    begin += split * per_split
    stop = tl.minimum(begin + per_split, last)

    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D_PAD], tl.float32)
    for start in range(begin, stop, N):
        n = start + tl.arange(0, N)
        ok = n < stop
        block = tl.load(table + sequence.to(tl.int64) * table_stride + n // SIZE, mask=ok, other=0).to(tl.int64)
        base, offset = block * KV_HEADS + head, n % SIZE
        place = (base * SIZE + offset) * D
        k = tl.load(keys + place[None, :] + d[:, None], mask=ok[None, :] & (d < D)[:, None], other=0)
        v = tl.load(values + place[:, None] + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0)
        if IN_BYTES:
            k = (k.to(tl.float32) - 128.0) * _scales(key_scales, base, offset, d, GROUPS, D // GROUPS, SIZE, ok)
            v_scale = tl.load(value_scales + base * SIZE + offset, mask=ok, other=0.0)
            v = v.to(tl.float32) * v_scale[:, None]
        k, v = k.to(queries.dtype), v.to(queries.dtype)
        scores = tl.dot(queries, k, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        sees = ok[None, :] & (n[None, :] <= at[:, None])
        if HAS_WINDOW:
            sees = sees & (n[None, :] > at[:, None] - window)
        scores = tl.where(sees, scores * _LOG2_E, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        against = tl.where(higher == float("-inf"), 0.0, higher)  # rows that see none of these keys
        p = tl.exp2(scores - against[:, None])
        shrink = tl.exp2(highest - against)
        total = total * shrink + tl.sum(p, 1)
        sums = sums * shrink[:, None] + tl.dot(p.to(queries.dtype), v, input_precision="ieee")
        highest = higher

    where = row.to(tl.int64) * KV_HEADS * GROUP + query_head
    if SPLITS == 1:
        tl.store(
            out + where[:, None] * D + d[None, :],
            (sums / tl.where(total > 0.0, total, 1.0)[:, None]).to(out.dtype.element_ty),
            mask=is_row[:, None] & (d < D)[None, :],
        )
    else:
        where = where * SPLITS + split
        tl.store(parts + where[:, None] * D + d[None, :], sums, mask=is_row[:, None] & (d < D)[None, :])
        tl.store(parts_max + where, highest, mask=is_row)
        tl.store(parts_sum + where, total, mask=is_row)


@triton.jit
def combine(parts, parts_max, parts_sum, out, D: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr):
    """One row and head: the sum of its parts, each weighted by its maximum relative to the largest."""
    where = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, D_PAD)
    highest = tl.load(parts_max + where * SPLITS + s)
    weight = tl.exp2(highest - tl.max(highest, 0))
    total = tl.sum(tl.load(parts_sum + where * SPLITS + s) * weight, 0)
    part = tl.load(parts + (where * SPLITS + s)[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    y = tl.sum(part * weight[:, None], 0) / total
    tl.store(out + where * D + d, y.to(out.dtype.element_ty), mask=d < D)
