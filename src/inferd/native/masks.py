"""Masks of tokens, applied to logits by torch. The kernel that chooses tokens applies them itself (``sampling``)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_WORD = 32


class RowMasks(NamedTuple):
    """Masks of some rows of logits.

    words [M, W] int32, contiguous: bit b of word w of a mask stands for token 32 * w + b, which may follow. Tokens
    behind the last word may not. ``address``: of the words.
    """

    words: np.ndarray
    address: int
    of: list[int]  # by row of the logits: its mask, or -1

    def allows(self, mask: int, token_id: int) -> bool:
        word, bit = divmod(token_id, _WORD)
        return word < self.words.shape[1] and bool(int(self.words[mask, word]) >> bit & 1)


def ban(x: Tensor, masks: RowMasks) -> None:
    """In place: the logits x [R, V] are -infinity where the mask of their row has no bit."""
    rows = [row for row, mask in enumerate(masks.of) if mask >= 0]
    codes = torch.from_numpy(masks.words.view(np.uint8)).to(x.device)[[masks.of[row] for row in rows]]
    covered = masks.words.shape[1] * _WORD
    if x.shape[1] > covered:
        x[rows, covered:] = -math.inf
    table = torch.tensor(_ADDED, device=x.device)
    added = table[codes.long()].view(len(rows), -1)[:, : x.shape[1]]
    known = x[rows, :covered]
    x[rows, :covered] = torch.where(added == 0, known, added)


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
"""The bits of a byte, which stand for eight tokens."""

_ADDED = np.where(_BITS, 0.0, -math.inf).astype(np.float32)
"""What is added to the logits of eight tokens, by their byte of a mask."""
