"""Products with weights of 8 bits: rounding, Triton's kernel in the interpreter, and which product computes what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no package for this machine")

from inferd.native import compiled
from inferd.native.forms import Form
from inferd.native.triton import eight_bit, switch
from inferd.native.triton.eight_bit import (
    FLOAT8,
    EightBitLinear,
    outputs_at_once,
    plain_product,
    rounded_to,
    stacked,
    triton_product,
)

FORMS = [Form(8, 0, False), Form(8, 64, False), Form(8, 0, False, is_float=True)]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# Shrinking takes minutes in the interpreter. The same cases every time: how far two ways of rounding may differ is no law.
QUICK = settings(max_examples=8, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("form", "most"), zip(FORMS, [0.008, 0.008, 0.04], strict=True), ids=lambda f: getattr(f, "name", "")
)
def test_rounding_loses_as_much_as_eight_bits_lose(form: Form, most: float) -> None:
    weight = noise(24, 100)
    made = rounded_to(form, weight)
    assert (made.dense() - weight).norm() / weight.norm() < most
    assert made.values.itemsize == 1
    held = made.values.nbytes + made.scale.nbytes
    assert held <= form.nbytes(24, 100)  # the planner's figure


@given(
    form=st.sampled_from(FORMS),
    dtype=st.sampled_from(list(TOLERANCE)),
    rows=st.sampled_from([1, 5, 70]),
    out=st.sampled_from([7, 40]),
    size=st.sampled_from([30, 64, 200]),
    has_bias=st.booleans(),
)
@QUICK
def test_the_kernel_equals_its_plain_twin(
    form: Form, dtype: torch.dtype, rows: int, out: int, size: int, has_bias: bool
) -> None:
    weight, x = rounded_to(form, noise(out, size)), noise(rows, size, seed=1).to(dtype)
    bias = noise(out, seed=2).to(dtype) if has_bias else None
    with switch.on_cpu():
        found = triton_product(x, weight, bias, torch.float32)
    expected = plain_product(x, weight, bias)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * size**0.5 / 8)


def test_activations_in_eight_bits_cost_what_they_should() -> None:
    """The twin of the device's own products, which only a device has: rows are rounded by themselves."""
    weight = rounded_to(FORMS[2], noise(16, 256))
    x = noise(3, 256, seed=1) * torch.tensor([[1.0], [1000.0], [0.001]])
    exact, rounded = plain_product(x, weight, None), plain_product(x, weight, None, rounds=True)
    error = (rounded - exact).norm(dim=1) / exact.norm(dim=1)
    assert bool((error < 0.06).all())
    assert bool((error > 0.001).all())
    alone = plain_product(x[1:2], weight, None, rounds=True)
    torch.testing.assert_close(alone, rounded[1:2], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_a_linear_of_eight_bits_is_a_linear(form: Form) -> None:
    first, second = noise(10, 64), noise(6, 64, seed=3)
    weight = stacked([rounded_to(form, part) for part in (first, second)])
    bias = noise(16, seed=4)
    linear = EightBitLinear.of(weight, bias, torch.float32)
    x = noise(2, 3, 64, seed=5)
    dense = torch.cat([rounded_to(form, part).dense() for part in (first, second)])
    torch.testing.assert_close(linear(x), x @ dense.T + bias, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        linear(x, activation="gelu"), torch.nn.functional.gelu(x @ dense.T + bias), rtol=1e-4, atol=1e-4
    )
    ids = torch.tensor([[0, 15], [3, 3]])
    assert torch.equal(linear.rows(ids), dense[ids])
    assert linear.weight.shape == (16, 64)
    assert linear.described is None
    assert linear.nbytes == weight.values.nbytes + weight.scale.nbytes + bias.nbytes


def test_many_rows_of_floats_go_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has such products, and the widths are what they take."""
    asked: list[int] = []

    def device_product(x: Tensor, weight: eight_bit.EightBits, bias: Tensor | None) -> Tensor:
        asked.append(len(x))
        return plain_product(x, weight, bias, rounds=True)

    monkeypatch.setattr(eight_bit, "device_product", device_product)
    linears = [EightBitLinear.of(rounded_to(form, noise(16, 64)), None, torch.float32) for form in FORMS]
    odd = EightBitLinear.of(rounded_to(FORMS[2], noise(16, 40)), None, torch.float32)
    with compiled.using_level("none"):
        for has in (False, True):
            monkeypatch.setattr(eight_bit, "has_float8", lambda device, has=has: has)
            for linear in (*linears, odd):
                for rows in (1, 32, 33):
                    linear(noise(rows, linear.in_features))
    assert asked == [33]
    assert linears[2].weight.dtype == torch.float32
    assert rounded_to(FORMS[2], noise(4, 16)).values.dtype == FLOAT8


def test_tiles_follow_from_the_matrix() -> None:
    assert [outputs_at_once(out, 16, 132) for out in (1024, 4096, 14336, 152064)] == [16, 16, 32, 64]
    assert outputs_at_once(1024, 64, 132) == 128
