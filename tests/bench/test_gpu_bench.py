"""The GPU's benchmark tried on the CPU, with tiny shapes, in Triton's interpreter: it must not fail for the first time where a
GPU is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this machine")

from bench.gpu import answers, decode, kernels
from bench.gpu.result import Result
from bench.gpu.shapes import TINY, random_decoder
from tests.engine.cuda.fake_device import FakeDevice
from tests.tiers import THOROUGH

from inferd.native import compiled
from inferd.native.triton import switch

CPU = torch.device("cpu")
ONE_LAYER = {**TINY, "num_hidden_layers": 1}


@pytest.fixture
def _on_cpu() -> Iterator[None]:
    with switch.on_cpu(), compiled.using_level("none"):
        yield


@THOROUGH
@pytest.mark.usefixtures("_on_cpu")
def test_products_and_rows_are_checked() -> None:
    found = [*kernels.product_errors(CPU)]
    assert found
    assert all(result.passed for result in found)


@pytest.mark.usefixtures("_on_cpu")
def test_attention_is_checked_and_timed() -> None:
    errors = kernels.attention_errors(CPU, scale_down=100)
    assert next(errors).passed
    speeds = kernels.attention_speed(CPU, 1e9, scale_down=1000)
    assert next(speeds).value > 0


def test_a_wrong_kernel_fails() -> None:
    assert kernels.error("x", torch.ones(2), torch.zeros(2), 0.5).passed is False
    assert "FAILED" in kernels.error("x", torch.ones(2), torch.zeros(2), 0.5).line


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_one_sequence_is_decoded(quantization: str) -> None:
    device = FakeDevice()
    found = decode.one_sequence(ONE_LAYER, device, 1e9, quantization=quantization, context=3, tokens=2)
    assert found.value > 0
    assert device.replayed == [1] * 6  # all but the chunk, whose last row gives the first token
    assert decode.bandwidth(CPU, 1 << 20) > 0


@THOROUGH  # that it decodes at all: test_one_sequence_is_decoded
@pytest.mark.usefixtures("_on_cpu")
def test_graphs_decode_what_single_launches_decode() -> None:
    """In the interpreter; of many at once only that it runs."""
    with_graphs, without = (decode.tokens_of(ONE_LAYER, FakeDevice(), "none", graphs, 2) for graphs in (True, False))
    assert with_graphs == without
    assert [len(tokens) for tokens in without] == [7, 14, 21]
    assert decode.many_sequences(ONE_LAYER, FakeDevice(), count=1, prompt=2, tokens=2, graphs=False) > 0


def test_random_models_have_the_bytes_of_their_shape() -> None:
    plain, small = (random_decoder(TINY, torch.bfloat16, CPU, form) for form in ("none", "int8"))
    assert plain.weights_bytes == 2 * plain.num_parameters
    assert small.weights_bytes < 0.7 * plain.weights_bytes


def test_answers_of_two_devices_are_compared(tiny_model: object) -> None:
    found: list[Result] = list(answers.measure(CPU, source=str(tiny_model), tokens=4))
    assert [result.passed for result in found] == [True] * len(found)
