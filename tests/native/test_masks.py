"""Masks of tokens on logits equal a plain choice between the logit and minus infinity."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from inferd.native import compiled
from inferd.native.masks import RowMasks, ban
from inferd.native.sampling import sample


def _masks(kind: str, count: int, vocab: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    allowed = np.full((count, -(-vocab // 32) * 32), kind == "dense")
    if kind == "mixed":
        allowed[:] = draw.random(allowed.shape) < 0.5
    else:
        for row in allowed:
            row[draw.integers(0, vocab, 1 + vocab // 20)] ^= True
    return allowed


def _row_masks(words: np.ndarray, of: list[int]) -> RowMasks:
    return RowMasks(words, words.ctypes.data, of)


@pytest.mark.parametrize("vocab", [1, 31, 32, 70, 1000, 2048, 16_384, 16_385, 20_001])
@pytest.mark.parametrize("kind", ["sparse", "dense", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("of", [[1, -1, 0, 0, 2], [-1, 1, 0, 0, 2]])
def test_only_tokens_with_a_bit_are_left(vocab: int, kind: str, dtype: torch.dtype, of: list[int]) -> None:
    words, wide, wanted = _example(vocab, kind, dtype, of)
    ban(wide[:, :vocab], _row_masks(words, of))
    assert torch.equal(wide, wanted), "and other rows, and what is behind the vocabulary, stay"


@pytest.mark.parametrize("vocab", [1, 31, 32, 70, 128, 1000, 2048, 2049, 20_001])
@pytest.mark.parametrize("kind", ["sparse", "dense", "mixed"])
@pytest.mark.parametrize("level", compiled.levels())
def test_the_kernel_leaves_what_torch_leaves(vocab: int, kind: str, level: str) -> None:
    of = [1, -1, 0, 0, 2]
    words, wide, wanted = _example(vocab, kind, torch.float32, of)
    x, count = wide[:, :vocab], len(of)
    with compiled.using_level(level):
        best, tokens = sample(
            x, [0.0] * count, [-math.inf] * count, [0] * count, [1.0] * count, [0.0] * count, _row_masks(words, of)
        )
    assert torch.equal(wide, wanted)
    assert best == wanted[:, :vocab].amax(-1).tolist()
    assert tokens == [int(row.argmax()) if math.isfinite(most) else 0 for row, most in zip(x, best, strict=True)]


def _example(vocab: int, kind: str, dtype: torch.dtype, of: list[int]) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """Words of three masks, logits with columns behind the vocabulary, and what the masks leave of them."""
    allowed = _masks(kind, 3, vocab, seed=vocab)
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    wide = torch.randn(len(of), vocab + 6, dtype=dtype, generator=torch.Generator().manual_seed(vocab))
    wanted = wide.clone()
    for row, mask in enumerate(of):
        if mask >= 0:
            wanted[row, :vocab] = torch.where(torch.from_numpy(allowed[mask, :vocab]), wanted[row, :vocab], -math.inf)
    return words, wide, wanted


@pytest.mark.parametrize("level", ["none", *compiled.levels()])
def test_tokens_behind_the_mask_are_banned(level: str) -> None:
    x, masks = torch.zeros(2, 40), _row_masks(np.full((1, 1), -1, dtype=np.int32), [-1, 0])
    if level == "none":
        ban(x, masks)
    else:
        with compiled.using_level(level):
            sample(x, [0.0] * 2, [-math.inf] * 2, [0] * 2, [1.0] * 2, [0.0] * 2, masks)
    assert torch.isfinite(x[0]).all()
    assert torch.isfinite(x[1, :32]).all()
    assert torch.isneginf(x[1, 32:]).all()
