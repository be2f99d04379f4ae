"""What this machine's processor reaches with a model's products and attention: bytes and operations per second.

Measured with the products that models use, of the sizes and over as many bytes as the model has: what the caches hold
is read faster. Plans use it (``inferd plan --devices this``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from inferd.native.attention import FlatBatch, Scoring
from inferd.native.kv_cache import KVCache
from inferd.native.ops import Linear
from inferd.native.overlap import fitted
from inferd.native.paged_attention import create_attention
from inferd.native.quantized import by_output
from inferd.native.rounding import rounded_weight

LAYER: Final = ((4096, 2048), (2048, 4096))
"""(outputs, inputs) of the products of a layer, where no model is given."""

_BYTES: Final = 400_000_000
"""The most weights of a measurement: more than the caches of a core hold."""

_AREA: Final = 1 << 24
"""The most weights of a product of a measurement; a larger one is measured with fewer outputs."""

_FEW_ROWS: Final = (2, 4, 8, 16)  # as steps of decoding have
_MANY_ROWS: Final = 256
_REPEATS: Final = 5
_BLOCK: Final = 16
_CONTEXT: Final = 512  # tokens of each sequence whose keys and values are read
_SEQUENCES: Final = 16

Weights = Literal["fp32", "fp16", "int8", "int4"]
"""Formats of weights that a processor computes with."""


class Rate(NamedTuple):
    """Of one format of weights."""

    bytes_s: float  # of weights, while a single row is multiplied
    operations_s: float  # while many rows are multiplied; a product and a sum count as two
    overlap: float  # of reading and arithmetic of few rows (``native.overlap``)


class Heads(NamedTuple):
    """The heads of a model's attention."""

    num_heads: int
    num_kv_heads: int
    dim: int


def measure(
    forms: Sequence[Weights] = ("fp16", "int8", "int4"),
    layer: Sequence[tuple[int, int]] = LAYER,
    num_layers: int | None = None,
) -> dict[Weights, Rate]:
    """The rates of formats, on as many threads as torch has. ``fp16`` is bfloat16. Takes some seconds for each.

    ``layer``: (outputs, inputs) of each product of a layer; ``num_layers``: of the model, whose weights are read as
    often as they fit into a measurement; None: as many as do. A single thread is measured by its processor time, so
    that other processes change the result little.
    """
    with torch.inference_mode():
        return {form: _rate(form, layer, num_layers) for form in forms}


def cache_rate(heads: Heads) -> float:
    """Bytes of keys and values in bfloat16 that attention reads per second, one row of each of some sequences."""
    blocks = _CONTEXT // _BLOCK
    layers = max(1, _BYTES // 2 // (_SEQUENCES * _CONTEXT * 2 * heads.num_kv_heads * heads.dim * 2))
    with torch.inference_mode():
        cache = KVCache(
            num_layers=layers, num_blocks=_SEQUENCES * blocks, block_size=_BLOCK, num_kv_heads=heads.num_kv_heads,
            head_dim=heads.dim, dtype=torch.bfloat16, device=torch.device("cpu"),
        )  # fmt: skip
        for arena in (*cache.keys, *cache.values):
            arena.normal_()
        rows = torch.arange(_SEQUENCES)
        batch = FlatBatch(
            token_ids=rows,
            positions=torch.full((_SEQUENCES,), _CONTEXT - 1),
            query_start=torch.arange(_SEQUENCES + 1, dtype=torch.int32),
            seq_len=torch.full((_SEQUENCES,), _CONTEXT, dtype=torch.int32),
            block_table=torch.arange(_SEQUENCES * blocks, dtype=torch.int32).view(_SEQUENCES, blocks),
            slots=rows * _CONTEXT + _CONTEXT - 1,
            num_sequences=_SEQUENCES,
        )
        attention = create_attention("auto", cache, batch)
        q, k, v = (
            torch.randn(_SEQUENCES, count, heads.dim).bfloat16()
            for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        )
        scoring = Scoring(heads.dim**-0.5)
        seconds = _best(lambda: [attention(layer, q, k, v, scoring) for layer in range(layers)])
        return sum(arena.nbytes for arena in (*cache.keys, *cache.values)) / seconds


def _rate(form: Weights, layer: Sequence[tuple[int, int]], num_layers: int | None) -> Rate:
    generator = torch.Generator().manual_seed(1)
    sizes = [(min(out, max(64, _AREA // inputs // 64 * 64)), inputs) for out, inputs in layer]
    made = [_maker(form, torch.randn(*size, generator=generator)) for size in sizes]
    first = [make() for make in made]
    nbytes = sum(matrix.nbytes for matrix in first)
    most = max(1, _BYTES // nbytes)
    count = most if num_layers is None else min(num_layers, most)
    matrices = [*first, *(make() for _ in range(count - 1) for make in made)]

    def seconds(rows: int, over: Sequence[Linear]) -> float:
        inputs = {size: torch.randn(rows, size).to(first[0].dtype) for size in {inputs for _, inputs in sizes}}
        return _best(lambda: [matrix(inputs[matrix.in_features]) for matrix in over])

    # Seconds of the products of a layer, without those of the calls from Python, which a step has none of.
    call = seconds(1, [Linear(torch.zeros(1, size).to(first[0].dtype)) for _, size in sizes])

    def without_calls(measured: float) -> float:
        return max(measured - call, measured / 10)  # what disturbs one of the two measurements makes no rate negative

    row = without_calls(seconds(_MANY_ROWS, first)) / _MANY_ROWS
    one = without_calls(seconds(1, matrices) / count)
    few = {rows: without_calls(seconds(rows, matrices) / count) for rows in _FEW_ROWS}
    return Rate(
        bytes_s=nbytes / one,
        operations_s=2.0 * sum(out * inputs for out, inputs in sizes) / row,
        overlap=fitted((one, rows * row, few[rows]) for rows in _FEW_ROWS),
    )


def _maker(form: Weights, weight: Tensor) -> Callable[[], Linear]:
    """What makes a product of these weights, each time in memory of its own."""
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    match form:
        case "int8":
            integers = by_output(weight)
        case "int4":
            integers = rounded_weight(weight, 4, 64)  # as quantization: int4 has it
        case _:
            return lambda: Linear(weight.to(dtype, copy=True))
    return lambda: Linear.quantized(integers, dtype=dtype)


def _best(run: Callable[[], object]) -> float:
    """Seconds of the fastest of some runs."""
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    seconds = []
    for _ in range(_REPEATS):
        begin = now()
        run()
        seconds.append(now() - begin)
    return min(seconds)
