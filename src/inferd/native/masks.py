"""Masks of tokens, applied to logits."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_WORD = 32
_BANNED = np.float32(-math.inf)


def ban(x: Tensor, rows: list[int], words: np.ndarray, masks: list[int]) -> None:
    """In place: the logits of row ``rows[i]`` of x [R, V] are -infinity where mask ``masks[i]`` has no bit.

    words [M, W] int32: bit b of word w stands for token 32 * w + b. Tokens behind the last word are banned.
    """
    count, num_words = words.shape
    if masks != list(range(count)):
        words = words[masks]
    codes = words.view(np.uint8)
    covered = num_words * _WORD
    if x.is_cpu and x.dtype == torch.float32:
        logits = x.numpy()
        if logits.shape[1] > covered:
            logits[rows, covered:] = _BANNED
        banned = _WITHOUT.take(codes).view(np.bool_)[:, : logits.shape[1]]
        first = rows[0]
        if rows == list(range(first, first + len(rows))):
            np.copyto(logits[first : first + len(rows), :covered], _BANNED, where=banned)
            return
        for row, without in zip(rows, banned, strict=True):
            np.copyto(logits[row, :covered], _BANNED, where=without)
        return
    if x.shape[1] > covered:
        x[rows, covered:] = -math.inf
    table = torch.tensor(_ADDED, device=x.device)
    added = table[torch.from_numpy(codes).to(x.device).long()].view(len(rows), -1)[:, : x.shape[1]]
    known = x[rows, :covered]
    x[rows, :covered] = torch.where(added == 0, known, added)


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
"""The bits of a byte, which stand for eight tokens."""

_WITHOUT = (_BITS == 0).view(np.uint64).reshape(-1)
"""Which of eight tokens have no bit, by their byte of a mask: eight bools, as one number."""

_ADDED = np.where(_BITS, 0.0, -math.inf).astype(np.float32)
"""What is added to the logits of eight tokens, by their byte of a mask."""
