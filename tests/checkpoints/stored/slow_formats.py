"""Quantised checkpoints written bit by bit, from each format's description: the oracle of their readers.

Nothing here is shared with ``inferd.checkpoints.stored``: integers are put into words one at a time, in Python.

GPTQ: AutoGPTQ's ``pack``: input i's integer of output o lies in word [i // n, o] at bit (i % n) * bits, n = 32 / bits; zero
points of group g in word [g, o // n] at bit (o % n) * bits, less one in the first format. AWQ: llm-awq's GEMM layout: the
i-th nibble of word [input, c] is output 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]. compressed-tensors: integers plus 2**(bits - 1)
along a row; zero points along outputs. EETQ: FasterTransformer's cutlass_preprocessors.cc for
Turing to Ada, one byte after the other through its four steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """Unsigned integers and what they mean: ``w[o, i] = scale[o, g(i)] * (value[o, i] - zero[o, g(i)])``."""

    value: list[list[int]]  # [out][in]
    zero: list[list[int]]  # [out][groups]
    scale: Tensor  # [out, groups]
    group_of: list[int]  # [in]
    bits: int

    def weight(self) -> Tensor:
        out, inputs = len(self.value), len(self.group_of)
        w = torch.empty(out, inputs, dtype=torch.float64)
        for o in range(out):
            for i in range(inputs):
                g = self.group_of[i]
                w[o, i] = float(self.scale[o, g]) * (self.value[o][i] - self.zero[o][g])
        return w.float()


def random_grid(
    out: int, inputs: int, groups: int, bits: int, *, seed: int, symmetric: bool = False, shuffled: bool = False
) -> Grid:
    draw = torch.Generator().manual_seed(seed)
    top = 1 << bits
    group_of = [i * groups // inputs for i in range(inputs)]
    if shuffled:
        group_of = [group_of[i] for i in torch.randperm(inputs, generator=draw).tolist()]
    return Grid(
        value=torch.randint(0, top, (out, inputs), generator=draw).tolist(),
        zero=[[top // 2] * groups] * out
        if symmetric
        else torch.randint(0, top, (out, groups), generator=draw).tolist(),
        scale=(torch.rand(out, groups, generator=draw) * 0.02 + 0.001).half().float(),
        group_of=group_of,
        bits=bits,
    )


def words(rows: int, columns: int, put: Callable[[list[list[int]]], None]) -> Tensor:
    """int32 [rows, columns] of bit patterns that ``put`` makes."""
    table = [[0] * columns for _ in range(rows)]
    put(table)
    return torch.tensor([[w - (1 << 32) if w >> 31 else w for w in row] for row in table], dtype=torch.int32)


def gptq(grid: Grid, *, version: int) -> dict[str, Tensor]:
    out, inputs, groups, per = len(grid.value), len(grid.group_of), grid.scale.shape[1], 32 // grid.bits

    def weights(table: list[list[int]]) -> None:
        for o in range(out):
            for i in range(inputs):
                table[i // per][o] |= grid.value[o][i] << (i % per * grid.bits)

    def zeros(table: list[list[int]]) -> None:
        for o in range(out):
            for g in range(groups):
                stored = (grid.zero[o][g] - (1 if version == 1 else 0)) % (1 << grid.bits)
                table[g][o // per] |= stored << (o % per * grid.bits)

    return {
        "qweight": words(inputs // per, out, weights),
        "qzeros": words(groups, out // per, zeros),
        "scales": grid.scale.t().contiguous().half(),
        "g_idx": torch.tensor(grid.group_of, dtype=torch.int32),
    }


def awq(grid: Grid) -> dict[str, Tensor]:
    out, inputs, groups = len(grid.value), len(grid.group_of), grid.scale.shape[1]
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def weights(table: list[list[int]]) -> None:
        for i in range(inputs):
            for c in range(out // 8):
                for nibble, o in enumerate(order):
                    table[i][c] |= grid.value[8 * c + o][i] << (4 * nibble)

    def zeros(table: list[list[int]]) -> None:
        for g in range(groups):
            for c in range(out // 8):
                for nibble, o in enumerate(order):
                    table[g][c] |= grid.zero[8 * c + o][g] << (4 * nibble)

    return {
        "qweight": words(inputs, out // 8, weights),
        "qzeros": words(groups, out // 8, zeros),
        "scales": grid.scale.t().contiguous().half(),
    }


def packed(grid: Grid, *, symmetric: bool) -> dict[str, Tensor]:
    """compressed-tensors' pack-quantized. Its integers are signed and stored plus 2**(bits - 1), which is what a ``Grid`` has."""
    out, inputs, groups, per = len(grid.value), len(grid.group_of), grid.scale.shape[1], 32 // grid.bits

    def weights(table: list[list[int]]) -> None:
        for o in range(out):
            for i in range(inputs):
                table[o][i // per] |= grid.value[o][i] << (i % per * grid.bits)

    def zeros(table: list[list[int]]) -> None:
        for o in range(out):
            for g in range(groups):
                table[o // per][g] |= grid.zero[o][g] << (o % per * grid.bits)

    tensors = {
        "weight_packed": words(out, inputs // per, weights),
        "weight_scale": grid.scale,
        "weight_shape": torch.tensor([out, inputs]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(-(-out // per), groups, zeros)
    if grid.group_of != sorted(grid.group_of):
        tensors["weight_g_idx"] = torch.tensor(grid.group_of, dtype=torch.int32)
    return tensors


def eetq(values: list[list[int]], scale: Tensor) -> dict[str, Tensor]:
    """``values`` [out][in] from -128 to 127, a scale for each output."""
    out, inputs = len(values), len(values[0])
    # Rows are inputs here: each place w of sixteen takes the input that the kernel's loads will want there.
    source = [16 * (i // 16) + 8 * (i % 16 % 4 // 2) + i % 2 + 2 * (i % 16 // 4) for i in range(inputs)]
    columns = [[values[o][i] for i in source] for o in range(out)]
    laid: list[int] = [0] * (out * inputs)
    for o in range(out):
        for i in range(inputs):
            tile = i // 64
            laid[o // 2 * inputs * 2 + tile * 128 + o % 2 * 64 + i % 64] = columns[o][i] + 128
    for first in range(0, len(laid), 4):
        laid[first + 1], laid[first + 2] = laid[first + 2], laid[first + 1]
    stored = torch.tensor([byte - 256 if byte > 127 else byte for byte in laid], dtype=torch.int8)
    return {"weight": stored.view(inputs, out), "weight_scales": scale.half()}
