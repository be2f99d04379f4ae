"""A row has the same bits alone, in a batch of any size and after any cut of its prompt, in every family and format."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inferd.checkpoints.architecture import GPT
from inferd.checkpoints.decoder_config import FAMILIES
from inferd.engine.model.load import Decoder, load_model
from inferd.engine.runner import Runner
from inferd.native import compiled, forms
from inferd.native.attention import FlatBatch
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import AttentionKind

CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(not compiled.BUILT, reason="inferd was installed without its compiled kernels")
TEXTS, LENGTH, COPIES = 8, 13, 4  # different texts, their tokens, and sequences of each in a step
BLOCK, BLOCKS_EACH = 4, 4


def runner_of(decoder: Decoder, attention: AttentionKind = "auto") -> Runner:
    config = decoder.config
    cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=TEXTS * COPIES * BLOCKS_EACH,
        block_size=BLOCK,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=decoder.dtype,
        device=CPU,
    )
    return Runner(decoder, cache, attention, CPU)


def logits_of(runner: Runner, parts: list[tuple[int, int, int]]) -> list[Tensor]:
    """Logits [count, V] of each part of a step. A part: a sequence, the place of its first row, and its rows."""
    rows = [(sequence, at) for sequence, start, count in parts for at in range(start, start + count)]
    ends = torch.tensor([0, *(count for *_, count in parts)]).cumsum(0)
    tables = [[sequence * BLOCKS_EACH + block for block in range(BLOCKS_EACH)] for sequence, *_ in parts]
    batch = FlatBatch(
        token_ids=torch.tensor([3 + (sequence % TEXTS * 31 + at * 17) % 90 for sequence, at in rows]),
        positions=torch.tensor([at for _, at in rows]),
        query_start=ends.to(torch.int32),
        seq_len=torch.tensor([start + count for _, start, count in parts], dtype=torch.int32),
        block_table=torch.tensor(tables, dtype=torch.int32),
        slots=torch.tensor([sequence * BLOCKS_EACH * BLOCK + at for sequence, at in rows]),
        num_sequences=len(parts),
    )
    with torch.inference_mode():
        hidden = runner.compute(batch)
        return list(torch.split(runner.logits(hidden, list(range(len(rows)))), [count for *_, count in parts]))


def alone(runner: Runner) -> list[Tensor]:
    """[LENGTH, V] of each text: every row is a step of its own."""
    return [torch.cat([logits_of(runner, [(text, at, 1)])[0] for at in range(LENGTH)]) for text in range(TEXTS)]


def check(runner: Runner, sequences: int, chunks: list[int], expected: list[Tensor]) -> None:
    """Steps of all sequences, until each has all its rows. ``chunks``: how many rows a sequence has in a step."""
    done, step = [0] * sequences, 0
    while min(done) < LENGTH:
        parts = []
        for sequence in range(sequences):
            # Neighbours have other chunks, so that some decode while others prefill.
            count = min(chunks[(step + sequence) % len(chunks)], LENGTH - done[sequence])
            if count:
                parts.append((sequence, done[sequence], count))
        for (sequence, start, count), found in zip(parts, logits_of(runner, parts), strict=True):
            assert torch.equal(found, expected[sequence % TEXTS][start : start + count]), (sequence, start, parts)
            done[sequence] = start + count
        step += 1


NAMES = (
    *("llama-biases", "llama3-tied", "mistral-window", "qwen2", "qwen3", "qwen3-moe", "mixtral", "gemma2", "gemma3"),
    *("phi4-partial", "smollm3", "olmo2", "granite", "gpt2", "gpt-neo", "gpt-neox", "pythia-sequential"),
)
FORMATS = [
    ("float32", "none"),
    ("bfloat16", "none"),
    ("float32", "int8"),  # in the form of wide models
    ("bfloat16", "int4"),
]
EVERYDAY = {("qwen3-moe", "float32", "none"), ("mixtral", "float32", "int8"), ("gpt-neo", "float32", "none")}


def test_every_native_family_is_here(families: ModuleType) -> None:
    tested = {families.FAMILIES[name][1] for name in NAMES}
    assert tested | {"Gemma3ForConditionalGeneration"} == {*FAMILIES, *GPT}


@needs_kernels
@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    [
        pytest.param(name, *form, marks=() if (name, *form) in EVERYDAY else pytest.mark.soak)
        for name in NAMES
        for form in FORMATS
    ],
)
def test_a_row_has_its_bits_in_any_batch(
    name: str, dtype: Any, quantization: Any, tmp_path: Path, families: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == "float32":
        monkeypatch.setattr(forms, "NARROW", 0)
    families.write_checkpoint(name, tmp_path)
    runner = runner_of(load_model(tmp_path, dtype=dtype, device=CPU, quantization=quantization))
    assert runner.keeps_rows
    expected = alone(runner)

    @settings(max_examples=2, deadline=None)
    @given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=5))
    def law(chunks: list[int]) -> None:
        for sequences in (1, 2, 3, 8, 32):
            check(runner, sequences, chunks, expected)

    law()


@needs_kernels
def test_bits_are_promised_only_where_the_kernels_compute_them(tmp_path: Path, families: ModuleType) -> None:
    """Torch's products and attention have other bits in another batch."""
    families.write_checkpoint("mixtral", tmp_path / "mixtral")
    made = load_model(tmp_path / "mixtral", dtype="float32", device=CPU)
    assert runner_of(made).keeps_rows
    assert not runner_of(made, "reference").keeps_rows
    with compiled.using_level("none"):
        assert not runner_of(made).keeps_rows
    with compiled.using_level("generic"):  # whose products of numbers are torch's
        assert not runner_of(load_model(tmp_path / "mixtral", dtype="float32", device=CPU)).keeps_rows


@needs_kernels
@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_a_plain_activation_takes_each_row_alone(activation: str, tmp_path: Path, families: ModuleType) -> None:
    families.write_checkpoint("gpt-neo", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text()) | {"activation_function": activation}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    runner = runner_of(load_model(tmp_path, dtype="float32", device=CPU))
    assert runner.keeps_rows
    expected = alone(runner)
    for sequences in (3, 8):
        check(runner, sequences, [LENGTH, 2], expected)
