"""A folder becomes a decoder, or an error that says what is wrong with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferd.checkpoints.architecture import has_fast_bfloat16, supported_architectures
from inferd.engine.model.load import load_model
from inferd.errors import ModelLoadError
from inferd.native import forms

CPU = torch.device("cpu")
TEXT = [5, 80, 3, 44, 17, 9, 61, 30]


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def logits(families: ModuleType, folder: Path) -> torch.Tensor:
    driver = families.Driver(load_model(folder, dtype="float32", device=CPU))
    found: torch.Tensor = driver.logits([(TEXT, 0, driver.table(len(TEXT)))])[0]
    return found


def test_an_unsupported_architecture_is_told_the_supported_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    with pytest.raises(ModelLoadError, match="BertForMaskedLM") as caught:
        load_model(tmp_path, dtype="auto", device=CPU)
    assert all(name in caught.value.message for name in supported_architectures())


@pytest.mark.parametrize("value", ["LlamaForCausalLM2", 3, None, [], [[]], {"a": 1}])
def test_architectures_of_any_type_are_refused_politely(value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": value}))
    with pytest.raises(ModelLoadError, match="architecture"):
        load_model(tmp_path, dtype="auto", device=CPU)


def test_a_quantisation_that_is_not_read_is_refused_before_weights_are(tmp_path: Path, families: ModuleType) -> None:
    families.write_checkpoint("llama2-mha", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    edit_config(tmp_path, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(ModelLoadError, match="quantised by bitsandbytes, which is not read"):
        load_model(tmp_path, dtype="auto", device=CPU)


def test_code_in_the_folder_is_never_run(tmp_path: Path, families: ModuleType) -> None:
    families.write_checkpoint("llama2-mha", tmp_path)
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('ran')")
    edit_config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    load_model(tmp_path, dtype="float32", device=CPU)
    assert not [name for name in sys.modules if "evil" in name]


@pytest.mark.parametrize("name", ["llama3-tied", "qwen3-moe", "gpt2"])
def test_shards_and_a_single_file_are_the_same_model(name: str, tmp_path: Path, families: ModuleType) -> None:
    families.write_checkpoint(name, tmp_path / "whole")
    families.write_checkpoint(name, tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert torch.equal(logits(families, tmp_path / "whole"), logits(families, tmp_path / "shards"))


@pytest.mark.parametrize("name", ["llama2-mha", "llama3-tied", "gemma2", "mixtral", "gpt-neox", "gpt-neo"])
def test_parameters_are_counted_as_transformers_counts_them(name: str, tmp_path: Path, families: ModuleType) -> None:
    model = families.write_checkpoint(name, tmp_path)
    decoder = load_model(tmp_path, dtype="bfloat16", device=CPU)
    assert decoder.num_parameters == model.num_parameters()
    shapes = [(name, *weights.shape) for name, weights in model.named_parameters() if weights.dim() == 2]
    assert decoder.weights_bytes == 2 * (decoder.num_parameters + sum(forms.padding(*shape) for shape in shapes))


def test_gpt2_tensors_may_have_no_prefix(tmp_path: Path, families: ModuleType) -> None:
    """As in the first GPT-2 checkpoint, which also carries its masks."""
    families.write_checkpoint("gpt2", tmp_path)
    wanted = logits(families, tmp_path)
    path = tmp_path / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, path)
    assert torch.equal(logits(families, tmp_path), wanted)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_a_multimodal_gemma3_is_served(prefix: str, tmp_path: Path, families: ModuleType) -> None:
    families.write_checkpoint("gemma3", tmp_path)
    wanted = logits(families, tmp_path)
    path = tmp_path / "model.safetensors"
    text = {prefix + name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    save_file({**text, "vision_tower.a.weight": torch.ones(2), "multi_modal_projector.b": torch.ones(2)}, path)
    inner = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner})
    )
    assert torch.equal(logits(families, tmp_path), wanted)


def test_a_missing_a_mis_shaped_and_an_unknown_tensor_are_named(tmp_path: Path, families: ModuleType) -> None:
    families.write_checkpoint("llama2-mha", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, path)
    with pytest.raises(ModelLoadError, match=f"no tensor '{name}'"):
        load_model(tmp_path, dtype="float32", device=CPU)
    save_file({**tensors, name: torch.ones(80, 47)}, path)
    with pytest.raises(ModelLoadError, match=rf"{name}' has shape \[80, 47\], but config\.json asks for \[80, 48\]"):
        load_model(tmp_path, dtype="float32", device=CPU)
    save_file({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, path)
    with pytest.raises(ModelLoadError, match=r"q_norm\.weight"):
        load_model(tmp_path, dtype="float32", device=CPU)


def test_auto_takes_the_number_format_the_processor_is_fast_in(tmp_path: Path, families: ModuleType) -> None:
    families.write_checkpoint("llama2-mha", tmp_path)
    assert load_model(tmp_path, dtype="auto", device=CPU).dtype == torch.float32
    for stored in ("bfloat16", "float16"):
        edit_config(tmp_path, dtype=stored)
        wanted = torch.bfloat16 if has_fast_bfloat16() else torch.float32
        assert load_model(tmp_path, dtype="auto", device=CPU).dtype == wanted
    edit_config(tmp_path, dtype="int3")
    with pytest.raises(ModelLoadError, match="int3"):
        load_model(tmp_path, dtype="auto", device=CPU)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama2-mha", "qwen3", "gemma2", "qwen3-moe", "gpt-neox", "gpt2"])
def test_half_formats_stay_near_the_full_one(dtype: Any, name: str, tmp_path: Path, families: ModuleType) -> None:
    model = families.write_checkpoint(name, tmp_path)
    driver = families.Driver(load_model(tmp_path, dtype=dtype, device=CPU))
    got = driver.logits([(TEXT, 0, driver.table(len(TEXT)))])[0]
    want = families.expected(model, TEXT)
    assert got.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got, want).min() > 0.98


def test_progress_ends_at_the_total(tmp_path: Path, families: ModuleType) -> None:
    families.write_checkpoint("llama3-tied", tmp_path)
    told: list[tuple[str, int, int]] = []
    load_model(tmp_path, dtype="float32", device=CPU, progress=lambda *what: told.append(what))
    assert told[-1][1] == told[-1][2] > 0
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
