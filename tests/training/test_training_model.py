"""The trainer's own decoder computes what transformers' Llama does, and its loss falls."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.tiers import THOROUGH
from tokenizers import Tokenizer
from training.model import Llama, LlamaShape
from training.train import IGNORED, batches, learning_rate, loss_of
from transformers import LlamaForCausalLM

from inferd import models
from training import checkpoint

TINY = LlamaShape(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8
)


def test_a_saved_model_agrees_with_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    checkpoint.save(Llama(TINY), models.path("demo"), tmp_path)
    ours = checkpoint.load(tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, TINY.vocab_size, (2, 17))
    with torch.inference_mode():
        torch.testing.assert_close(ours.logits(ours.hidden(ids)), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_only_the_assistants_words_are_targets() -> None:
    tokenizer = Tokenizer.from_file(str(models.path("demo") / "tokenizer.json"))
    inputs, targets = next(batches(tokenizer, seed=1, batch_tokens=512))
    learnt = targets != IGNORED
    assert 0 < learnt.float().mean() < 0.9
    following = torch.roll(inputs, -1, dims=1)
    assert torch.equal(targets[learnt], following[learnt])


@THOROUGH
def test_the_loss_falls_in_a_few_steps() -> None:
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(models.path("demo") / "tokenizer.json"))
    inputs, targets = next(batches(tokenizer, seed=1, batch_tokens=512))
    model = Llama(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = loss_of(model, inputs, targets)
    loss = first
    for _ in range(15):
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss = loss_of(model, inputs, targets)
    assert loss < 0.8 * first


def test_the_learning_rate_rises_stays_and_falls() -> None:
    assert learning_rate(0.0) == 0.0
    assert learning_rate(0.5) == 1.0
    assert learning_rate(1.0) < 0.05
