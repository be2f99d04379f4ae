"""Attention and the operations between matrix products: native against torch, interleaved, medians.

    OMP_NUM_THREADS=1 python bench/micro_ops.py

The shape is Qwen3-0.6B's: 16 heads, 8 key/value heads of 128, hidden 1024, intermediate 3072, bf16. Times are
microseconds per call of one layer; with one thread it is the thread's own time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from inferd.engine.sampler import Sampler, SampleRow
from inferd.native import compiled, ops
from inferd.native.attention import FlatBatch, Scoring
from inferd.native.kv_cache import KVCache
from inferd.native.paged_attention import NativeAttention, ReferenceAttention
from inferd.types import SamplingParams

HEADS, KV_HEADS, DIM, HIDDEN, INTERMEDIATE, BLOCK = 16, 8, 128, 1024, 3072, 16
LAYERS, VOCAB = 28, 151_936
BF16 = torch.bfloat16


def compare(name: str, calls: dict[str, Callable[[], object]], repeat: int = 9, inner: int = 10) -> None:
    timer = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seen: dict[str, list[float]] = {key: [] for key in calls}
    for _ in range(repeat):
        for key, call in calls.items():
            began = timer()
            for _ in range(inner):
                call()
            seen[key].append((timer() - began) / inner * 1e6)
    us = {key: statistics.median(values) for key, values in seen.items()}
    ours = us["native"]
    print(
        f"{name:34s} "
        + "  ".join(
            f"{key} {value:9.1f}" + ("" if key == "native" else f" (x{value / ours:.2f})") for key, value in us.items()
        )
    )


def batch_of(sequences: int, length: int, count: int) -> FlatBatch:
    blocks = -(-length // BLOCK)
    table = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    positions = torch.arange(length - count, length).repeat(sequences)
    owner = torch.repeat_interleave(torch.arange(sequences), count)
    return FlatBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        query_start=torch.arange(0, sequences * count + 1, count, dtype=torch.int32),
        seq_len=torch.full((sequences,), length, dtype=torch.int32),
        block_table=table,
        slots=table[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK,
        num_sequences=sequences,
    )


def attention(sequences: int, length: int, count: int) -> None:
    batch = batch_of(sequences, length, count)
    cache = KVCache(
        num_layers=1,
        num_blocks=batch.block_table.numel(),
        block_size=BLOCK,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=BF16,
        device=torch.device("cpu"),
    )
    slots = torch.arange(cache.num_blocks * BLOCK)
    cache.write(0, slots, *torch.randn(2, len(slots), KV_HEADS, DIM, dtype=BF16))
    rows = sequences * count
    q, k, v = (torch.randn(rows, heads, DIM, dtype=BF16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    # What torch offers, given contiguous keys and values for nothing.
    dense_q = q.view(sequences, count, HEADS, DIM).transpose(1, 2)
    dense_k, dense_v = (torch.randn(sequences, KV_HEADS, length, DIM, dtype=BF16) for _ in range(2))
    mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(dense_q, dense_k, dense_v, attn_mask=mask, scale=0.1, enable_gqa=True)

    compare(
        f"attention {sequences} x {count} of {length}",
        {
            "native": lambda: NativeAttention(cache, batch)(0, q, k, v, Scoring(0.1)),
            "reference": lambda: ReferenceAttention(cache, batch)(0, q, k, v, Scoring(0.1)),
            "sdpa": sdpa,
        },
        repeat=5,
        inner=5,
    )


def decode(sequences: int, length: int, in_bytes: bool) -> None:
    """A step's attention in ``LAYERS`` layers that have left the caches, against reading as many bytes."""
    batch = batch_of(sequences, length, 1)
    cache = KVCache(
        num_layers=LAYERS,
        num_blocks=batch.block_table.numel(),
        block_size=BLOCK,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=BF16,
        device=torch.device("cpu"),
        in_bytes=in_bytes,
    )
    k, v = torch.randn(2, cache.num_blocks * BLOCK, KV_HEADS, DIM, dtype=BF16)
    for layer in range(LAYERS):
        cache.write(layer, torch.arange(len(k)), k, v)
    q, k, v = (torch.randn(sequences, heads, DIM, dtype=BF16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    arenas = (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales)
    step_bytes = sum(arena.nbytes for arena in arenas) * length / (-(-length // BLOCK) * BLOCK)
    memory = torch.ones(1 << 26)
    timer = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = [math.inf, math.inf]
    for _ in range(12):
        began = timer()
        for layer in range(LAYERS):
            NativeAttention(cache, batch)(layer, q, k, v, Scoring(0.1))
        between_them = timer()
        memory.sum()
        best = [min(best[0], between_them - began), min(best[1], timer() - between_them)]
    reached, limit = step_bytes / best[0] / 1e9, memory.nbytes / best[1] / 1e9
    print(
        f"decode {sequences} x {length}, {'int8' if in_bytes else 'bf16'} cache: {best[0] * 1e3:7.2f} ms in {LAYERS} layers, "
        f"{reached:5.1f} GB/s of {limit:5.1f} ({reached / limit:.0%})"
    )


def sampling(rows: int) -> None:
    """Tokens of a vocabulary of 151,936 from likely ones (as of a trained model) and from flat ones (a random model's)."""
    noise = torch.Generator().manual_seed(0)
    flat = torch.randn(rows, VOCAB, generator=noise)
    likely = (
        2.2 * torch.randn(rows, VOCAB, generator=noise) - torch.rand(rows, VOCAB, generator=noise).clamp_(1e-9).log_()
    )
    sampler = Sampler(VOCAB)
    for name, params in {
        "greedy": SamplingParams(temperature=0.0),
        "t 0.7 top_p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
        "t 0.7 top_k 50": SamplingParams(temperature=0.7, top_k=50),
        "t 0.7": SamplingParams(temperature=0.7),
    }.items():
        wanted = [SampleRow(params, [1, 2], [3], seed, 0) for seed in range(rows)]
        for shape, logits in (("likely", likely), ("flat", flat)):

            def native_call(logits: Tensor = logits, wanted: list[SampleRow] = wanted) -> object:
                return sampler.draw(logits, wanted).results

            def torch_call(logits: Tensor = logits, wanted: list[SampleRow] = wanted) -> object:
                with compiled.using_level("none"):
                    return sampler.draw(logits, wanted).results

            compare(f"{name}, {rows} rows, {shape}", {"native": native_call, "torch": torch_call}, repeat=3, inner=1)


def between(rows: int) -> None:
    x, residual = torch.randn(rows, HIDDEN, dtype=BF16), torch.randn(rows, HIDDEN, dtype=BF16)
    weight, head_weight = torch.ones(HIDDEN, dtype=BF16), torch.ones(DIM, dtype=BF16)
    gate_up = torch.randn(rows, 2 * INTERMEDIATE, dtype=BF16)
    q, k = torch.randn(rows, HEADS, DIM, dtype=BF16), torch.randn(rows, KV_HEADS, DIM, dtype=BF16)
    positions = torch.arange(rows)
    cos, sin = torch.rand(4096, DIM // 2), torch.rand(4096, DIM // 2)

    def off(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with compiled.using_level("none"):
                return call()

        return run

    calls: dict[str, Callable[[], object]] = {
        "rms_norm": lambda: ops.rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda: ops.add_rms_norm(x, residual, weight, 1e-6),
        "rms_norm of heads": lambda: ops.rms_norm(q, head_weight, 1e-6),
        "gate_and_mul": lambda: ops.gate_and_mul(gate_up, "silu"),
        "rotary": lambda: ops.rotary(q, k, positions, cos, sin),
    }
    for name, call in calls.items():
        compare(f"{name}, {rows} rows", {"native": call, "torch": off(call)})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["attention", "decode", "sampling", "between"])
    options = parser.parse_args()
    print(f"level {compiled.level()}, {torch.get_num_threads()} threads")
    wanted = (options.only,) if options.only else ("attention", "decode", "sampling", "between")
    if "attention" in wanted:
        for shape in (
            (1, 192, 1),
            (8, 192, 1),
            (32, 192, 1),
            (1, 4096, 1),
            (1, 128, 128),
            (4, 128, 128),
            (1, 4096, 512),
        ):
            attention(*shape)
    if "decode" in wanted:
        for in_bytes in (False, True):
            for sequences, length in ((1, 140), (8, 140), (32, 140), (1, 4000)):
                decode(sequences, length, in_bytes)
    if "sampling" in wanted:
        sampling(32)
    if "between" in wanted:
        for rows in (1, 8, 32, 512):
            between(rows)


if __name__ == "__main__":
    main()
