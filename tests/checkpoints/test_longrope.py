"""LongRoPE's factors: one set for all texts, chosen by the longest text that is served, told, and the operator's to choose."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.predict.encoder.tiny_encoders import VOCABULARY, write_encoder, write_tokenizer

from inferd.checkpoints.architecture import read_config
from inferd.checkpoints.decoder_config import Source
from inferd.checkpoints.longrope import Asked, factors_of, factors_text, with_factors
from inferd.cli.check import examine
from inferd.config import KVCacheConfig, ModelConfig
from inferd.engine.load import _fingerprint, create_backend
from inferd.engine.model.load import load_model
from inferd.errors import ModelLoadError
from inferd.planning.memory import plan_model
from inferd.predict.load import create_backend as create_predictive
from inferd.registry.source import silent

ORIGINAL, LONGEST = 32, 128  # tokens
FACTORS = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.5 + 2.0 * i for i in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}


@pytest.fixture
def checkpoint(tmp_path: Path, families: ModuleType) -> tuple[Path, Any]:
    """A model that was made for longer texts than its short factors, and transformers' own of it."""
    lengths = {"original_max_position_embeddings": ORIGINAL, "max_position_embeddings": LONGEST}
    settings = {"hidden_size": 64, "vocab_size": len(VOCABULARY), "rope_parameters": FACTORS, **lengths}
    families.FAMILIES["longrope"] = ("Phi3Config", "Phi3ForCausalLM", settings)
    try:
        return tmp_path, families.write_checkpoint("longrope", tmp_path)
    finally:
        del families.FAMILIES["longrope"]


def error(folder: Path, model: Any, families: ModuleType, length: int, **settings: Any) -> float:
    """The largest difference of a text's logits to transformers'."""
    text = [3 + place * 7 % 80 for place in range(length)]
    driver = families.Driver(load_model(folder, dtype="float32", device=torch.device("cpu"), **settings))
    got = driver.logits([(text, 0, driver.table(length))])[0]
    return float((got - families.expected(model, text)).abs().max())


def test_texts_within_the_trained_length_are_read_as_transformers_reads_them_by_the_short_factors(
    checkpoint: tuple[Path, Any], families: ModuleType
) -> None:
    folder, model = checkpoint
    assert error(folder, model, families, ORIGINAL, rope_factors="short") < 1e-4
    assert error(folder, model, families, ORIGINAL, num_positions=ORIGINAL) < 1e-4
    assert error(folder, model, families, ORIGINAL) > 0.01, "the long factors are other ones"


def test_longer_texts_are_read_as_transformers_reads_them_by_the_long_factors(
    checkpoint: tuple[Path, Any], families: ModuleType
) -> None:
    folder, model = checkpoint
    assert error(folder, model, families, ORIGINAL + 9) < 1e-4
    assert error(folder, model, families, ORIGINAL + 9, num_positions=ORIGINAL + 9) < 1e-4


@pytest.mark.parametrize(
    ("asked", "served", "factors", "longest"),
    [
        ("auto", None, "long", LONGEST),
        ("auto", ORIGINAL + 1, "long", LONGEST),
        ("auto", ORIGINAL, "short", LONGEST),
        ("short", None, "short", ORIGINAL),
        ("short", ORIGINAL, "short", ORIGINAL),
        ("long", ORIGINAL, "long", LONGEST),
    ],
)
def test_the_longest_text_that_is_served_decides_unless_the_operator_does(
    checkpoint: tuple[Path, Any], asked: Asked, served: int | None, factors: str, longest: int
) -> None:
    folder, _ = checkpoint
    config = with_factors(read_config(Source(folder / "config.json")), asked, served)
    assert factors_of(config) == factors
    assert config.max_position_embeddings == longest
    assert len({id(rope) for rope in config.ropes}) == 1, "layers share their table"
    told = factors_text(config)
    assert f"{factors} factors" in told if (factors, longest) != ("short", ORIGINAL) else told == ""


def test_answers_by_other_factors_have_another_fingerprint(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    asked: tuple[Asked, ...] = ("auto", "long", "short")
    decoders = [load_model(folder, dtype="float32", device=torch.device("cpu"), rope_factors=one) for one in asked]
    plain = ModelConfig(source="m")
    auto, long, short = (_fingerprint(b"", decoder, "reference", plain, None) for decoder in decoders)
    assert auto == long != short


def test_short_factors_for_long_texts_and_a_choice_where_there_is_none_are_refused(
    checkpoint: tuple[Path, Any], tmp_path: Path, families: ModuleType
) -> None:
    folder, _ = checkpoint
    config = read_config(Source(folder / "config.json"))
    with pytest.raises(ModelLoadError, match="for texts of up to 32 tokens, but max_model_len is 33"):
        with_factors(config, "short", ORIGINAL + 1)
    families.write_checkpoint("llama3-tied", tmp_path / "other")
    with pytest.raises(ModelLoadError, match="has no LongRoPE factors"):
        with_factors(read_config(Source(tmp_path / "other" / "config.json")), "long", None)


def test_the_check_tells_which_factors_are_used_and_how_long_texts_may_be(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    plan = examine(str(folder), probe=False).plan
    assert plan is not None
    assert "long factors are used for texts of every length" in plan.models[0].rope_factors
    short = plan_model("m", ModelConfig(source=str(folder), rope_factors="short"))
    assert short is not None
    assert (short.max_model_len, short.rope_factors) == (ORIGINAL, "")


TOLD = "LongRoPE's long factors are used for texts of every length"


def test_the_factors_are_told_when_a_model_is_loaded(
    checkpoint: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = checkpoint
    write_tokenizer(folder)
    config = ModelConfig(source=str(folder), dtype="float32", device="cpu", kv_cache=KVCacheConfig(num_blocks=16))
    with caplog.at_level(logging.INFO):
        create_backend("m", config, silent)
    assert TOLD in caplog.text


def test_the_factors_of_a_text_encoder_are_told_at_load_and_by_the_check(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = {"original_max_position_embeddings": ORIGINAL, "max_position_embeddings": LONGEST}
    write_encoder(tmp_path, "Phi3Model", hidden_size=32, rope_parameters=FACTORS, **lengths)
    config = ModelConfig(source=str(tmp_path), task="embed", device="cpu", threads=1)
    with caplog.at_level(logging.INFO):
        create_predictive("m", config, silent)
    assert TOLD in caplog.text
    plan = plan_model("m", config)
    assert plan is not None
    assert TOLD in plan.rope_factors
