"""The low-rank products of the kernels, against their plain form and against themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inferd.native import compiled
from inferd.native.low_rank import AdapterRows, LoadedAdapter, LowRank, low_rank

pytestmark = pytest.mark.skipif(not compiled.BUILT, reason="inferd was installed without its compiled kernels")

WIDTH, OUTPUTS = 100, 150  # neither a multiple of a vector nor of a panel


def adapter(rank: int, seed: int, dtype: torch.dtype, *, first: int = 20, outputs: int = 97) -> LoadedAdapter:
    random = torch.Generator().manual_seed(seed)
    parts: list[LowRank] = []
    for at, count in ((0, first), (first, outputs)):
        a = torch.randn(rank, WIDTH, generator=random).to(dtype)
        b = torch.randn(count, rank, generator=random).to(dtype)
        parts.append(low_rank(a, b, at, 0.5))
    return LoadedAdapter(f"a{seed}", b"%d" % seed, 2, {(1, 2): parts})


def applied(adapters: list[LoadedAdapter], of: list[int], x: Tensor, y: Tensor) -> Tensor:
    return AdapterRows(adapters, torch.tensor(of, dtype=torch.int32)).add(1, 2, x, y.clone())


@settings(max_examples=30, deadline=None)
@given(
    ranks=st.lists(st.sampled_from([1, 3, 8, 16, 64, 128]), min_size=1, max_size=4),
    of=st.lists(st.integers(-1, 3), min_size=1, max_size=11),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    level=st.sampled_from(compiled.levels() or ["none"]),
)
def test_the_kernel_computes_what_the_plain_form_does_and_a_row_alone_to_the_bit(
    ranks: list[int], of: list[int], dtype: torch.dtype, level: str
) -> None:
    of = [place if place < len(ranks) else -1 for place in of]
    random = torch.Generator().manual_seed(1)
    x = torch.randn(len(of), WIDTH, generator=random).to(dtype)
    y = torch.randn(len(of), OUTPUTS, generator=random).to(dtype)
    with compiled.using_level(level):
        adapters = [adapter(rank, seed, dtype) for seed, rank in enumerate(ranks)]
        found = applied(adapters, of, x, y)
        for row in range(len(of)):
            alone = applied(adapters, of[row : row + 1], x[row : row + 1], y[row : row + 1])
            assert torch.equal(alone[0], found[row])
    with compiled.using_level("none"):
        expected = applied(adapters, of, x, y)
    assert torch.equal(found[:, 117:], y[:, 117:]), "outputs that the adapter does not change"
    for row, place in enumerate(of):
        if place < 0:
            assert torch.equal(found[row], y[row])
    rtol, atol = (2e-2, 0.3) if dtype == torch.bfloat16 else (1e-4, 2e-3)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def test_the_plain_form_is_the_formula() -> None:
    with compiled.using_level("none"):
        one = adapter(4, 7, torch.float32)
    x, y = torch.randn(3, WIDTH), torch.randn(3, OUTPUTS)
    found = applied([one], [0, -1, 0], x, y)
    expected = y.clone()
    for part in one.parts(1, 2):
        expected[:, part.first : part.first + part.outputs] += part.scale * x @ part.a.T @ part.plain_b.T
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], rtol=1e-4, atol=1e-3)
    assert torch.equal(found[1], y[1])


def test_threads_do_not_change_a_bit() -> None:
    before = torch.get_num_threads()
    x, y = torch.randn(24, WIDTH), torch.randn(24, OUTPUTS)
    one = [adapter(64, 3, torch.float32), adapter(16, 4, torch.float32)]
    of = [i % 3 - 1 for i in range(24)]
    try:
        torch.set_num_threads(1)
        alone = applied(one, of, x, y)
        torch.set_num_threads(2)
        assert torch.equal(applied(one, of, x, y), alone)
    finally:
        torch.set_num_threads(before)
