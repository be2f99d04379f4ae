"""Triton's attention against the plain twin, over random ragged batches, in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.tiers import THOROUGH
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no package for this machine")

from tests.native.test_paged_attention import Rows, Shape, arena, flat_batch, inputs

from inferd.native import compiled, ops
from inferd.native.attention import FlatBatch, HeadTransform, Scoring
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import ReferenceAttention
from inferd.native.triton import attention as subject
from inferd.native.triton import switch
from inferd.native.triton.attention import TritonAttention, num_splits

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
# Shrinking takes minutes in the interpreter. The same cases every time: how far two ways of rounding may differ is no law.
QUICK = settings(max_examples=8, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    with switch.on_cpu(), compiled.using_level("none"):
        yield


def case(shape: Shape, parts: list[Rows], seed: int) -> tuple[FlatBatch, int]:
    blocks = sum(-(-(p.computed + p.count) // shape.block_size) for p in parts) + 1
    order = 1 + torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(seed))
    return flat_batch(parts, shape.block_size, order)[0], blocks


def both(
    shape: Shape, parts: list[Rows], seed: int, window: int | None = None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """(Triton's, the twin's) on equal noise."""
    batch, blocks = case(shape, parts, seed)
    q, k, v = inputs(shape, int(batch.query_start[-1]), seed)
    scale = shape.head_dim**-0.5
    ours = TritonAttention(arena(shape, blocks, seed, in_rows=True), batch)
    theirs = ReferenceAttention(arena(shape, blocks, seed), batch)
    return tuple(a(0, q, k, v, Scoring(scale, window, softcap)) for a in (ours, theirs))  # type: ignore[return-value]


def assert_close(a: Tensor, b: Tensor, *, in_bytes: bool = False) -> None:
    # The twin takes queries through 8 bits as well where the cache is in bytes.
    tolerance = 5e-2 if in_bytes else TOLERANCE[b.dtype]
    torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


shapes = st.builds(
    lambda kv, group, dim, size, dtype, in_bytes: Shape(kv * group, kv, dim, size, dtype, in_bytes and dim % 4 == 0),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3, 4]),
    st.sampled_from([6, 16, 80]),
    st.sampled_from([1, 7, 16]),
    st.sampled_from(DTYPES),
    st.booleans(),
)
decodes = st.builds(Rows, st.integers(0, 150), st.just(1))
chunks = st.one_of(
    decodes, st.builds(Rows, st.just(0), st.integers(1, 40)), st.builds(Rows, st.integers(1, 70), st.integers(2, 30))
)


@given(
    shape=shapes,
    parts=st.one_of(st.lists(decodes, min_size=1, max_size=3), st.lists(chunks, min_size=1, max_size=3)),
    window=st.one_of(st.none(), st.integers(1, 90)),
    softcap=st.one_of(st.none(), st.sampled_from([1.0, 30.0])),
    seed=st.integers(0, 1000),
)
@QUICK
def test_attention_in_triton_equals_its_plain_twin(
    shape: Shape, parts: list[Rows], window: int | None, softcap: float | None, seed: int
) -> None:
    assert_close(*both(shape, parts, seed, window, softcap), in_bytes=shape.in_bytes)


@pytest.mark.parametrize("num_processors", [0, 12], ids=["one part", "many parts"])
@pytest.mark.parametrize("window", [None, 70])
def test_keys_may_be_split_among_programs(
    num_processors: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also among more than there are tiles of keys: some have none."""
    monkeypatch.setattr(subject, "num_processors", lambda device: num_processors)
    shape = Shape(heads=2, kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32)
    assert_close(*both(shape, [Rows(200, 1), Rows(0, 1)], seed=4, window=window))
    assert_close(*both(shape, [Rows(130, 1), Rows(3, 5)], seed=5, window=window))


def test_more_programs_mean_fewer_splits() -> None:
    programs = (1, 8, 64, 132, 264, 5000)
    assert [num_splits(n, 132, is_decode=True) for n in programs] == [64, 32, 4, 2, 1, 1]
    assert [num_splits(n, 132, is_decode=False) for n in programs] == [8, 8, 8, 1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_behind_a_sequence_does_not_reach_it(dtype: torch.dtype) -> None:
    shape = Shape(heads=2, kv_heads=1, head_dim=32, block_size=16, dtype=dtype)
    batch, _ = flat_batch([Rows(4, 1)], 16, torch.tensor([0]))
    q, k, v = inputs(shape, 1, seed=1)
    cache = arena(shape, 1, seed=1, in_rows=True)
    clean = TritonAttention(cache, batch)(0, q, k, v, Scoring(1.0))
    rest = torch.full((11, 1, 32), float("nan"), dtype=dtype)
    cache.write(0, torch.arange(5, 16), rest, rest)
    assert torch.equal(TritonAttention(cache, batch)(0, q, k, v, Scoring(1.0)), clean)


def by_calls(
    shape: Shape, qkv: Tensor, batch: FlatBatch, cache: KVCache, norms: tuple[Tensor, Tensor] | None, half: int
) -> Tensor:
    """What ``projected`` does, in the plain calls of ``ops`` and the twin."""
    widths = [shape.heads * shape.head_dim, *[shape.kv_heads * shape.head_dim] * 2]
    q, k, v = (part.view(len(qkv), -1, shape.head_dim) for part in torch.split(qkv, widths, dim=1))
    if norms is not None:
        with compiled.using_level("none"):
            q, k = (_norm(x, weight) for x, weight in zip((q, k), norms, strict=True))
    if half:
        q, k = ops.rotary(q, k, batch.positions, *table_of(half))
    return ReferenceAttention(cache, batch)(0, q, k, v, Scoring(0.2))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


def table_of(half: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(100).unsqueeze(1) * (0.01 + torch.arange(half) / half)
    return angles.cos(), angles.sin()


@THOROUGH
@given(
    shape=shapes,
    parts=st.lists(st.builds(Rows, st.integers(0, 40), st.integers(1, 5)), min_size=1, max_size=2),
    has_norms=st.booleans(),
    rotated=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
@QUICK
def test_projections_are_normed_rotated_and_written_as_by_single_calls(
    shape: Shape, parts: list[Rows], has_norms: bool, rotated: float, seed: int
) -> None:
    batch, blocks = case(shape, parts, seed)
    made = torch.Generator().manual_seed(seed)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = torch.randn((int(batch.query_start[-1]), width), generator=made).to(shape.dtype)
    norms = None
    if has_norms:
        norms = torch.rand(shape.head_dim, generator=made) + 0.5, torch.rand(shape.head_dim, generator=made) + 0.5
    half = int(shape.head_dim * rotated) // 2
    ours, theirs = (arena(shape, blocks, seed, in_rows=in_rows) for in_rows in (True, False))
    found = TritonAttention(ours, batch).projected(
        0, qkv, shape.heads, HeadTransform(norms, 1e-5, table_of(half) if half else None), Scoring(0.2)
    )
    assert_close(found, by_calls(shape, qkv, batch, theirs, norms, half), in_bytes=shape.in_bytes)
    everything = torch.arange(blocks)
    for a, b in zip(*(c.read(0, everything, blocks * c.block_size) for c in (ours, theirs)), strict=True):
        assert_close(a.to(shape.dtype), b.to(shape.dtype), in_bytes=shape.in_bytes)
