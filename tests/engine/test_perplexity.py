"""Perplexity against transformers' logits, and the laws of its windows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import sample

from inferd import models
from inferd.checkpoints.text.tokenizer import Tokenizer
from inferd.engine.model.load import load_model
from inferd.engine.perplexity import measuring, perplexity, windows
from inferd.errors import InvalidRequest


@given(st.data())
def test_every_token_is_scored_once_after_what_stands_before_it(data: st.DataObject) -> None:
    ids = list(range(100, 100 + data.draw(st.integers(2, 60))))
    leading = [1] * data.draw(st.integers(0, 2))
    context = data.draw(st.integers(len(leading) + 2, 40))
    stride = data.draw(st.none() | st.integers(1, context - len(leading)))
    cut = windows(ids, context=context, stride=stride, leading=leading)
    fresh = context - len(leading)
    step = fresh if stride is None else stride
    scored: list[tuple[int, ...]] = []
    for window in cut:
        at = len(window.ids) - window.num_scored
        scored += [window.ids[: at + i + 1] for i in range(window.num_scored)]
    expected = []
    for i in range(len(ids)):
        begin = 0 if i < fresh else -(-(i - fresh + 1) // step) * step  # of the first window that has it
        if leading or i > begin:
            expected.append((*leading, *ids[begin : i + 1]))
    assert scored == expected


def test_is_what_transformers_computes(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM
    oracle = load.from_pretrained(tiny_model, dtype=torch.float32)
    ids = torch.randint(3, 250, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    decoder = load_model(tiny_model, dtype="float32", device=torch.device("cpu"))
    total, count, seen = 0.0, 0, 0
    for begin in range(0, 90, 16):
        held = ids[begin : begin + 40]
        new = begin + len(held) - seen
        with torch.inference_mode():
            probabilities = oracle(torch.tensor([held])).logits[0].double().log_softmax(-1)
        for i in range(max(len(held) - new, 1), len(held)):
            total -= float(probabilities[i - 1, held[i]])
            count += 1
        seen = begin + len(held)
        if seen == len(ids):
            break
    found = perplexity(measuring(decoder), ids, context=40, stride=16)
    assert found.num_scored == count == 89
    assert found.value == pytest.approx(math.exp(total / count), rel=1e-5)


def test_does_not_depend_on_how_many_windows_are_computed_together(tiny_model: Path) -> None:
    decoder = load_model(tiny_model, dtype="float32", device=torch.device("cpu"))
    ids = torch.randint(3, 250, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    few, many = (
        perplexity(measuring(decoder, num_tokens=n), ids, context=30, stride=20, leading=[0]) for n in (32, 4096)
    )
    assert few.value == pytest.approx(many.value, rel=1e-6)
    assert few.num_scored == many.num_scored == 200
    assert few.change(many) == pytest.approx(0, abs=1e-6)


def test_a_context_the_model_or_the_arena_cannot_hold_is_refused(tiny_model: Path) -> None:
    decoder = load_model(tiny_model, dtype="float32", device=torch.device("cpu"))
    with pytest.raises(InvalidRequest, match="has 256 positions"):
        perplexity(measuring(decoder), [5] * 300, context=257)
    with pytest.raises(InvalidRequest, match="arena has 2 blocks"):
        perplexity(measuring(decoder, num_tokens=32), [5] * 300, context=100)
    with pytest.raises(InvalidRequest, match="stride from 1 to 8"):
        perplexity(measuring(decoder), [5] * 300, context=8, stride=9)
    with pytest.raises(InvalidRequest, match="has 1 tokens"):
        perplexity(measuring(decoder), [5], context=8)


@pytest.mark.parametrize("name", sample(["llm-stories3m", "demo"], "demo"))
def test_a_cache_of_bytes_costs_little_perplexity(shared_data: Path, name: str) -> None:
    folder = Path(models.__file__).parent / name if name == "demo" else shared_data / name
    text = (shared_data / "text" / "wikitext2.valid.txt").read_text()[:60_000]
    ids = Tokenizer.load(folder).encode(text)[:6000]
    decoder = load_model(folder, dtype="float32", device=torch.device("cpu"))
    plain, eight = (perplexity(measuring(decoder, in_bytes=wish), ids, context=256) for wish in (False, True))
    assert plain.value != eight.value
    assert eight.value <= plain.value * 1.002
