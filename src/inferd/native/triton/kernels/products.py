"""Products with 8-bit weights, integers or floats, which are converted to the activations' format on the way."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def product(
    x,  # [T, K], rows x_stride apart
    weight,  # [N, K] int8 or float8
    scale,  # [N, K / GROUP] float32
    bias,  # [N] where HAS_BIAS
    y,  # [T, N]
    num_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale; 0: all of them
    ROWS: tl.constexpr,  # of x in a program
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,  # inputs at a time, of one group
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,  # see attention.attend
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < num_rows, n < N
    groups = (K + GROUP - 1) // GROUP if GROUP > 0 else 1
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH)
        a = tl.load(
            x + row.to(tl.int64)[:, None] * x_stride + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0
        )
        w = tl.load(
            weight + n.to(tl.int64)[None, :] * K + k[:, None], mask=is_output[None, :] & (k < K)[:, None], other=0.0
        )
        if WIDE:
            a = a.to(tl.float32)
        part = tl.dot(a, w.to(a.dtype), input_precision="ieee")
        if GROUP > 0:
            part = part * tl.load(scale + n * groups + start // GROUP, mask=is_output, other=0.0)[None, :]
        sums += part
    if GROUP == 0:
        sums = sums * tl.load(scale + n, mask=is_output, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + row.to(tl.int64)[:, None] * N + n[None, :],
        sums.to(y.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )
