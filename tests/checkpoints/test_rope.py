"""The rotary tables are transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inferd.checkpoints.rope import Rope
from inferd.checkpoints.rope_tables import tables
from inferd.cli.check import examine
from inferd.errors import ModelLoadError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3-without-original": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-untruncated": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
    },
    "longrope": LONG,
    "longrope-factor": {**LONG, "factor": 6.0},
}
MAX_POSITIONS = 256


def wanted(options: dict[str, Any], num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    config_class = Phi3Config if options["rope_type"] == "longrope" else LlamaConfig
    settings: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": MAX_POSITIONS}
    if config_class is Phi3Config:
        settings["original_max_position_embeddings"] = options["original_max_position_embeddings"]
    config = config_class(rope_parameters={"rope_theta": 10000.0, **options}, **settings)
    frequencies, factor = ROPE_INIT_FUNCTIONS[options["rope_type"]](config, torch.device("cpu"), seq_len=num_positions)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    return angles.cos() * factor, angles.sin() * factor


def rope(options: dict[str, Any]) -> Rope:
    return Rope(
        dim=16,
        theta=10000.0,
        variant=options["rope_type"],
        options=options,
        max_position_embeddings=MAX_POSITIONS,
        original_max_position_embeddings=options.get("original_max_position_embeddings"),
    )


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("num_positions", [48, MAX_POSITIONS])
def test_tables_equal_transformers(name: str, num_positions: int) -> None:
    options = VARIANTS[name]
    for got, want in zip(
        tables(rope(options), num_positions, torch.device("cpu")), wanted(options, num_positions), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_longrope_takes_the_factors_of_the_served_length() -> None:
    short, _ = tables(rope(LONG), 64, torch.device("cpu"))
    long, _ = tables(rope(LONG), 65, torch.device("cpu"))
    assert not torch.allclose(short, long[:64])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": "four"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({**LONG, "short_factor": [1.0]}, "short_factor"),
        ({**LONG, "short_factor": ["1"] * 8}, "short_factor"),
        ({"rope_type": "spiral"}, "spiral"),
    ],
)
def test_a_bad_parameter_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelLoadError, match=field):
        tables(rope(options), 32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"rope_type": "spiral"}, "spiral"),
        ({"rope_type": "linear"}, "factor"),
        ({**LONG, "long_factor": [1.0]}, "long_factor"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor"),
    ],
)
def test_the_check_refuses_what_no_table_can_be_made_from(
    tmp_path: Path, families: ModuleType, options: dict[str, Any], field: str
) -> None:
    families.write_checkpoint("llama3-tied", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": {"rope_theta": 1e4, **options}}))
    report = examine(str(tmp_path), probe=False)
    assert not report.ok
    assert field in "\n".join(report.problems)


def test_parameters_that_define_no_table_make_none() -> None:
    with pytest.raises(ModelLoadError, match="rope_type is 'spiral'"):
        tables(Rope(dim=16, theta=1e4, variant="spiral"), 8, torch.device("cpu"))
