"""Matrix products of one layer stack: our packed kernel against torch, interleaved, medians.

    python bench/micro_linear.py [--rows 1 8 32 128 512]

Enough different weights are used in turn that none stays in a cache. Times are microseconds per product;
with OMP_NUM_THREADS=1 it is the thread's own time, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from inferd.engine import native

SHAPES = {
    "qkv": (4096, 1024),
    "o": (1024, 2048),
    "gate_up": (6144, 1024),
    "down": (1024, 3072),
    "lm_head": (151_936, 1024),
}


@dataclass(slots=True)
class Products:
    """x [rows, in] times one of the weights, in each contestant's way."""

    x: torch.Tensor
    result: torch.Tensor
    weights: list[torch.Tensor]
    packed: list[native.PackedWeight]
    onednn: list[torch.Tensor]

    def ours(self, i: int) -> None:
        self.packed[i].product(self.x, torch.bfloat16)

    def plain(self, i: int) -> None:
        F.linear(self.x, self.weights[i])

    def prepacked(self, i: int) -> None:
        torch.ops.mkldnn._linear_pointwise(self.x, self.onednn[i], None, "none", [], "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--shapes", nargs="+", default=["qkv", "o", "gate_up", "down"])
    parser.add_argument("--level", default="")
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    if options.level:
        native.kernels.use_level(options.level)
    threads = torch.get_num_threads()
    # On a machine that does other work too, only one thread's own time says something.
    timer = time.thread_time if threads == 1 else time.perf_counter
    for name in options.shapes:
        out, size = SHAPES[name]
        copies = max(1, min(24, 150_000_000 // (out * size * 2)))
        weights = [torch.randn(out, size, dtype=torch.bfloat16) for _ in range(copies)]
        began = time.perf_counter()
        packed = [native.PackedWeight([w]) for w in weights]
        pack_s = time.perf_counter() - began
        onednn = [torch.ops.mkldnn._reorder_linear_weight(w, 32) for w in weights]
        print(f"{name} {out}x{size}, {copies} copies, packed at {copies * out * size * 2 / pack_s / 1e9:.1f} GB/s")
        for rows in options.rows:
            x = torch.randn(rows, size, dtype=torch.bfloat16)
            result = torch.empty(rows, out, dtype=torch.bfloat16)

            products = Products(x, result, weights, packed, onednn)
            products.ours(0)
            expected = F.linear(x.float(), weights[0].float())
            error = ((result.float() - expected).abs().max() / expected.abs().max()).item()
            contestants: dict[str, Callable[[int], None]] = {
                "ours": products.ours,
                "plain": products.plain,
                "prepacked": products.prepacked,
            }
            seen: dict[str, list[float]] = {key: [] for key in contestants}
            for _ in range(options.repeat):
                for key, call in contestants.items():
                    began = timer()
                    for i in range(copies):
                        call(i)
                    seen[key].append((timer() - began) / copies * 1e6)
            us = {key: statistics.median(values) for key, values in seen.items()}
            best = {key: min(values) for key, values in seen.items()}
            flops = 2 * rows * out * size
            print(
                f"  {rows:4d} rows  "
                + "  ".join(f"{key} {us[key]:9.1f} (best {best[key]:9.1f})" for key in contestants)
                + f"  ours {flops / us['ours'] / 1e3:6.0f} GFLOP/s {out * size * 2 / us['ours'] / 1e3:5.1f} GB/s"
                + f"  prepacked/ours {us['prepacked'] / us['ours']:.2f} plain/ours {us['plain'] / us['ours']:.2f}  err {error:.1e}"
            )


if __name__ == "__main__":
    main()
