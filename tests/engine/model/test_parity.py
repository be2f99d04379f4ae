"""Every family computes what transformers computes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

NAMES = [
    "llama2-mha",
    "llama3-tied",
    "llama-biases",
    "llama-linear",
    "llama-dynamic",
    "llama-yarn",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3-yarn",
    "qwen3-moe",
    "mixtral",
    "gemma2",
    "gemma3",
    "gemma3-linear-rope",
    "phi3",
    "phi4-partial",
    "phi3-longrope",
    "smollm3",
    "smollm3-window",
    "olmo2",
    "granite",
    "gpt2",
    "gpt2-unscaled",
    "gpt-neox",
    "pythia-sequential",
    "gpt-neo",
]


def test_every_family_of_the_table_is_checked(families: ModuleType) -> None:
    assert sorted(NAMES) == sorted(families.FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str, tmp_path: Path, families: ModuleType) -> None:
    errors = families.largest_error(name, tmp_path)
    assert max(errors.values()) < 1e-4, errors
