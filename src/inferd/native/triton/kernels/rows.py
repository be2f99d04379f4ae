"""Operations on single rows: norms, gates, rotation, and writing keys and values."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm(x, residual, weight, y, total, x_stride, eps, COLUMNS: tl.constexpr, WIDE: tl.constexpr, ADDS: tl.constexpr):
    """Root-mean-square norm of a row, of ``x + residual`` where ADDS; the sum is then written to ``total``."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDE)
    ok = i < COLUMNS
    value = tl.load(x + row * x_stride + i, mask=ok, other=0.0)
    if ADDS:
        value = (value.to(tl.float32) + tl.load(residual + row * COLUMNS + i, mask=ok, other=0.0).to(tl.float32)).to(
            x.dtype.element_ty
        )
        tl.store(total + row * COLUMNS + i, value, mask=ok)
    value = value.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / COLUMNS + eps)
    value = value * tl.load(weight + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + row * COLUMNS + i, value.to(y.dtype.element_ty), mask=ok)


@triton.jit
def gate(x, y, x_stride, COLUMNS: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr):
    """activation(first half of a row) * second half. KIND: 0 silu, 1 gelu, 2 gelu by tanh."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    ok = i < COLUMNS
    a = tl.load(x + row * x_stride + i, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(x + row * x_stride + COLUMNS + i, mask=ok, other=0.0).to(tl.float32)
    if KIND == 0:
        a = a * tl.sigmoid(a)
    elif KIND == 1:
        a = 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476))
    else:
        a = a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
    # The activation is rounded before the product, as where both are calls of their own.
    a = a.to(x.dtype.element_ty).to(tl.float32)
    tl.store(y + row * COLUMNS + i, (a * b).to(y.dtype.element_ty), mask=ok)


@triton.jit
def _normed(head, is_query, q_norm, k_norm, i, ok, inverse, NORMS: tl.constexpr):
    """Elements ``i`` of a head, normed by ``inverse`` where NORMS; rounded as the norm's own output would be."""
    stored = tl.load(head + i, mask=ok, other=0.0)
    value = stored.to(tl.float32)
    if NORMS:
        of_queries = tl.load(q_norm + i, mask=ok, other=0.0).to(tl.float32)
        of_keys = tl.load(k_norm + i, mask=ok, other=0.0).to(tl.float32)
        value = (value * inverse * tl.where(is_query, of_queries, of_keys)).to(stored.dtype).to(tl.float32)
    return value


@triton.jit
def turn_and_write(
    qkv,  # [T, (heads + 2 kv_heads) * D]
    queries,  # [T, heads, D]: not in place, as a program's threads read each other's elements
    q_norm,  # [D] where NORMS
    k_norm,
    cos,  # [positions, HALF] where HALF
    sin,
    positions,  # [T]
    slots,  # [T]
    keys,  # [blocks, kv_heads, SIZE, D]
    values,
    key_scales,  # see attention.attend
    value_scales,
    qkv_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,  # half of the rotated part of a head; 0: nothing is rotated
    NORMS: tl.constexpr,
    IN_BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """A row's head: queries and keys are normed and rotated, keys and values go to their slot."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pointer = qkv + row * qkv_stride + head * D
    i = tl.arange(0, D_PAD)
    ok = i < D
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    y = tl.load(pointer + i, mask=ok, other=0.0).to(tl.float32)
    if not is_value:
        inverse = tl.rsqrt(tl.sum(y * y, 0) / D + eps)
        y = _normed(pointer, is_query, q_norm, k_norm, i, ok, inverse, NORMS)
        if HALF > 0:
            turned = i < 2 * HALF
            j = i % HALF
            at = tl.load(positions + row) * HALF + j
            c = tl.load(cos + at, mask=turned, other=1.0)
            s = tl.load(sin + at, mask=turned, other=0.0)
            partner = tl.where(i < HALF, i + HALF, j)
            other = _normed(pointer, is_query, q_norm, k_norm, partner, turned, inverse, NORMS)
            y = y * c + tl.where(i < HALF, -other, other) * s
    if is_query:
        tl.store(queries + (row * HEADS + head) * D + i, y.to(queries.dtype.element_ty), mask=ok)
    else:
        slot = tl.load(slots + row)
        base, offset = slot // SIZE * KV_HEADS + (head - HEADS) % KV_HEADS, slot % SIZE
        place = (base * SIZE + offset) * D
        rounded = y.to(qkv.dtype.element_ty)
        if IN_BYTES:
            wide = rounded.to(tl.float32)
            if is_value:
                highest = tl.max(tl.abs(wide), 0)
                inverse = tl.where(highest > 0.0, 127.0 / highest, 0.0)
                tl.store(value_scales + base * SIZE + offset, highest / 127.0)
                tl.store(values + place + i, _nearest(wide * inverse).to(tl.int8), mask=ok)
            else:
                # Each group by itself: there are few, and a head need not be a power of two wide.
                for group in range(GROUPS):
                    mine = ok & (i // (D // GROUPS) == group)
                    highest = tl.max(tl.where(mine, tl.abs(wide), 0.0), 0)
                    inverse = tl.where(highest > 0.0, 127.0 / highest, 0.0)
                    tl.store(key_scales + (base * GROUPS + group) * SIZE + offset, highest / 127.0)
                    tl.store(keys + place + i, (_nearest(wide * inverse) + 128.0).to(tl.uint8), mask=mine)
        elif is_value:
            tl.store(values + place + i, rounded, mask=ok)
        else:
            tl.store(keys + place + i, rounded, mask=ok)


@triton.jit
def _nearest(x):
    """To the nearest whole number, halves to the even one: adding 1.5 * 2**23 leaves no bits below one."""
    return (x + 12582912.0) - 12582912.0
