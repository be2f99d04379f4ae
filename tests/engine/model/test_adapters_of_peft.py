"""Adapters that peft made and saved: its own logits, unmerged and merged. Runs where peft is installed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from inferd.checkpoints.adapter import read_adapter
from inferd.engine.adapters import load_adapter
from inferd.engine.model.load import load_model
from inferd.native.low_rank import AdapterRows

CPU = torch.device("cpu")
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}),
    ("qwen3", {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}),
    (
        "gemma3",
        {
            "r": 12,
            "target_modules": r".*self_attn\.(q|k)_proj",
            "rank_pattern": {"layers.1.self_attn.q_proj": 5},
            "alpha_pattern": {"k_proj": 3},
        },
    ),
    ("phi4-partial", {"r": 8, "target_modules": "all-linear"}),
    ("olmo2", {"r": 64, "target_modules": ["up_proj", "down_proj"], "layers_to_transform": [1]}),
    (
        "llama-biases",
        {"r": 128, "target_modules": ["o_proj", "gate_proj"], "exclude_modules": ["layers.0.self_attn.o_proj"]},
    ),
]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "config"), CASES, ids=[f"{name}-{config['r']}" for name, config in CASES])
def test_an_adapter_of_peft_gives_its_logits(
    name: str, config: dict[str, Any], tmp_path: Path, families: ModuleType
) -> None:
    peft: Any = pytest.importorskip("peft")
    base = families.write_checkpoint(name, tmp_path / "base")
    torch.manual_seed(3)
    wanted = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
    adapted = peft.get_peft_model(base, wanted).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    text = [(31 * i + 5) % 90 + 3 for i in range(23)]
    unmerged = families.expected(adapted, text)
    merged = families.expected(adapted.merge_and_unload(), text)
    decoder = load_model(tmp_path / "base", dtype="float32", device=CPU)
    adapter = load_adapter("a", read_adapter(tmp_path / "adapter", decoder.config), decoder, CPU, b"a")
    driver, plain = families.Driver(decoder), decoder.forward

    def forward(batch: Any, attention: Any, entering: None = None) -> torch.Tensor:
        batch.adapters = AdapterRows([adapter], torch.zeros(len(batch.token_ids), dtype=torch.int32))
        return plain(batch, attention)

    decoder.forward = forward  # type: ignore[assignment, method-assign]
    found = driver.logits([(text, 0, driver.table(len(text)))])[0]
    assert (found - unmerged).abs().max() < 1e-3
    assert (found - merged).abs().max() < 1e-3
