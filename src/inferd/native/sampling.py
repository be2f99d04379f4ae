"""The compiled choice of tokens from logits (kernels/sampling.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.native.compiled import kernels, takes
from inferd.native.masks import RowMasks


def takes_logits(x: Tensor) -> bool:
    """[R, V] float32 with the logits of a row side by side."""
    return takes(x) and x.dtype == torch.float32 and x.stride(1) == 1


def sample(
    x: Tensor,
    temperature: list[float],
    floors: list[float],
    top_k: list[int],
    top_p: list[float],
    draws: list[float],
    masks: RowMasks | None = None,
) -> tuple[list[float], list[int]]:
    """The largest logit of each row x [R, V], and the token drawn from it.

    ``masks``: the tokens that may be drawn; the logits of others are changed in place. See ``sampler``, and
    ``SampleArgs`` in kernels/table.h.
    """
    rows = x.shape[0]
    # One tensor per format, because making a tensor takes as long as some thousand logits.
    narrow = torch.tensor((temperature, floors), dtype=torch.float32)
    wide = torch.tensor((top_p, draws), dtype=torch.float64)
    ks = torch.tensor(top_k, dtype=torch.int64)
    best, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    kernels.sample(
        x.data_ptr(),
        x.stride(0),
        rows,
        x.shape[1],
        narrow.data_ptr(),
        narrow.data_ptr() + 4 * rows,
        ks.data_ptr(),
        wide.data_ptr(),
        wide.data_ptr() + 8 * rows,
        best.data_ptr(),
        tokens.data_ptr(),
        torch.get_num_threads(),
        *(() if masks is None else (masks.address, masks.of, masks.words.shape[1])),
    )
    return best.tolist(), tokens.tolist()
