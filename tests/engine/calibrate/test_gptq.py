"""Grids and GPTQ: laws over random matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inferd.engine.calibrate.gptq import gptq
from inferd.engine.calibrate.rounding import Form, nearest
from inferd.native.quantized import QuantizedWeight


def numbers(weight: QuantizedWeight) -> Tensor:
    return weight.rows(torch.arange(weight.values.shape[0]))


def inputs(width: int, rows: int, seed: int) -> Tensor:
    """[rows, width] that are correlated, some much larger than others, as activations are."""
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, width, generator=draw) @ torch.randn(width, width, generator=draw)
    return mixed * torch.exp(torch.randn(width, generator=draw))


forms = st.builds(Form, bits=st.just(4), group_size=st.sampled_from([0, 8, 16]), symmetric=st.booleans())


@given(forms, st.integers(0, 10**6))
def test_integers_are_the_nearest_that_their_grid_has(form: Form, seed: int) -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))
    found = nearest(weight, form)
    assert int(found.values.min()) >= -8
    assert int(found.values.max()) <= 7
    assert (found.zero is None) == form.symmetric
    size = form.group_size or 32
    for row in range(6):
        for column in range(32):
            scale, group = float(found.scale[row, column // size]), column // size
            zero = 0 if found.zero is None else int(found.zero[row, group])
            distances = [abs(scale * (value - zero) - float(weight[row, column])) for value in range(-8, 8)]
            taken = abs(scale * (int(found.values[row, column]) - zero) - float(weight[row, column]))
            assert taken <= min(distances) + 1e-5


@given(forms, st.integers(0, 10**6))
def test_the_best_grid_loses_no_more_than_that_of_the_extremes(form: Form, seed: int) -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))
    size = form.group_size or 32
    parts = weight.view(6, -1, size)
    if form.symmetric:
        scale = torch.maximum(parts.amax(2) / 7, -parts.amin(2) / 8)
        plain = (parts / scale.unsqueeze(2)).round().clamp(-8, 7) * scale.unsqueeze(2)
    else:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scale = (high - low) / 15
        zero = (-8 - low / scale).round().clamp(-8, 7).unsqueeze(2)
        plain = ((parts / scale.unsqueeze(2) + zero).round().clamp(-8, 7) - zero) * scale.unsqueeze(2)
    lost = (numbers(nearest(weight, form)) - weight).square().view(6, -1, size).sum(2)
    assert bool((lost <= (plain - parts).square().sum(2) + 1e-6).all())


def test_eight_bits_of_a_row_are_as_fine_as_its_largest_weight_allows() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    found = nearest(weight, Form(8, 0))
    assert float((numbers(found) - weight).abs().max()) <= float(weight.abs().max()) / 127 / 2 * 1.001


@given(forms, st.booleans(), st.integers(0, 10**6))
def test_a_product_changes_less_than_by_rounding_to_the_nearest(form: Form, by_size: bool, seed: int) -> None:
    weight = torch.randn(12, 32, generator=torch.Generator().manual_seed(seed))
    x = inputs(32, 256, seed)
    exact = x @ weight.t()

    def lost(found: QuantizedWeight) -> float:
        return float((x @ numbers(found).t() - exact).square().sum())

    better = lost(gptq(weight, x.t() @ x, form, by_size=by_size))
    assert better < lost(nearest(weight, form))


@given(forms, st.integers(0, 10**6))
def test_inputs_that_are_unrelated_leave_nothing_to_make_up_for(form: Form, seed: int) -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))
    found, plain = gptq(weight, torch.eye(32), form, by_size=False), nearest(weight, form)
    assert torch.equal(found.values, plain.values)
    assert torch.allclose(found.scale, plain.scale)


@pytest.mark.parametrize("by_size", [False, True])
def test_inputs_never_seen_and_too_few_texts_are_survived(by_size: bool) -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    x = inputs(32, 3, 2)
    x[:, 5:9] = 0
    for moments in (x.t() @ x, torch.zeros(32, 32)):
        found = gptq(weight, moments, Form(4, 8), by_size=by_size)
        assert bool(torch.isfinite(found.scale).all())
        assert float((numbers(found) - weight).abs().max()) < 4


@given(st.sampled_from([torch.float16, torch.bfloat16]), st.booleans())
def test_scales_are_numbers_of_the_format_they_are_stored_in(dtype: torch.dtype, symmetric: bool) -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(3))
    for found in (
        nearest(weight, Form(4, 8, symmetric, dtype)),
        gptq(weight, torch.eye(32), Form(4, 8, symmetric, dtype)),
    ):
        assert torch.equal(found.scale.to(dtype).float(), found.scale)
