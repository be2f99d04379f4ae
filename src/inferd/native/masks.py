"""Masks of tokens, applied to logits."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_WORD = 32
_ALL, _NONE = -1, 0
_FEW_WORDS = 512


def ban(x: Tensor, rows: list[int], bits: Tensor, masks: list[int]) -> None:
    """In place: the logits of row ``rows[i]`` of x [R, V] are -infinity where mask ``masks[i]`` has no bit.

    bits [M, W] int32 on the CPU: bit b of word w stands for token 32 * w + b. Tokens behind the last word are banned.
    """
    chosen = bits if masks == list(range(bits.shape[0])) else bits[masks]
    covered = chosen.shape[1] * _WORD
    if x.shape[1] > covered:
        x[rows, covered:] = -math.inf
    if x.is_cpu and x.dtype == torch.float32 and x.stride(1) == 1:
        logits = x.numpy()
        if chosen.shape[1] <= _FEW_WORDS:  # the calls of numpy cost more than the tokens
            width = min(covered, x.shape[1])
            # The lesser of a logit and the bound, also where the logit is no number; a bound of infinity is no bound.
            bounds = np.take(_BOUNDS, chosen.numpy().view(np.uint8).ravel(), axis=0).reshape(len(rows), -1)[:, :width]
            if rows == list(range(rows[0], rows[0] + len(rows))):
                part = logits[rows[0] : rows[0] + len(rows), :width]
                np.fmin(part, bounds, out=part)
            else:
                logits[rows, :width] = np.fmin(logits[rows, :width], bounds)
            return
        for row, words in zip(rows, chosen.numpy(), strict=True):
            _ban_row(logits[row], words)
        return
    table = torch.tensor(_TABLE, device=x.device)
    added = table[chosen.to(x.device).view(torch.uint8).long()].view(len(rows), -1)[:, : x.shape[1]]
    x[rows] = torch.where(added == 0, x[rows], added)


def _ban_row(logits: np.ndarray, words: np.ndarray) -> None:
    """Most words of a mask are all or nothing, so only the others are taken apart."""
    whole = min(logits.shape[0] // _WORD, words.shape[0])
    blocks = logits[: whole * _WORD].reshape(whole, _WORD)
    head = words[:whole]
    blocks[head == _NONE] = -math.inf
    mixed = np.flatnonzero((head != _ALL) & (head != _NONE))
    if mixed.size:
        blocks[mixed] = np.where(_bools(head[mixed]), blocks[mixed], -math.inf)
    rest = logits[whole * _WORD :]
    if rest.size and whole < words.shape[0]:
        rest[~_bools(words[whole : whole + 1])[0, : rest.size]] = -math.inf


def _bools(words: np.ndarray) -> np.ndarray:
    """The bits of k words, in the order of their memory, as [k, 32]."""
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 4)
    return np.unpackbits(raw, axis=1, bitorder="little").view(np.bool_)


_TABLE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -math.inf
).astype(np.float32)
"""What is added to the logits of eight tokens, by their byte of a mask."""

_BOUNDS = np.where(_TABLE == 0.0, np.float32(math.inf), _TABLE)
"""The most that the logits of eight tokens may be, by their byte of a mask."""
