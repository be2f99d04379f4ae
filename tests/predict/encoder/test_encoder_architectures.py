"""One list of architectures: what it names is loaded, what it does not name is refused by the check as by the loader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tests.predict.encoder.tiny_encoders import write_encoder

from inferd.cli.check import examine
from inferd.errors import ModelLoadError
from inferd.predict.encoder.config import Kind, supported_architectures
from inferd.predict.encoder.load import load_text_model


@pytest.mark.parametrize("kind", supported_architectures(), ids=lambda kind: kind.architecture)
def test_what_is_listed_is_loaded_and_good(tmp_path: Path, kind: Kind) -> None:
    labels = 3 if kind.head != "none" else 0
    write_encoder(tmp_path, kind.architecture, labels=labels)
    model = load_text_model(tmp_path, task="auto" if labels else "embed", device=torch.device("cpu"))
    assert model.task == {"none": "embed", "sequence": "classify", "token": "token_classify"}[kind.head]
    assert model.size == (labels or 32)
    if kind.family != "decoder" or labels:
        assert examine(str(tmp_path), probe=False).problems == ()


@pytest.mark.parametrize(
    "architecture",
    [
        "DebertaV2ForSequenceClassification",
        "DebertaV2Model",
        "ElectraModel",
        "ElectraForSequenceClassification",
        "AlbertModel",
        "AlbertForMaskedLM",
        "LlamaForTokenClassification",
    ],
)
def test_what_is_not_listed_is_refused_by_the_check_in_the_loaders_words(tmp_path: Path, architecture: str) -> None:
    family = architecture.partition("For")[0].removesuffix("Model")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{family}Config")(vocab_size=99, **sizes)
    getattr(transformers, architecture)(config).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError) as refused:
        load_text_model(tmp_path, device=torch.device("cpu"))
    assert f"the architecture ({architecture}) is no text encoder that inferd knows" in refused.value.message
    report = examine(str(tmp_path), probe=False)
    assert not report.ok
    assert refused.value.message in "\n".join(report.problems)


def test_a_task_that_the_checkpoint_was_not_made_for_is_refused_by_the_check(tmp_path: Path) -> None:
    write_encoder(tmp_path / "e", "BertModel")
    file = tmp_path / "inferd.yaml"
    file.write_text(f"models: {{e: {{source: {tmp_path / 'e'}, task: rerank}}}}")
    assert "cannot rerank" in "\n".join(examine(str(file), probe=False).problems)


def test_options_that_there_are_not_are_refused_by_the_check(tmp_path: Path) -> None:
    write_encoder(tmp_path / "e", "BertModel")
    file = tmp_path / "inferd.yaml"
    file.write_text(f"models: {{e: {{source: {tmp_path / 'e'}, options: {{pool: cls}}}}}}")
    assert "options of a text encoder" in "\n".join(examine(str(file), probe=False).problems)
