"""Adapters as peft stores them, with random matrices; and the weights of a base into which one was merged."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    base: Path,
    *,
    seed: int = 0,
    rank: int = 8,
    targets: tuple[str, ...] = EVERY,
    layers: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    size: float = 0.3,
    **config: Any,
) -> Path:
    """A random adapter of the checkpoint in ``base``. ``layers``: those that it changes; None: all."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        match = re.fullmatch(r"(model\.layers\.(\d+)\.\S*?([a-z_]+_proj))\.weight", name)
        if match is None or match[3] not in targets or (layers is not None and int(match[2]) not in layers):
            continue
        outputs, inputs = weight.shape
        own = rank_of(settings, match[1])
        a, b = torch.randn(own, inputs, generator=random), torch.randn(outputs, own, generator=random)
        tensors[f"base_model.model.{match[1]}.lora_A.weight"] = (a * size / math.sqrt(inputs)).to(dtype)
        tensors[f"base_model.model.{match[1]}.lora_B.weight"] = (b * size / math.sqrt(own)).to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def rank_of(settings: dict[str, Any], path: str) -> int:
    for key, value in settings.get("rank_pattern", {}).items():
        if re.match(rf"(.*\.)?({key})$", path):
            return int(value)
    return int(settings["r"])


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    """The checkpoint with W + scale * B A in the place of W, computed in float64."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    weights, matrices = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in matrices.items():
        if ".lora_A." not in name:
            continue
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b, rank = matrices[name.replace("lora_A", "lora_B")], a.shape[0]
        alpha = settings["lora_alpha"]
        for key, value in settings.get("alpha_pattern", {}).items():
            if re.match(rf"(.*\.)?({key})$", path):
                alpha = value
        scale = alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank
        weight = weights[f"{path}.weight"]
        weights[f"{path}.weight"] = (weight.double() + scale * (b.double() @ a.double())).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
