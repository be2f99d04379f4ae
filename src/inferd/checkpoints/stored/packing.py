"""Small integers packed into 32-bit words, in the order of each format.

A word holds 32 / bits integers, the first in its lowest bits. GPTQ packs along inputs or outputs. compressed-tensors
packs weights along inputs and zero points along outputs. Both keep the order. AWQ's GEMM layout packs outputs in the
order of ``AWQ_ORDER``. EETQ's bytes have the order of FasterTransformer's kernels for Turing to Ada
(``straighten_eetq``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inferd.checkpoints.stored.layout import EETQ_TILE

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of a word's eight outputs lies in its i-th nibble, counted from the lowest (Lin et al. 2023, llm-awq's
kernel)."""

_EETQ_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)  # which of sixteen inputs lies in each place


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words -> uint8 in [0, 2**bits), ``dim`` longer by 32 / bits."""
    per_word = 32 // bits
    # A word's bytes lie lowest first in memory, so 8 bits need no arithmetic and 4 bits one mask and one shift.
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits == 4:
        octets = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)
    whole = octets.movedim(-1, dim + 1) if dim + 1 != octets.dim() - 1 else octets
    shape = list(words.shape)
    shape[dim] *= per_word
    return whole.reshape(shape)


def pack(values: Tensor, bits: int, dim: int) -> Tensor:
    """Integers in [0, 2**bits) -> int32 words; what is missing of the last word is 0."""
    per_word = 32 // bits
    moved = values.movedim(dim, -1).to(torch.uint8)
    short = -moved.shape[-1] % per_word
    if short:
        moved = F.pad(moved, (0, short))
    if bits == 4:
        moved = moved[..., 0::2] | (moved[..., 1::2] << 4)
    # Flat in between: a dimension of one element may have any stride.
    words = moved.contiguous().view(-1).view(torch.int32).view(*moved.shape[:-1], -1)
    return words.movedim(-1, dim).contiguous()


def unshuffle_awq(values: Tensor) -> Tensor:
    """[..., n] as unpacked from AWQ's words -> in the order of the outputs."""
    place = torch.tensor(AWQ_ORDER).argsort()
    return values.view(*values.shape[:-1], -1, 8)[..., place].flatten(-2)


def straighten_eetq(stored: Tensor) -> Tensor:
    """int8 [in, out] as stored -> int8 [out, in].

    The stored order comes from cutlass_preprocessors.cc: inputs are permuted by sixteens, the matrix is transposed,
    outputs are interleaved by twos in tiles of ``EETQ_TILE`` inputs, 128 is added, and the two middle bytes of every
    four are swapped.
    """
    inputs, out = stored.shape
    octets = stored.contiguous().view(torch.uint8).view(-1, 4)[:, (0, 2, 1, 3)]
    signed = (octets ^ 128).view(torch.int8)
    rows = signed.reshape(out // 2, inputs // EETQ_TILE, 2, EETQ_TILE).transpose(1, 2).reshape(out, -1, 16)
    return rows[..., torch.tensor(_EETQ_ORDER).argsort()].reshape(out, inputs)
