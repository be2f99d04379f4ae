"""The compiled attention within texts that lie one after another, without a KV cache (kernels/encoder.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.native.compiled import CODES, is_on, kernels, takes


def takes_head_dim(dim: int) -> bool:
    """A multiple of the widest level's vectors."""
    return is_on() and dim % 16 == 0


def takes_text_attention(qkv: Tensor) -> bool:
    """[T, 3, heads, D] float32."""
    return takes(qkv) and qkv.dtype == torch.float32 and qkv.is_contiguous() and takes_head_dim(qkv.shape[3])


def text_attention(
    qkv: Tensor, starts: Tensor, out_dtype: torch.dtype, window: int | None, distance_bias: Tensor | None
) -> Tensor:
    """Every row attends to the rows of its text: [T, heads * D]; see ``inferd.predict.encoder.ragged``."""
    rows, _, heads, dim = qkv.shape
    out = torch.empty((rows, heads * dim), dtype=out_dtype)
    kernels.text_attention(
        CODES[out_dtype],
        qkv.data_ptr(),
        out.data_ptr(),
        starts.data_ptr(),
        0 if distance_bias is None else distance_bias.data_ptr(),
        starts.shape[0] - 1,
        heads,
        dim,
        -1 if window is None else window,
        0 if distance_bias is None else (distance_bias.shape[1] + 1) // 2,
        dim**-0.5,
        torch.get_num_threads(),
    )
    return out
