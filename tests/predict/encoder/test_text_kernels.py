"""The kernels that encoders use give what their torch twins give, on every level of the processor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.native import compiled, ops
from inferd.native.quantized import by_output
from inferd.predict.encoder.ragged import Ragged, attend, ragged

LEVELS = compiled.levels()
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not LEVELS, reason="the kernels were not built")


def batch_of(lengths: list[int]) -> Ragged:
    return ragged([[0] * length for length in sorted(lengths)], [None] * len(lengths), CPU)


@settings(max_examples=40)
@given(
    level=st.sampled_from(LEVELS),
    lengths=st.lists(st.integers(1, 130), min_size=1, max_size=5),
    heads=st.integers(1, 3),
    dim=st.sampled_from([16, 32, 64]),
    window=st.none() | st.integers(0, 70),
    is_biased=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_is_that_of_its_twin(
    level: str, lengths: list[int], heads: int, dim: int, window: int | None, is_biased: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    batch = batch_of(lengths)
    qkv = torch.randn(sum(lengths), 3, heads, dim, generator=draw)
    bias = torch.randn(heads, 2 * 140 - 1, generator=draw) if is_biased else None
    with compiled.using_level("none"):
        expected = attend(qkv, batch, torch.float32, window=window, distance_bias=bias)
    with compiled.using_level(level):
        found = attend(qkv, batch, torch.float32, window=window, distance_bias=bias)
        narrow = attend(qkv, batch, torch.bfloat16, window=window, distance_bias=bias)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert torch.equal(narrow, found.bfloat16())


@pytest.mark.parametrize("level", LEVELS)
def test_a_text_attends_alike_alone_and_in_company(level: str) -> None:
    torch.manual_seed(0)
    lengths = [5, 24, 24, 70, 200]
    qkv = torch.randn(sum(lengths), 3, 2, 32)
    with compiled.using_level(level):
        together = attend(qkv, batch_of(lengths), torch.float32)
        row = 0
        for length in lengths:
            part = slice(row, row + length)
            alone = attend(qkv[part].contiguous(), batch_of([length]), torch.float32)
            assert torch.equal(together[part], alone)
            row += length


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [1, 15, 16, 100, 384])
@pytest.mark.parametrize("is_plain", [True, False])
def test_layer_norm_is_torchs(level: str, size: int, is_plain: bool) -> None:
    torch.manual_seed(size)
    x, residual = torch.randn(7, size) * 3 + 1, None if is_plain else torch.randn(7, size)
    weight, bias = torch.randn(size), None if is_plain else torch.randn(size)
    expected = F.layer_norm(x if residual is None else x + residual, (size,), weight, bias, 1e-5)
    with compiled.using_level(level):
        wide, narrow = ops.layer_norm(x, residual, weight, bias, 1e-5, torch.bfloat16)
        same, again = ops.layer_norm(x, residual, weight, bias, 1e-5, torch.float32)
    torch.testing.assert_close(wide, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(narrow, wide.bfloat16())
    assert same is again


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_activates_what_it_writes(level: str, activation: str, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(70, 34), torch.randn(70) if has_bias else None
    x = torch.randn(9, 34) * 4
    expected = ops.ACTIVATIONS[activation](F.linear(x, weight, bias))
    with compiled.using_level(level):
        linear = ops.Linear(weight.clone(), bias)
        torch.testing.assert_close(linear(x, None, activation), expected, atol=2e-5, rtol=1e-5)
        half = ops.Linear(weight.bfloat16(), None if bias is None else bias.bfloat16())
        found = half(x.bfloat16(), None, activation)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.4, rtol=0.05)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("rows", "size", "outputs"), [(1, 4, 5), (7, 36, 70), (50, 384, 200)])
@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_products_of_bytes_are_exact_in_whole_numbers(
    level: str, rows: int, size: int, outputs: int, shift: float
) -> None:
    torch.manual_seed(size)
    weight, bias, x = torch.randn(outputs, size), torch.randn(outputs), torch.randn(rows, size) + shift
    with compiled.using_level(level):
        if not compiled.has_int8():
            pytest.skip(f"{level} has no products of bytes")
        packed = ops.Linear.quantized(by_output(weight), bias, dtype=torch.float32)
        found, curved = packed(x), packed(x, None, "gelu")
        alone = torch.cat([packed(row.unsqueeze(0)) for row in x])
    span = x.amax(1, keepdim=True).clamp(min=0) - x.amin(1, keepdim=True).clamp(max=0)
    of_weights = weight.abs().amax(1) / 127
    sums = (x * (255 / span)).round() @ (weight / of_weights.unsqueeze(1)).round().T
    torch.testing.assert_close(found, sums * (span / 255) * of_weights + bias, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(curved, F.gelu(found), atol=1e-5, rtol=1e-5)
    assert torch.equal(found, alone)
    exact = F.linear(x, weight, bias)
    assert float((found - exact).norm() / exact.norm()) < 0.02
