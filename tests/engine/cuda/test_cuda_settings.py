"""Settings that only one kind of device computes are refused on the other, with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.families import write_checkpoint

from inferd.config import ModelConfig
from inferd.engine.load import create_backend
from inferd.engine.model.load import load_model
from inferd.errors import ModelLoadError
from inferd.native.triton import switch


def test_fp8_is_refused_on_a_processor(tiny_model: Path) -> None:
    config = ModelConfig(source=str(tiny_model), device="cpu", quantization="fp8")
    with pytest.raises(ModelLoadError, match="'fp8', which is computed on CUDA only, but the device is cpu"):
        create_backend("tiny", config, lambda *_: None)


@pytest.mark.parametrize(
    ("asked", "capability", "problem"),
    [
        ("int4", (9, 0), "CPU only, but the device is cuda:0. Set device to cpu, or take int8 or fp8"),
        ("fp8", (8, 0), "needs compute capability 8.9 or higher, but cuda:0 has 8.0. Take int8"),
    ],
)
def test_what_a_gpu_does_not_compute_is_refused(
    asked: str, capability: tuple[int, int], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a weight is read."""
    write_checkpoint("qwen3", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ModelLoadError, match=problem) as caught:
        load_model(tmp_path, dtype="bfloat16", device=torch.device("cuda", 0), quantization=asked)  # type: ignore[arg-type]
    assert caught.value.param == "quantization"


def test_tritons_attention_is_refused_on_a_processor(tiny_model: Path) -> None:
    config = ModelConfig(source=str(tiny_model), device="cpu", attention="triton")
    with pytest.raises(ModelLoadError, match="'triton', which computes on cuda only, but the device is cpu"):
        create_backend("tiny", config, lambda *_: None)


def test_the_cpu_never_asks_triton_by_itself() -> None:
    assert not switch.takes(torch.zeros(2))
    assert not switch.is_interpreted()
