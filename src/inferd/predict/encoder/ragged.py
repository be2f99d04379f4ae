"""Several texts as one flat list of tokens: no padding anywhere, in the linear layers least of all.

    row        0 1 2 3 4 5 6 7        starts  = 0 2 4 8
    text       a a b b c c c c        groups  = (0, 2, 2), (4, 1, 4): texts of one length lie side by side

Texts are sorted by length, so that attention, the only layer that separates texts, computes few groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inferd.native.text_attention import takes_head_dim, takes_text_attention, text_attention

_LONG = 256  # tokens from which a matrix of scores per head is more than the caches hold


class Group(NamedTuple):
    """Texts of one length, from one row on."""

    row: int
    texts: int
    length: int


@dataclass(frozen=True, slots=True)
class Ragged:
    """A batch of S texts with T tokens."""

    token_ids: Tensor  # [T] int64
    type_ids: Tensor | None  # [T] int64; None: all are 0
    positions: Tensor  # [T] int64, from 0 in every text
    starts: Tensor  # [S + 1] int64
    groups: tuple[Group, ...]

    @property
    def last_rows(self) -> Tensor:
        return self.starts[1:] - 1


def ragged(texts: Sequence[Sequence[int]], types: Sequence[Sequence[int] | None], device: torch.device) -> Ragged:
    """``texts`` are token ids, none empty, ascending in length; ``types`` their token types (None: all 0)."""
    starts = [0]
    flat: list[int] = []
    positions: list[int] = []
    groups: list[Group] = []
    for ids in texts:
        length = len(ids)
        if groups and groups[-1].length == length:
            row, count, _ = groups[-1]
            groups[-1] = Group(row, count + 1, length)
        else:
            groups.append(Group(starts[-1], 1, length))
        flat.extend(ids)
        positions.extend(range(length))
        starts.append(starts[-1] + length)
    type_ids: Tensor | None = None
    if any(kind is not None for kind in types):
        joined: list[int] = []
        for kind, ids in zip(types, texts, strict=True):
            joined.extend([0] * len(ids) if kind is None else kind)
        type_ids = torch.tensor(joined, device=device)
    return Ragged(
        torch.tensor(flat, device=device),
        type_ids,
        torch.tensor(positions, device=device),
        torch.tensor(starts, device=device),
        tuple(groups),
    )


def attends_by_kernel(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernel attends on the CPU, in which a text has the same bits beside any other texts."""
    return takes_head_dim(head_dim) and dtype in (torch.float32, torch.bfloat16)


def attend(
    qkv: Tensor,
    batch: Ragged,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    distance_bias: Tensor | None = None,
) -> Tensor:
    """Every token attends to the tokens of its own text.

    qkv [T, 3, heads, D] -> [T, heads * D] in the format ``dtype``. ``window``: only to those at most so far away, to
    either side. ``distance_bias`` [heads, 2 * N - 1] is added to the scores by distance (key minus query, plus N - 1).
    """
    if takes_text_attention(qkv) and attends_by_kernel(qkv.shape[3], dtype):
        return text_attention(qkv, batch.starts, dtype, window, distance_bias)
    heads, dim = qkv.shape[2:]
    out = torch.empty((qkv.shape[0], heads * dim), dtype=dtype, device=qkv.device)
    for row, count, length in batch.groups:
        rows = slice(row, row + count * length)
        q, k, v = qkv[rows].view(count, length, 3, heads, dim).permute(2, 0, 3, 1, 4)
        mask = _mask(length, window, distance_bias, qkv)
        if length > _LONG:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = torch.matmul(q * dim**-0.5, k.transpose(-1, -2))
            if mask is not None:
                scores += mask
            mixed = torch.matmul(scores.softmax(-1), v)
        out[rows].view(count, length, heads, dim).copy_(mixed.transpose(1, 2))
    return out


def _mask(length: int, window: int | None, distance_bias: Tensor | None, like: Tensor) -> Tensor | None:
    """[heads or 1, length, length] to be added to the scores."""
    is_hiding = window is not None and window < length - 1
    if not is_hiding and distance_bias is None:
        return None
    at = torch.arange(length, device=like.device)
    distance = at.unsqueeze(0) - at.unsqueeze(1)
    if distance_bias is None:
        mask = torch.zeros((1, length, length), dtype=like.dtype, device=like.device)
    else:
        mask = distance_bias[:, distance + distance_bias.shape[1] // 2].to(like.dtype)
    if is_hiding:
        assert window is not None
        mask = mask.masked_fill(distance.abs() > window, float("-inf"))
    return mask
