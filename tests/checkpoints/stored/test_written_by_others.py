"""Checkpoints that other projects' tools wrote (``written/README.md``) mean what those tools compute from them.

The readers' other tests write each layout from its description; these hold the descriptions to the writers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from inferd.engine.model.load import Decoder, load_model
from inferd.engine.native_decoder import native_decoder
from inferd.native import compiled
from inferd.native.attention import FlatBatch
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import NativeAttention

WRITTEN = Path(__file__).parent / "written"
NAMES = sorted(path.parent.name for path in WRITTEN.glob("*/config.json"))
_ROWS = 16

pytestmark = pytest.mark.skipif(not compiled.BUILT, reason="inferd was installed without its compiled kernels")


def loaded(name: str, quantization: str) -> Decoder:
    return load_model(WRITTEN / name, dtype="float32", device=torch.device("cpu"), quantization=quantization)  # type: ignore[arg-type]


def logits(decoder: Decoder, ids: Tensor) -> Tensor:
    """[16, vocabulary] of one sequence, in one call of the kernels and layer by layer, which give the same bits."""
    config = decoder.config
    batch = FlatBatch(
        token_ids=ids,
        positions=torch.arange(_ROWS),
        query_start=torch.tensor([0, _ROWS], dtype=torch.int32),
        seq_len=torch.tensor([_ROWS], dtype=torch.int32),
        block_table=torch.tensor([[0]], dtype=torch.int32),
        slots=torch.arange(_ROWS),
        num_sequences=1,
    )
    caches = [
        KVCache(
            num_layers=config.num_layers,
            num_blocks=1,
            block_size=_ROWS,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for _ in range(2)
    ]
    one = native_decoder(decoder, caches[0], _ROWS)
    assert one is not None, "a product left the one call"
    with torch.inference_mode():
        hidden = one.forward(batch)
        assert torch.equal(hidden, decoder.forward(batch, NativeAttention(caches[1], batch)))
        return decoder.logits(hidden)


def divergence(meant: Tensor, found: Tensor) -> float:
    """Nats a token (Kullback-Leibler)."""
    p, q = meant.log_softmax(-1), found.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_some_are_here() -> None:
    assert len(NAMES) == 14


@pytest.mark.parametrize("name", NAMES)
def test_a_writer_s_file_means_what_the_writer_computes_from_it(name: str) -> None:
    stored = load_file(WRITTEN / name / "meant.safetensors")
    ids, meant = stored["ids"], stored["logits"].float()
    # The writer rounds each weight to half precision; logits spread over 1.3.
    assert (logits(loaded(name, "none"), ids) - meant).abs().max() < 0.03
    # As served: activations of 8 bits. A group or zero point that is misread diverges by more than 0.1.
    decoder = loaded(name, "auto")
    assert divergence(meant, logits(decoder, ids)) < 2e-3
    assert (decoder.quantization == "none") == (name == "llmcompressor-fp8")
