"""Models whose weights are made integers when they load: what they compute, what they take, and the next time."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.checkpoints.weight_cache import folder
from inferd.config import ModelConfig
from inferd.engine.model import products
from inferd.engine.model.load import Decoder, load_model, open_weight_cache
from inferd.native import compiled
from inferd.planning.memory import plan_model

WIDE = {"hidden_size": 512, "intermediate_size": 640, "num_hidden_layers": 1, "head_dim": 64, "vocab_size": 97}
TEXT = [5, 17, 88, 3, 41, 9]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder()


def logits(families: ModuleType, decoder: Decoder) -> Tensor:
    driver = families.Driver(decoder)
    found: Tensor = driver.logits([(TEXT, 0, driver.table(len(TEXT)))])[0]
    return found


def load(at: Path, quantization: Any, *, kept_bytes: int = 0) -> Decoder:
    kept = open_weight_cache(at, quantization, kept_bytes)
    decoder = load_model(at, dtype="float32", device=torch.device("cpu"), quantization=quantization, weight_cache=kept)
    if kept is not None:
        kept.finish()
        kept.join()
    return decoder


@pytest.mark.parametrize(
    "name", ["llama2-mha", "llama3-tied", "qwen3", "gemma2", "phi3", "qwen3-moe", "gpt2", "gpt-neo", "gpt-neox"]
)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_every_family_is_quantised_and_takes_what_was_planned(
    families: ModuleType, tmp_path: Path, name: str, quantization: str
) -> None:
    families.write_checkpoint(name, tmp_path)
    exact, quantised = load(tmp_path, "none"), load(tmp_path, quantization)
    assert quantised.quantization == "int8/64"  # in narrow models, whatever was asked for
    expected = logits(families, exact)
    assert (
        float((logits(families, quantised) - expected).norm() / expected.norm()) < 0.25
    )  # of what is not to be told from noise, 1.4
    assert quantised.weights_bytes < exact.weights_bytes
    assert quantised.num_parameters == exact.num_parameters
    plan = plan_model("m", ModelConfig(source=str(tmp_path), dtype="float32", quantization=quantization))  # type: ignore[arg-type]
    assert plan is not None
    assert plan.weights_bytes == quantised.weights_bytes


@pytest.mark.parametrize("level", ["none", *compiled.levels()[:1]])
@pytest.mark.parametrize(("quantization", "forms", "lost"), [("int8", "int8", 0.1), ("int4", "int4/64+int8", 0.3)])
def test_wide_models_take_what_is_asked_for(
    families: ModuleType,
    tmp_path: Path,
    level: str,
    quantization: str,
    forms: str,
    lost: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = ("Qwen3Config", "Qwen3ForCausalLM", {**WIDE, "tie_word_embeddings": True})
    monkeypatch.setitem(families.FAMILIES, "wide", wide)
    families.write_checkpoint("wide", tmp_path)
    with compiled.using_level(level):
        exact, quantised = load(tmp_path, "none"), load(tmp_path, quantization)
        expected, found = logits(families, exact), logits(families, quantised)
    assert quantised.quantization == forms
    assert 0 < float((found - expected).norm() / expected.norm()) < lost
    plan = plan_model("m", ModelConfig(source=str(tmp_path), dtype="float32", quantization=quantization))  # type: ignore[arg-type]
    assert plan is not None
    assert plan.weights_bytes == quantised.weights_bytes


@pytest.mark.skipif(not compiled.BUILT, reason="inferd was installed without its compiled kernels")
@pytest.mark.parametrize("name", ["llama3-tied", "gpt2"])
def test_the_next_load_takes_the_integers_from_disk(
    families: ModuleType, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    families.write_checkpoint(name, tmp_path)
    first = logits(families, load(tmp_path, "int8", kept_bytes=1 << 30))
    assert len(list(own_cache.iterdir())) == 1

    def rounds_no_more(*_: object) -> None:
        raise AssertionError("weights were quantised again")

    with monkeypatch.context() as patched:
        patched.setattr(products, "rounded_weight", rounds_no_more)
        assert torch.equal(logits(families, load(tmp_path, "int8", kept_bytes=1 << 30)), first)
        families.write_checkpoint("qwen3", tmp_path / "other")
        with pytest.raises(AssertionError, match="again"):  # another checkpoint is another file
            load(tmp_path / "other", "int8", kept_bytes=1 << 30)
    kept_file = next(own_cache.iterdir())
    content = bytearray(kept_file.read_bytes())
    content[-5] ^= 64
    kept_file.write_bytes(content)
    assert torch.equal(logits(families, load(tmp_path, "int8", kept_bytes=1 << 30)), first)
    assert kept_file.read_bytes() != bytes(content)


def test_without_room_on_disk_nothing_is_kept(families: ModuleType, tmp_path: Path, own_cache: Path) -> None:
    families.write_checkpoint("llama3-tied", tmp_path)
    load(tmp_path, "int8")
    assert not own_cache.exists()
