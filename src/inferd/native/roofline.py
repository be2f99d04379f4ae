"""What products reach on this machine's processor: bytes of weights per second, and operations per second.

Measured with the products that models use, over matrices that are larger than the caches together. Plans use it
(``inferd plan --devices this``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from inferd.native.ops import Linear
from inferd.native.quantized import by_output
from inferd.native.rounding import rounded_weight

_OUT, _IN = 4096, 2048
_BYTES: Final = 400_000_000
"""Of the matrices of a measurement together: what is read once is no longer in a cache when it is read again."""

_MANY_ROWS: Final = 256
_REPEATS: Final = 5

Weights = Literal["fp32", "fp16", "int8", "int4"]
"""Formats of weights that a processor computes with."""


class Rate(NamedTuple):
    """Of one format of weights."""

    bytes_s: float  # of weights, while a single row is multiplied, without the time of its arithmetic
    operations_s: float  # while many rows are; a product and a sum count as two


def measure(forms: Sequence[Weights] = ("fp16", "int8", "int4")) -> dict[Weights, Rate]:
    """The rates of formats, on as many threads as torch has. ``fp16`` is bfloat16. Takes about a second for each.

    A single thread is measured by its processor time, so that other processes change the result little.
    """
    with torch.inference_mode():
        return {form: _rate(form) for form in forms}


def _rate(form: Weights) -> Rate:
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(_OUT, _IN, generator=generator)

    def linear() -> Linear:
        match form:
            case "int8":
                return Linear.quantized(by_output(weight), dtype=dtype)
            case "int4":
                return Linear.quantized(rounded_weight(weight, 4, 64), dtype=dtype)  # as quantization: int4 has it
            case _:
                return Linear(weight.to(dtype))

    first = linear()
    matrices = [first, *(linear() for _ in range(max(1, _BYTES // first.nbytes) - 1))]
    one, many = torch.randn(1, _IN).to(dtype), torch.randn(_MANY_ROWS, _IN).to(dtype)
    some = matrices[: max(1, len(matrices) // 16)]
    streaming = _best(lambda: _multiply(matrices, one))
    computing = _best(lambda: _multiply(some, many))
    row = computing / (_MANY_ROWS * len(some))  # seconds of arithmetic of one row and one matrix
    return Rate(
        bytes_s=sum(matrix.nbytes for matrix in matrices) / max(streaming - row * len(matrices), streaming / 10),
        operations_s=2.0 * _OUT * _IN / row,
    )


def _multiply(matrices: Sequence[Linear], x: Tensor) -> None:
    for matrix in matrices:
        matrix(x)


def _best(run: Callable[[], None]) -> float:
    """Seconds of the fastest of some runs."""
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    seconds = []
    for _ in range(_REPEATS):
        begin = now()
        run()
        seconds.append(now() - begin)
    return min(seconds)
