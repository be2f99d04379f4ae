"""The attention kernel against the plain twin, over random ragged batches and every instruction set."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import THOROUGH
from torch import Tensor

from inferd.native import compiled
from inferd.native.attention import FlatBatch, Scoring
from inferd.native.kv_cache import KVCache
from inferd.native.kv_sizes import ahead_bytes
from inferd.native.paged_attention import NativeAttention, ReferenceAttention, create_attention, native_available

needs_kernels = pytest.mark.skipif(not compiled.BUILT, reason="inferd was installed without its compiled kernels")
LEVELS = compiled.levels()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    in_bytes: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's part of a step: ``count`` new rows after ``computed`` ones."""

    computed: int
    count: int


def arena(shape: Shape, num_blocks: int, seed: int, *, in_rows: bool = False) -> KVCache:
    """A cache full of noise: what is not a sequence's own must not matter."""
    cache = KVCache(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=shape.block_size,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        device=torch.device("cpu"),
        in_bytes=shape.in_bytes,
        in_rows=in_rows,
    )
    noise = torch.Generator().manual_seed(seed)
    slots = torch.arange(num_blocks * shape.block_size)
    k, v = torch.randn((2, len(slots), shape.kv_heads, shape.head_dim), generator=noise).to(shape.dtype)
    cache.write(0, slots, k, v)
    return cache


def flat_batch(parts: list[Rows], block_size: int, order: Tensor) -> tuple[FlatBatch, int]:
    """The batch, its blocks taken from ``order`` in turn; and how many it took."""
    counts = torch.tensor([p.count for p in parts])
    starts = [0, *counts.cumsum(0).tolist()]
    needed = [-(-(p.computed + p.count) // block_size) for p in parts]
    table = torch.zeros((len(parts), max(needed)), dtype=torch.int32)
    taken = 0
    for i, n in enumerate(needed):
        table[i, :n] = order[taken : taken + n].int()
        taken += n
    positions = torch.cat([torch.arange(p.computed, p.computed + p.count) for p in parts])
    owner = torch.repeat_interleave(torch.arange(len(parts)), counts)
    slots = table[owner, positions // block_size].long() * block_size + positions % block_size
    batch = FlatBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        query_start=torch.tensor(starts, dtype=torch.int32),
        seq_len=torch.tensor([p.computed + p.count for p in parts], dtype=torch.int32),
        block_table=table,
        slots=slots,
        num_sequences=len(parts),
    )
    return batch, taken


def inputs(shape: Shape, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as a model has them: parts of one row, not contiguous."""
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = torch.randn((rows, width), generator=torch.Generator().manual_seed(seed)).to(shape.dtype)
    q, k, v = torch.split(qkv, [shape.heads * shape.head_dim, *[shape.kv_heads * shape.head_dim] * 2], dim=-1)
    return (
        q.view(rows, shape.heads, -1),
        k.view(rows, shape.kv_heads, -1),
        v.view(rows, shape.kv_heads, -1),
    )


def both(
    shape: Shape, parts: list[Rows], seed: int, window: int | None = None, softcap: float | None = None
) -> tuple[Tensor, Tensor, KVCache, KVCache]:
    """(native, reference) results and their caches, on equal noise."""
    blocks = sum(-(-(p.computed + p.count) // shape.block_size) for p in parts) + 1
    order = 1 + torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(seed))
    batch, _ = flat_batch(parts, shape.block_size, order)
    q, k, v = inputs(shape, int(batch.query_start[-1]), seed)
    ours, theirs = arena(shape, blocks, seed), arena(shape, blocks, seed)
    scale = shape.head_dim**-0.5
    a = NativeAttention(ours, batch)(0, q, k, v, Scoring(scale, window, softcap))
    b = ReferenceAttention(theirs, batch)(0, q, k, v, Scoring(scale, window, softcap))
    return a, b, ours, theirs


def assert_same_cache(ours: KVCache, theirs: KVCache) -> None:
    blocks = torch.arange(ours.num_blocks)
    for a, b in zip(*(c.read(0, blocks, c.num_blocks * c.block_size) for c in (ours, theirs)), strict=True):
        assert torch.equal(a, b)


def assert_close(a: Tensor, b: Tensor, *, in_bytes: bool = False) -> None:
    # Weights of a cache of bytes are whole numbers of 16 bits.
    tolerance = max(TOLERANCE[b.dtype], 3e-4 if in_bytes else 0)
    torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


shapes = st.builds(
    lambda kv, group, dim, size, dtype, in_bytes: Shape(kv * group, kv, dim, size, dtype, in_bytes and dim % 4 == 0),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 3, 4, 7]),
    st.sampled_from([2, 8, 16, 64, 80, 128, 256]),
    st.sampled_from([1, 2, 7, 16, 32]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
rows_of_a_sequence = st.one_of(
    st.builds(Rows, st.integers(0, 200), st.just(1)),  # decode
    st.builds(Rows, st.just(0), st.integers(1, 90)),  # fresh prompt
    st.builds(Rows, st.integers(1, 150), st.integers(2, 70)),  # a chunk behind others
)


@needs_kernels
@given(
    shape=shapes,
    parts=st.lists(rows_of_a_sequence, min_size=1, max_size=5),
    window=st.one_of(st.none(), st.integers(1, 130)),
    softcap=st.one_of(st.none(), st.sampled_from([1.0, 30.0, 50.0])),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_native_attention_equals_its_plain_twin(
    shape: Shape, parts: list[Rows], window: int | None, softcap: float | None, seed: int
) -> None:
    a, b, ours, theirs = both(shape, parts, seed, window, softcap)
    assert_close(a, b, in_bytes=shape.in_bytes)
    assert_same_cache(ours, theirs)


@needs_kernels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "in_bytes"), [(10, False), (96, False), (12, True), (64, True)])
@pytest.mark.parametrize("block_size", [5, 16])
def test_every_instruction_set_gives_the_same_answer(
    level: str, dtype: torch.dtype, head_dim: int, in_bytes: bool, block_size: int
) -> None:
    shape = Shape(heads=6, kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=dtype, in_bytes=in_bytes)
    with compiled.using_level(level):
        assert compiled.level() == level
        a, b, ours, theirs = both(shape, [Rows(70, 1), Rows(0, 67), Rows(30, 9)], seed=3, window=40, softcap=20.0)
    assert_close(a, b, in_bytes=shape.in_bytes)
    assert_same_cache(ours, theirs)


@needs_kernels
@given(
    shape=shapes,
    parts=st.lists(rows_of_a_sequence, min_size=2, max_size=4),
    window=st.one_of(st.none(), st.integers(1, 130)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_a_row_is_bit_identical_alone_and_in_any_batch(
    shape: Shape, parts: list[Rows], window: int | None, seed: int
) -> None:
    blocks = sum(-(-(p.computed + p.count) // shape.block_size) for p in parts)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))
    batch, _ = flat_batch(parts, shape.block_size, order)
    q, k, v = inputs(shape, int(batch.query_start[-1]), seed)
    together = NativeAttention(arena(shape, blocks, seed), batch)(0, q, k, v, Scoring(0.2, window))

    one_by_one = arena(shape, blocks, seed)
    taken = 0
    for i, part in enumerate(parts):
        first = int(batch.query_start[i])
        mine = order[taken:]
        for row in range(part.count):  # each row is a step of its own
            single, used = flat_batch([Rows(part.computed + row, 1)], shape.block_size, mine)
            at = slice(first + row, first + row + 1)
            alone = NativeAttention(one_by_one, single)(0, q[at], k[at], v[at], Scoring(0.2, window))
            assert torch.equal(alone, together[at])
        taken += used


@needs_kernels
@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize("window", [None, 700])
def test_a_long_context_gives_the_same_bits_whatever_shares_it(in_bytes: bool, window: int | None) -> None:
    """Decoded or in chunks of a prompt, on one thread or with its chunks of keys shared out among four."""
    shape = Shape(heads=2, kv_heads=1, head_dim=16, block_size=16, dtype=torch.bfloat16, in_bytes=in_bytes)
    batch, blocks = flat_batch([Rows(2000, 60)], 16, torch.randperm(129, generator=torch.Generator().manual_seed(3)))
    q, k, v = inputs(shape, 60, seed=5)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            cache = arena(shape, blocks, seed=5)
            results.append(NativeAttention(cache, batch)(0, q, k, v, Scoring(0.3, window)))
            for row in (0, 40, 59):
                single, _ = flat_batch([Rows(2000 + row, 1)], 16, batch.block_table[0])
                at = slice(row, row + 1)
                alone = NativeAttention(cache, single)(0, q[at], k[at], v[at], Scoring(0.3, window))
                assert torch.equal(alone, results[-1][at])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    twin = ReferenceAttention(arena(shape, blocks, seed=5), batch)(0, q, k, v, Scoring(0.3, window))
    assert_close(results[0], twin, in_bytes=in_bytes)


@needs_kernels
@pytest.mark.parametrize("in_bytes", [False, True])
def test_what_lies_behind_a_sequence_does_not_reach_it(in_bytes: bool) -> None:
    """A block's unused rows may hold anything, another request's NaN included."""
    for block_size in (16, 10):
        shape = Shape(heads=2, kv_heads=1, head_dim=32, block_size=block_size, dtype=torch.bfloat16, in_bytes=in_bytes)
        batch, _ = flat_batch([Rows(4, 1)], block_size, torch.tensor([0]))
        q, k, v = inputs(shape, 1, seed=1)
        cache = arena(shape, 1, seed=1)
        clean = NativeAttention(cache, batch)(0, q, k, v, Scoring(1.0))
        rest = torch.full((block_size - 5, 1, 32), float("nan"), dtype=torch.bfloat16)
        cache.write(0, torch.arange(5, block_size), rest, rest)
        assert torch.equal(NativeAttention(cache, batch)(0, q, k, v, Scoring(1.0)), clean)


@needs_kernels
def test_a_nan_in_a_cache_of_bytes_is_not_hidden() -> None:
    shape = Shape(heads=2, kv_heads=1, head_dim=32, block_size=16, dtype=torch.float32, in_bytes=True)
    batch, _ = flat_batch([Rows(4, 1)], 16, torch.tensor([0]))
    for part in range(3):
        tensors = [t.clone() for t in inputs(shape, 1, seed=1)]
        tensors[part][0, 0, 3] = float("nan")
        q, k, v = tensors
        assert NativeAttention(arena(shape, 1, seed=1), batch)(0, q, k, v, Scoring(1.0))[0, 0].isnan().all()


@needs_kernels
def test_a_nan_in_the_query_is_not_hidden() -> None:
    shape = Shape(heads=2, kv_heads=1, head_dim=32, block_size=16, dtype=torch.float32)
    batch, _ = flat_batch([Rows(4, 1)], 16, torch.tensor([0]))
    q, k, v = inputs(shape, 1, seed=1)
    q = q.clone()
    q[0, 0, 3] = float("nan")
    result = NativeAttention(arena(shape, 1, seed=1), batch)(0, q, k, v, Scoring(1.0))
    assert result[0, 0].isnan().all()
    assert result[0, 1].isfinite().all()


def test_auto_takes_the_kernel_where_it_can_and_the_reference_elsewhere() -> None:
    shape = Shape(heads=2, kv_heads=1, head_dim=32, block_size=16, dtype=torch.float32)
    batch, _ = flat_batch([Rows(0, 1)], 16, torch.tensor([0]))
    cache = arena(shape, 1, seed=0)
    assert isinstance(create_attention("reference", cache, batch), ReferenceAttention)
    expected = NativeAttention if compiled.BUILT else ReferenceAttention
    assert isinstance(create_attention("auto", cache, batch), expected)
    with compiled.using_level("none"):
        assert isinstance(create_attention("auto", cache, batch), ReferenceAttention)
    half = arena(Shape(2, 1, 32, 16, torch.float16), 1, seed=0)
    assert isinstance(create_attention("auto", half, batch), ReferenceAttention)


def test_head_sizes_beyond_the_kernel_are_refused() -> None:
    assert not native_available(torch.float32, 33)
    assert not native_available(torch.float32, 512)
    assert not native_available(torch.float16, 64)
    assert native_available(torch.bfloat16, 128) == compiled.BUILT


def _arena(num_blocks: int, *, num_kv_heads: int, head_dim: int) -> KVCache:
    return KVCache(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=16,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _pages_ahead() -> tuple[int, int, int, bool]:
    """Bytes that got pages ahead of time, by the cache and by the system, those of a second call, and whether what was
    written before is still there."""
    cache = _arena(3000, num_kv_heads=8, head_dim=128)
    assert cache.keys[0].nbytes > 90_000_000
    written = torch.ones(1, 8, 128, dtype=torch.bfloat16)
    cache.write(0, torch.tensor([20]), written, written)
    before = _resident_bytes()
    touched = sum(iter(cache.touch_more, 0))
    grown = _resident_bytes() - before
    keys, values = cache.read(0, torch.tensor([1]), 5)
    return touched, grown, cache.touch_more(), bool((keys[:, 4] == 1).all() and (values[:, 4] == 1).all())


@THOROUGH
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell what has pages")
def test_blocks_that_are_used_first_get_pages_ahead_of_time() -> None:
    # In a process of its own: the memory of earlier tests has pages when it is used again.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        touched, grown, more, is_kept = fresh.submit(_pages_ahead).result(120)
    if not touched:
        pytest.skip("the kernels are not built, or the system cannot be asked for pages")
    assert touched == ahead_bytes(2 * 8 * 128 * 2)
    # Of 197 MB. The system gives whole large pages, and only in one of two arenas is the first of them there.
    assert touched - 5_000_000 < grown < touched + 9_000_000
    assert not more
    assert is_kept


def test_a_small_arena_gets_its_pages_when_it_is_used() -> None:
    assert not _arena(4, num_kv_heads=1, head_dim=8).touch_more()
