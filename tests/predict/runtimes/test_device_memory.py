"""A model's bound is its process's bound on a GPU, whichever of torch's runtimes computes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.predict.encoder.tiny_encoders import write_encoder
from tests.predict.runtimes.loading import loaded
from tests.predict.runtimes.programs import Scores, export

from inferd.config import ModelConfig
from inferd.predict.runtimes import encoder, libraries
from inferd.predict.runtimes import torch as programs
from inferd.registry.source import silent


@pytest.mark.parametrize(("memory_bytes", "share"), [(1 << 30, 0.25), (1 << 40, 1.0), (None, None)])
def test_the_bound_is_a_part_of_the_devices_memory(memory_bytes: int | None, share: float | None) -> None:
    told: list[float] = []
    cuda = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(total_memory=4 << 30),
        set_per_process_memory_fraction=lambda part, device: told.append(part),
    )
    for kind in ("cuda", "cpu"):
        libraries.bound_memory(SimpleNamespace(cuda=cuda), torch.device(kind), memory_bytes)
    assert told == ([] if share is None else [share])


@pytest.mark.parametrize("module", [encoder, programs])
def test_every_torch_runtime_asks_for_its_models_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object
) -> None:
    told: list[int | None] = []
    monkeypatch.setattr(module, "bound_memory", lambda torch, device, memory_bytes: told.append(memory_bytes))
    if module is encoder:
        folder = write_encoder(tmp_path / "encoder", "BertModel")
        encoder.load("m", folder, ModelConfig(source=str(folder), memory_bytes=1 << 30), silent)
    else:
        loaded(export(Scores(), tmp_path / "m.pt2", torch.randn(2, 4)), memory_bytes=1 << 30)
    assert told == [1 << 30]
