"""The same on a CUDA device: compiled kernels, recorded graphs, its memory. `make gpu-check` runs these."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this machine")

from bench.gpu import answers, decode, kernels
from bench.gpu.shapes import TINY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA device here"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="Triton was told to interpret; use make gpu-check"
    ),
]


@pytest.mark.parametrize("part", [kernels.attention_errors, kernels.row_errors, kernels.product_errors])
def test_kernels_equal_their_plain_twins_on_the_cpu(part: kernels.Errors) -> None:
    with torch.inference_mode():
        wrong = [result.line for result in part(torch.device("cuda", 0)) if not result.passed]
    assert not wrong, "\n".join(wrong)


def test_the_bundled_model_answers_as_on_the_cpu() -> None:
    wrong = [result.line for result in answers.measure(torch.device("cuda", 0)) if result.passed is False]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("quantization", ["none", "int8", "fp8"])
def test_graphs_decode_what_single_launches_decode(quantization: str) -> None:
    from inferd.engine.cuda.device import CudaDevice

    device = CudaDevice(torch.device("cuda", 0))
    assert len({decode.tokens_of(TINY, device, quantization, graphs) for graphs in (True, False)}) == 1
