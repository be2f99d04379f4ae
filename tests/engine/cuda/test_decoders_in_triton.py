"""Whole decoders with Triton's kernels, in the interpreter, against the plain torch forms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no package for this machine")

from tests.engine.model.test_one_call import batch_of
from tests.families import write_checkpoint
from tests.tiers import sample

from inferd.engine.model.load import Decoder, load_model
from inferd.native import compiled
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import ReferenceAttention
from inferd.native.triton import switch
from inferd.native.triton.attention import TritonAttention

# Norms of heads; windows, soft caps and norms behind; norms of whole rows; partial rotation; experts; learned positions.
NAMES = ["qwen3", "gemma2", "olmo2", "phi4-partial", "mixtral", "gpt2"]


def arena(decoder: Decoder, *, in_rows: bool) -> KVCache:
    config = decoder.config
    return KVCache(
        num_layers=config.num_layers,
        num_blocks=60,
        block_size=4,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=decoder.dtype,
        device=torch.device("cpu"),
        in_rows=in_rows,
    )


@pytest.mark.parametrize("name", sample(NAMES, "qwen3", "mixtral"))
def test_a_decoder_computes_the_same(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    with compiled.using_level("none"), torch.inference_mode():
        decoder = load_model(tmp_path, dtype="float32", device=torch.device("cpu"))
        ours, theirs = arena(decoder, in_rows=True), arena(decoder, in_rows=False)
        starts = [0, 0, 0]
        for counts in ([5, 4, 0], [1, 1, 3], [1, 0, 1]):
            batch = batch_of(counts, starts, decoder.config.vocab_size)
            expected = decoder.forward(batch, ReferenceAttention(theirs, batch))
            with switch.on_cpu():
                found = decoder.forward(batch, TritonAttention(ours, batch))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            starts = [start + count for start, count in zip(starts, counts, strict=True)]
