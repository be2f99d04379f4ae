"""The compiled choice of tokens from logits (kernels/sampling.h)."""

from __future__ import annotations

from array import array

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
    at: list[int] | None = None,
) -> tuple[list[float], list[int]]:
    """The largest logit of each row x [R, V], and the token drawn from it. ``at``: of these rows alone, which all other
    arguments are by; None: of all rows.

    ``masks``: the tokens that may be drawn; the logits of others are changed in place. See ``sampler``, and
    ``SampleArgs`` in kernels/table.h.
    """
    rows = x.shape[0] if at is None else len(at)
    # Arrays, because making a tensor takes as long as some thousand logits.
    narrow = array("f", temperature)
    narrow.extend(floors)
    wide = array("d", top_p)
    wide.extend(draws)
    ks, best, tokens = array("q", top_k), array("f", bytes(4 * rows)), array("q", bytes(8 * rows))
    logits, stride, threads = x.data_ptr(), x.stride(0), torch.get_num_threads()
    of_narrow, of_wide, of_ks = _address(narrow), _address(wide), _address(ks)
    of_best, of_tokens = _address(best), _address(tokens)
    # Some rows are drawn one by one, because to make a tensor of a few of them takes longer.
    calls = [(0, 0, rows)] if at is None else [(row, i, 1) for i, row in enumerate(at)]
    for row, first, count in calls:
        kernels.sample(
            logits + 4 * row * stride,
            stride,
            count,
            x.shape[1],
            of_narrow + 4 * first,
            of_narrow + 4 * (rows + first),
            of_ks + 8 * first,
            of_wide + 8 * first,
            of_wide + 8 * (rows + first),
            of_best + 4 * first,
            of_tokens + 8 * first,
            threads,
            *(() if masks is None else (masks.address, masks.of[first : first + count], masks.words.shape[1])),
        )
    return best.tolist(), tokens.tolist()


def _address(values: array[float] | array[int]) -> int:
    return values.buffer_info()[0]
