"""Products with quantised weights: the arithmetic, and the kernels against it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.native import compiled, ops
from inferd.native.quantized import QuantizedWeight, by_output, rounded, stacked

LEVELS = [*compiled.levels(), "none"]
MANY_ROWS = 140  # for which kernels take the zero points of 4 bits off once for all rows


def random_weight(
    out: int, size: int, bits: int, group: int, *, has_zero: bool, seed: int, ordered: bool = False
) -> QuantizedWeight:
    made = torch.Generator().manual_seed(seed)
    high = 1 << (bits - 1)
    groups = -(-size // group) if group else 1
    values = torch.randint(-high, high, (out, size), generator=made, dtype=torch.int8)
    scale = torch.rand((out, groups), generator=made) * 0.05 + 0.001
    zero = torch.randint(-high, high, (out, groups), generator=made, dtype=torch.int8) if has_zero else None
    order = torch.randperm(size, generator=made) if ordered else None
    return QuantizedWeight(values, scale, zero, bits, group, order).stored()


def exact_product(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    dense = weight.rows(torch.arange(weight.values.shape[0])).double()
    y = rounded(x, weight).double() @ dense.T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("level", LEVELS)
@given(
    rows=st.integers(1, 40) | st.just(MANY_ROWS),
    out=st.integers(1, 200),
    size=st.integers(1, 300),
    form=st.sampled_from([(8, 0), (8, 32), (4, 0), (4, 32), (4, 64), (4, 128)]),
    has_zero=st.booleans(),
    biased=st.booleans(),
    ordered=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_a_product_with_integers_equals_the_one_with_what_they_stand_for(
    level: str,
    rows: int,
    out: int,
    size: int,
    form: tuple[int, int],
    has_zero: bool,
    biased: bool,
    ordered: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    weight = random_weight(out, size, *form, has_zero=has_zero, seed=seed, ordered=ordered)
    made = torch.Generator().manual_seed(seed)
    x, bias = torch.randn((rows, size), generator=made).to(dtype), torch.randn(out, generator=made) if biased else None
    with compiled.using_level(level):
        found = ops.Linear.quantized(weight, bias, dtype=dtype)(x, torch.float32)
    expected = exact_product(x, weight, bias)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * size)


def test_an_order_of_columns_is_that_of_the_inputs_they_take() -> None:
    weight = random_weight(9, 40, 8, 8, has_zero=True, seed=3, ordered=True)
    assert weight.order is not None
    plain = QuantizedWeight(weight.values, weight.scale, weight.zero, 8, 8).rows(torch.arange(9))
    for column, source in enumerate(weight.order.tolist()):
        assert torch.equal(weight.dense()[:, source], plain[:, column])


def test_stacked_integers_are_the_matrices_above_each_other() -> None:
    parts = [random_weight(n, 70, 4, 32, has_zero=n == 5, seed=n) for n in (3, 5, 80)]
    whole = torch.cat([each.rows(torch.arange(each.values.shape[0])) for each in parts])
    assert torch.equal(stacked(parts).rows(torch.arange(88)), whole)
    linear = ops.Linear.quantized(parts, dtype=torch.float32)
    assert linear.out_features == 88
    torch.testing.assert_close(linear.weight, whole, rtol=1e-3, atol=0)


def test_eight_bits_for_each_output_lose_less_than_half_a_step() -> None:
    weight = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    found = by_output(weight)
    assert ((found.rows(torch.arange(20)) - weight).abs() <= found.scale * 0.5001).all()


@pytest.mark.parametrize("level", compiled.levels())
@given(
    out=st.integers(1, 150),
    size=st.integers(1, 200),
    form=st.sampled_from([(8, 0), (8, 64), (4, 0), (4, 32), (4, 128)]),
    has_zero=st.booleans(),
    ordered=st.booleans(),
    first=st.integers(0, 60),
    rows=st.integers(1, 70),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_a_row_of_a_quantised_product_is_bit_identical_in_any_batch_and_on_any_number_of_threads(
    level: str,
    out: int,
    size: int,
    form: tuple[int, int],
    has_zero: bool,
    ordered: bool,
    first: int,
    rows: int,
    threads: int,
    seed: int,
) -> None:
    weight = random_weight(out, size, *form, has_zero=has_zero, seed=seed, ordered=ordered)
    x = torch.randn((MANY_ROWS, size), generator=torch.Generator().manual_seed(seed)).bfloat16()
    before = torch.get_num_threads()
    with compiled.using_level(level):
        linear = ops.Linear.quantized(weight)
        together = linear(x, torch.float32)
        try:
            torch.set_num_threads(threads)
            part = linear(x[first : first + rows], torch.float32)
        finally:
            torch.set_num_threads(before)
    assert torch.equal(part, together[first : first + rows])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", [(8, 0), (8, 32), (4, 0), (4, 64)])
@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_quantised_embedding_are_what_its_integers_stand_for(
    level: str, form: tuple[int, int], has_zero: bool, ordered: bool, dtype: torch.dtype
) -> None:
    weight = random_weight(70, 90, *form, has_zero=has_zero, seed=1, ordered=ordered)
    ids = torch.tensor([[0, 69, 64], [3, 3, 65]])
    with compiled.using_level(level):
        found = ops.Linear.quantized(weight, dtype=dtype).rows(ids)
    assert torch.equal(found, weight.rows(ids.flatten()).view(2, 3, 90).to(dtype))
