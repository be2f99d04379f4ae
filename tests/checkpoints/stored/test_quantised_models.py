"""Whole checkpoints in every format: they are loaded, compute what their numbers mean, and take the memory that was planned."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints.stored import slow_formats as slow
from tests.conftest import write_tiny_model
from torch import Tensor

from inferd.config import ModelConfig
from inferd.engine.model.load import Decoder, load_model
from inferd.engine.perplexity import losses, measuring, windows
from inferd.errors import ModelLoadError
from inferd.planning.memory import plan_model

PROJECTIONS = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")


def _grid(weight: Tensor, bits: int, groups: int, *, symmetric: bool, shuffle: int | None) -> slow.Grid:
    """To the nearest, in plain steps."""
    out, inputs = weight.shape
    group_of = [i * groups // inputs for i in range(inputs)]
    if shuffle is not None:
        draw = torch.Generator().manual_seed(shuffle)
        group_of = [group_of[i] for i in torch.randperm(inputs, generator=draw).tolist()]
    top = (1 << bits) - 1
    scale, zero = torch.empty(out, groups), torch.empty(out, groups, dtype=torch.long)
    for g in range(groups):
        mine = weight[:, [i for i in range(inputs) if group_of[i] == g]]
        if symmetric:
            scale[:, g], zero[:, g] = mine.abs().amax(1) * 2 / top, (top + 1) // 2
        else:
            low, high = mine.amin(1).clamp(max=0), mine.amax(1).clamp(min=0)
            scale[:, g] = (high - low) / top
            zero[:, g] = (-low / scale[:, g]).round()
    scale = scale.half().float()
    at = torch.tensor(group_of)
    value = (weight / scale[:, at] + zero[:, at]).round().clamp(0, top).long()
    return slow.Grid(value.tolist(), zero.tolist(), scale, group_of, bits)


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _gptq(bits: int, *, version: int = 1, shuffle: bool = False) -> Any:
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 16,
        "desc_act": shuffle,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        grid = _grid(weight, bits, weight.shape[1] // 16, symmetric=False, shuffle=7 if shuffle else None)
        return slow.gptq(grid, version=version), grid.weight()

    return config, write


def _awq() -> Any:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        grid = _grid(weight, 4, weight.shape[1] // 16, symmetric=False, shuffle=None)
        return slow.awq(grid), grid.weight()

    return {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, write


def _packed(symmetric: bool) -> Any:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        grid = _grid(weight, 4, weight.shape[1] // 16, symmetric=symmetric, shuffle=None)
        return slow.packed(grid, symmetric=symmetric), grid.weight()

    return _compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=symmetric), write


def _int8() -> Any:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 127
        values = (weight / scale).round().to(torch.int8)
        return {"weight": values, "weight_scale": scale}, values.float() * scale

    return _compressed("int-quantized", num_bits=8, strategy="channel"), write


def _fp8(block: list[int] | None) -> Any:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = block or weight.shape
        grid = [-(-n // size) for n, size in zip(weight.shape, (rows, columns), strict=True)]
        scale = torch.full(grid, float(weight.abs().max()) / 448)
        stored = (weight / scale[0, 0]).to(torch.float8_e4m3fn)
        parts = {"weight": stored, "weight_scale_inv" if block else "weight_scale": scale if block else scale[0]}
        return parts, stored.float() * scale[0, 0]

    return {"quant_method": "fp8", **({"weight_block_size": block} if block else {})}, write


FORMS = {
    "gptq-4": _gptq(4),
    "gptq-8": _gptq(8),
    "gptq-v2": _gptq(4, version=2),
    "gptq-act-order": _gptq(4, shuffle=True),
    "awq": _awq(),
    "packed": _packed(True),
    "packed-zeros": _packed(False),
    "int8": _int8(),
    "fp8-blocks": _fp8([20, 24]),
    "fp8": _fp8(None),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain"), seed=5)


@pytest.fixture(scope="module", params=list(FORMS))
def pair(request: pytest.FixtureRequest, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in a format, and one with the same weights as plain numbers."""
    config, write = FORMS[request.param]
    quantised = tmp_path_factory.mktemp(request.param)
    numbers = tmp_path_factory.mktemp(request.param + "-numbers")
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if PROJECTIONS.fullmatch(name):
            parts, meant[name] = write(tensor)
            stored |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
        else:
            stored[name] = meant[name] = tensor
    for folder, tensors in ((quantised, stored), (numbers, meant)):
        save_file(tensors, folder / "model.safetensors")
        for path in plain.glob("*.json"):
            (folder / path.name).write_bytes(path.read_bytes())
    whole = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**whole, "quantization_config": config}))
    return quantised, numbers


def _losses(decoder: Decoder) -> Tensor:
    ids = torch.randint(3, 250, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    return losses(measuring(decoder), windows(ids, context=50))


def _load(folder: Path, **options: Any) -> Decoder:
    return load_model(folder, dtype="float32", device=torch.device("cpu"), **options)


def test_numbers_made_of_a_checkpoint_compute_what_it_means(pair: tuple[Path, Path]) -> None:
    quantised, numbers = pair
    torch.testing.assert_close(
        _losses(_load(quantised, quantization="none")), _losses(_load(numbers)), rtol=2e-4, atol=2e-4
    )


def test_integers_of_a_checkpoint_differ_by_their_activations_rounding_alone(pair: tuple[Path, Path]) -> None:
    quantised, numbers = pair
    found, exact = _losses(_load(quantised)), _losses(_load(numbers))
    # Losses are about 8 here; one zero point, scale or column at a wrong place makes the difference larger than 1.
    assert float((found - exact).abs().mean()) < 0.15


def test_the_planner_counts_what_the_loader_takes(pair: tuple[Path, Path]) -> None:
    quantised, numbers = pair
    decoder = _load(quantised)
    planned = plan_model("m", ModelConfig(source=str(quantised), dtype="float32"))
    assert planned is not None
    assert planned.weights_bytes == decoder.weights_bytes
    assert decoder.num_parameters == _load(numbers).num_parameters


def test_a_quantised_gpt2_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "n_head": 2, "n_layer": 1, "n_embd": 8, "vocab_size": 9}
    config |= {"n_positions": 8, "quantization_config": FORMS["gptq-4"][0], "activation_function": "gelu_new"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="quantised GPT-2 checkpoints"):
        _load(tmp_path)
