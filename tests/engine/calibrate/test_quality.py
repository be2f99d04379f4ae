"""What quantisation may cost, on trained models: the promises of docs/quantisation.md.

Texts that a small model cannot read move its perplexity by chance as much as by loss, so thousands of tokens are measured; what
calibration gains is shown on the bundled model's own kind of text.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from tests.tiers import THOROUGH
from training.corpus import exchanges
from training.dialogue import render

from inferd import models
from inferd.engine.calibrate.checkpoint import quantise
from inferd.engine.calibrate.wish import Wish

CONTEXT = 256


@pytest.mark.parametrize("text", ["tinyshakespeare.txt", "wikitext2.valid.txt"])
def test_eight_bits_cost_at_most_half_a_per_cent(shared_data: Path, tmp_path: Path, text: str) -> None:
    data = tmp_path / text
    data.write_text((shared_data / "text" / text).read_text()[:30_000])
    wish = Wish(method="int8", context=CONTEXT, most_measured=5_000, held_out=0.5, max_change=0.005)
    model = shared_data / "llm-stories3m"
    result = quantise(model, tmp_path / "int8", wish, data=data, source="stories", progress=lambda *_: None)
    assert result.after_bytes < 0.5 * result.before_bytes


@THOROUGH
def test_four_bits_cost_the_bundled_model_little(tmp_path: Path) -> None:
    data = tmp_path / "corpus.txt"
    dialogues = islice(exchanges(1, "held-out"), 600)
    data.write_text("".join(part for dialogue in dialogues for part, _ in render(dialogue)))
    wish = Wish(method="gptq", context=CONTEXT, num_samples=16, most_measured=3_000, max_change=0.02)
    result = quantise(models.path("demo"), tmp_path / "int4", wish, data=data, source="demo", progress=lambda *_: None)
    assert result.bits_per_weight < 4.8
