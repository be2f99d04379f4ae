"""The operations against their torch forms, which are the same functions with the kernels turned off."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inferd.native import compiled, ops

DTYPES = [torch.float32, torch.bfloat16]
LEVELS = compiled.levels() or ["none"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
needs_kernels = pytest.mark.skipif(not compiled.BUILT, reason="inferd was installed without its compiled kernels")


def assert_close(a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    assert a.dtype == b.dtype
    tolerance = TOLERANCE[b.dtype]
    torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance * scale)


def noise(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(1, 5), size=st.integers(1, 300), wide=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_norms_equal_their_torch_forms(
    level: str, dtype: torch.dtype, rows: int, size: int, wide: bool, seed: int
) -> None:
    x = noise(rows, size, seed=seed, dtype=dtype)
    residual = noise(rows, size, seed=seed + 1, dtype=dtype)
    weight = noise(size, seed=seed + 2, dtype=torch.float32 if wide else dtype)  # Gemma's are float32
    with compiled.using_level("none"):
        plain = ops.rms_norm(x, weight, 1e-6)
        plain_added, plain_residual = ops.add_rms_norm(x, residual, weight, 1e-6)
    with compiled.using_level(level):
        ours = ops.rms_norm(x, weight, 1e-6)
        added, new_residual = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert_close(ours, plain, scale=4)
    assert_close(added, plain_added, scale=4)
    assert torch.equal(new_residual, plain_residual)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_heads_takes_a_part_of_a_row(level: str, dtype: torch.dtype) -> None:
    q = noise(3, 160, seed=1, dtype=dtype)[:, :96].view(3, 4, 24)
    weight = noise(24, seed=2, dtype=dtype)
    with compiled.using_level("none"):
        plain = ops.rms_norm(q, weight, 1e-5)
    with compiled.using_level(level):
        assert_close(ops.rms_norm(q, weight, 1e-5), plain, scale=4)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 1100),
    activation=st.sampled_from(sorted(ops.ACTIVATIONS)),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_gates_equal_their_torch_forms(
    level: str, dtype: torch.dtype, rows: int, size: int, activation: str, seed: int
) -> None:
    gate_up = noise(rows, 2 * size, seed=seed, dtype=dtype) * 3
    with compiled.using_level("none"):
        plain = ops.gate_and_mul(gate_up.float(), activation).to(dtype)
    with compiled.using_level(level):
        assert_close(ops.gate_and_mul(gate_up, activation), plain)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_keeps_what_is_not_a_number_and_what_is_huge(dtype: torch.dtype) -> None:
    gate = torch.tensor([[float("nan"), 1e30, -1e30, float("inf"), 0.0]], dtype=dtype)
    result = ops.gate_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=-1), "silu")
    assert result[0, 0].isnan()
    assert torch.equal(result[0, 1:], torch.tensor([gate[0, 1].item(), 0.0, float("inf"), 0.0], dtype=dtype))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.integers(1, 20),
    half=st.integers(1, 40),
    rest=st.sampled_from([0, 2, 16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_rotary_equals_its_torch_form(
    level: str, dtype: torch.dtype, rows: int, half: int, rest: int, seed: int
) -> None:
    size = 2 * half + rest
    q, k = noise(rows, 3, size, seed=seed, dtype=dtype), noise(rows, 1, size, seed=seed + 1, dtype=dtype)
    positions = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(seed))
    angle = torch.outer(torch.arange(50).float(), torch.rand(half, generator=torch.Generator().manual_seed(seed)))
    with compiled.using_level("none"):
        plain = ops.rotary(q, k, positions, angle.cos(), angle.sin())
    with compiled.using_level(level):
        ours = ops.rotary(q.clone(), k.clone(), positions, angle.cos(), angle.sin())
    for a, b in zip(ours, plain, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.integers(1, 40),
    out=st.integers(1, 200),
    half_in=st.integers(1, 90),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_linear_equals_the_torch_product(
    level: str, dtype: torch.dtype, rows: int, out: int, half_in: int, biased: bool, seed: int
) -> None:
    size = 2 * half_in
    x, weight = noise(rows, size, seed=seed, dtype=dtype), noise(out, size, seed=seed + 1, dtype=dtype)
    bias = noise(out, seed=seed + 2, dtype=dtype) if biased else None
    plain = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    linear = ops.Linear(weight.clone(), bias)
    with compiled.using_level(level):
        assert_close(linear(x), plain.to(dtype), scale=size**0.5)
        exact = linear(x, torch.float32)
    assert exact.dtype == torch.float32
    assert_close(exact, plain.float(), scale=size**0.5 * (1 if dtype == torch.float32 else 1000))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@given(parts=st.lists(st.integers(1, 150), min_size=1, max_size=4), size=st.integers(1, 70))
@settings(max_examples=20, deadline=None)
def test_stacked_weights_are_the_weights_above_each_other(dtype: torch.dtype, parts: list[int], size: int) -> None:
    weights = [noise(n, size, seed=i, dtype=dtype) for i, n in enumerate(parts)]
    biases = [noise(n, seed=9 + i, dtype=dtype) for i, n in enumerate(parts)]
    linear = ops.Linear.stack([w.clone() for w in weights], biases)
    whole = torch.cat(weights)
    assert (linear.out_features, linear.in_features) == (sum(parts), size)
    assert torch.equal(linear.weight, whole)
    ids = torch.randint(0, sum(parts), (2, 3), generator=torch.Generator().manual_seed(1))
    assert torch.equal(linear.rows(ids), whole[ids])
    x = noise(5, size, seed=3, dtype=dtype)
    assert torch.equal(linear(x), ops.Linear(whole, torch.cat(biases))(x))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_is_bit_identical_in_any_batch(dtype: torch.dtype) -> None:
    linear = ops.Linear(noise(300, 130, seed=0, dtype=dtype))
    x = noise(67, 130, seed=1, dtype=dtype)
    together = linear(x)
    for rows in (1, 2, 5, 6, 7, 23, 40):
        for first in range(0, 67 - rows, 9):
            assert torch.equal(linear(x[first : first + rows]), together[first : first + rows])


@needs_kernels
def test_threads_do_not_change_a_product() -> None:
    linear = ops.Linear(noise(128, 256, seed=0, dtype=torch.bfloat16))
    x = noise(200, 256, seed=1, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(linear(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_product_takes_leading_axes_and_parts_of_rows() -> None:
    linear = ops.Linear(noise(10, 8, seed=0, dtype=torch.float32))
    x = noise(2, 3, 20, seed=1, dtype=torch.float32)[..., 3:11]
    assert_close(linear(x), torch.nn.functional.linear(x, linear.weight))


def test_no_rows_give_no_results() -> None:
    linear = ops.Linear(noise(10, 8, seed=0, dtype=torch.bfloat16))
    assert linear(torch.empty((0, 8), dtype=torch.bfloat16)).shape == (0, 10)
