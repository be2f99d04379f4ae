"""Masks of tokens on logits equal a plain choice between the logit and minus infinity."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from inferd.native.masks import ban


def _masks(kind: str, count: int, vocab: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    allowed = np.full((count, -(-vocab // 32) * 32), kind == "dense")
    if kind == "mixed":
        allowed[:] = draw.random(allowed.shape) < 0.5
    else:
        for row in allowed:
            row[draw.integers(0, vocab, 1 + vocab // 20)] ^= True
    return allowed


@pytest.mark.parametrize("vocab", [1, 31, 32, 70, 1000, 2048, 16_384, 16_385, 20_001])
@pytest.mark.parametrize("kind", ["sparse", "dense", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [[0, 2, 3, 4], [1, 2, 3, 4]])
def test_only_tokens_with_a_bit_are_left(vocab: int, kind: str, dtype: torch.dtype, rows: list[int]) -> None:
    allowed = _masks(kind, 3, vocab, seed=vocab)
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    wide = torch.randn(5, vocab + 6, dtype=dtype)
    masks = [1, 0, 0, 2]
    wanted = wide.clone()
    for row, mask in zip(rows, masks, strict=True):
        kept = torch.from_numpy(allowed[mask, :vocab])
        wanted[row, :vocab] = torch.where(kept, wanted[row, :vocab], -math.inf)
    ban(wide[:, :vocab], rows, words, masks)
    assert torch.equal(wide, wanted), "and other rows, and what is behind the vocabulary, stay"


def test_tokens_behind_the_mask_are_banned() -> None:
    x = torch.zeros(2, 40)
    ban(x, [1], np.full((1, 1), -1, dtype=np.int32), [0])
    assert torch.isfinite(x[0]).all()
    assert torch.isfinite(x[1, :32]).all()
    assert torch.isneginf(x[1, 32:]).all()
