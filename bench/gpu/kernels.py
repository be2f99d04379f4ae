"""Every kernel against its plain twin in float32 on the CPU, and how fast decoding's attention reads keys and values."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bench.gpu.result import Result
from inferd.native import compiled, ops
from inferd.native.attention import FlatBatch, Scoring
from inferd.native.forms import Form
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import ReferenceAttention
from inferd.native.triton import eight_bit, rows, switch
from inferd.native.triton.attention import TritonAttention

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # largest error of numbers around 1
FORMS = [Form(8, 0, False), Form(8, 64, False), Form(8, 0, False, is_float=True)]
_SIZE = 16


Errors = Callable[[torch.device], Iterator[Result]]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(compute: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """The least of three means."""
    compute()
    wait(device)
    found = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(repetitions):
            compute()
        wait(device)
        found.append((time.perf_counter() - began) / repetitions)
    return min(found)


def batch_of(parts: list[tuple[int, int]], device: torch.device) -> tuple[FlatBatch, int]:
    """(computed, count) of each sequence; its blocks are shuffled among the others'."""
    needed = [-(-(computed + count) // _SIZE) for computed, count in parts]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    table = torch.zeros((len(parts), max(needed)), dtype=torch.int32)
    at = 0
    for row, n in zip(table, needed, strict=True):
        row[:n] = order[at : at + n]
        at += n
    positions = torch.cat([torch.arange(computed, computed + count) for computed, count in parts])
    counts = torch.tensor([count for _, count in parts])
    owner = torch.repeat_interleave(torch.arange(len(parts)), counts)
    slots = table[owner, positions // _SIZE].long() * _SIZE + positions % _SIZE
    batch = FlatBatch(
        token_ids=torch.zeros_like(positions).to(device),
        positions=positions.to(device),
        query_start=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32).to(device),
        seq_len=torch.tensor([computed + count for computed, count in parts], dtype=torch.int32).to(device),
        block_table=table.to(device),
        slots=slots.to(device),
        num_sequences=len(parts),
    )
    return batch, sum(needed)


def cache_of(
    num_blocks: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device, *, in_bytes: bool = False
) -> KVCache:
    cache = KVCache(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=_SIZE,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        device=device,
        in_bytes=in_bytes,
        in_rows=True,
    )
    slots = torch.arange(num_blocks * _SIZE)
    k, v = torch.randn((2, len(slots), kv_heads, dim), generator=torch.Generator().manual_seed(2)).to(dtype)
    for first in range(0, len(slots), 1 << 16):
        some = slice(first, first + (1 << 16))
        cache.write(0, slots[some].to(device), k[some].to(device), v[some].to(device))
    return cache


def attention_errors(device: torch.device, scale_down: int = 1) -> Iterator[Result]:
    """``scale_down``: divides lengths, for a trial on the CPU."""
    parts = [(2000, 1), (0, 300), (5, 1), (700, 77), (0, 1), (31, 17)]
    decodes = [(3000, 1), (15, 1), (16, 1), (0, 1), (900, 1)]
    cpu = torch.device("cpu")
    for kind, shape, dtype, window, softcap, in_bytes in itertools.chain(
        itertools.product(
            ("mixed", "decode"), ((32, 8, 128), (8, 8, 64), (12, 4, 80)), TOLERANCE, (None,), (None,), (False,)
        ),
        itertools.product(("mixed", "decode"), ((16, 8, 256),), (torch.bfloat16,), (None, 100), (50.0,), (False, True)),
    ):
        heads, kv_heads, dim = shape
        work = [(n // scale_down, max(count // scale_down, 1)) for n, count in (parts if kind == "mixed" else decodes)]
        batch, blocks = batch_of(work, device)
        twin_batch, _ = batch_of(work, cpu)
        q, k, v = (
            torch.randn((len(batch.positions), n, dim), generator=torch.Generator().manual_seed(n)).to(dtype)
            for n in (heads, kv_heads, kv_heads)
        )
        scoring = Scoring(dim**-0.5, window, softcap)
        cache = cache_of(blocks, kv_heads, dim, dtype, device, in_bytes=in_bytes)
        twin = cache_of(blocks, kv_heads, dim, dtype, cpu, in_bytes=in_bytes)
        found = TritonAttention(cache, batch)(0, q.to(device), k.to(device), v.to(device), scoring)
        expected = ReferenceAttention(twin, twin_batch)(0, q, k, v, scoring)
        name = f"attention {kind} {heads}/{kv_heads}x{dim} {_short(dtype)}"
        name += (
            f" window {window}" * (window is not None) + " softcap" * (softcap is not None) + " int8 cache" * in_bytes
        )
        yield error(name, found, expected, 5e-2 if in_bytes else TOLERANCE[dtype])


def row_errors(device: torch.device) -> Iterator[Result]:
    with compiled.using_level("none"):
        for dtype, tolerance in TOLERANCE.items():
            x, residual = (torch.randn(64, 4096, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (1, 2))
            weight = torch.rand(4096, generator=torch.Generator().manual_seed(3))
            there = [t.to(device) for t in (x, residual, weight)]
            name = _short(dtype)
            yield error(
                f"norm of a sum {name}",
                rows.add_rms_norm(there[0], there[1], there[2], 1e-5)[0],
                ops.add_rms_norm(x, residual, weight, 1e-5)[0],
                4 * tolerance,
            )
            yield error(
                f"norm {name}", rows.rms_norm(there[0], there[2], 1e-5), ops.rms_norm(x, weight, 1e-5), 4 * tolerance
            )
            for activation in ("silu", "gelu", "gelu_tanh"):
                yield error(
                    f"{activation} gate {name}",
                    rows.gate_and_mul(there[0], activation),
                    ops.gate_and_mul(x, activation),
                    8 * tolerance,
                )


def product_errors(device: torch.device) -> Iterator[Result]:
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)) / 512**0.5
    for form in FORMS:
        matrix = eight_bit.rounded_to(form, weight)
        there = eight_bit.EightBits(matrix.values.to(device), matrix.scale.to(device), matrix.group_size)
        for count in (1, 16, 33, 200):
            x = torch.randn(count, 512, generator=torch.Generator().manual_seed(1000 + count)).to(torch.bfloat16)
            linear = eight_bit.EightBitLinear.of(there, None, torch.bfloat16)
            rounds = form.is_float and count > 32 and eight_bit.has_float8(device)
            expected = eight_bit.plain_product(x, matrix, None, rounds=rounds)
            yield error(f"{form.name} product of {count} rows", linear(x.to(device)), expected, 4e-2)


def attention_speed(device: torch.device, bandwidth: float, scale_down: int = 1) -> Iterator[Result]:
    """Decoding's reads of keys and values, as a share of ``bandwidth`` in bytes/s."""
    for count, context in ((1, 8000), (1, 64000), (16, 4000), (256, 1000)):
        length = max(context // scale_down, 1)
        batch, blocks = batch_of([(length, 1)] * min(count, 256 // scale_down or 1), device)
        cache = cache_of(blocks, 8, 128, torch.bfloat16, device)
        q, k, v = (torch.randn((batch.num_sequences, n, 128), device=device).to(torch.bfloat16) for n in (32, 8, 8))
        attention = TritonAttention(cache, batch)
        took = seconds(partial(attention, 0, q, k, v, Scoring(0.1)), device, 20 if scale_down == 1 else 1)
        nbytes = batch.num_sequences * (length + 1) * 2 * 8 * 128 * 2
        yield Result(
            f"attention of {count} over {length}",
            nbytes / took / 1e9,
            "GB/s",
            of=nbytes / took / bandwidth,
            note="small ones lie in L2",
        )


def error(name: str, found: Tensor, expected: Tensor, most: float) -> Result:
    worst = float((found.cpu().float() - expected.float()).abs().max())
    return Result(name, worst, "largest error", passed=worst <= most, note=f"allowed {most:g}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measure(device: torch.device, bandwidth: float, scale_down: int = 1) -> Iterator[Result]:
    assert device.type == "cuda" or switch.is_interpreted()
    with torch.inference_mode():
        yield from attention_errors(device, scale_down)
        yield from row_errors(device)
        yield from product_errors(device)
        yield from attention_speed(device, bandwidth, scale_down)
