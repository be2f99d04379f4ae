"""What the machine can do: bytes read per second, and products per second. Measured beside the engines, in the same run.

    python -m bench.llm_peers.limits [--threads 2]

The best of several attempts: what neighbours take is no limit of the machine. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

SHAPE = (512, 1024, 6144)  # rows, in, out: a prompt's chunk and the widest matrix of the 0.6B shape
SQUARE = (2048, 2048, 2048)


def best(call: Callable[[], object], attempts: int) -> float:
    """Seconds of the fastest."""
    call()
    found = []
    for _ in range(attempts):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def read_gb_per_s(gigabytes: float) -> float:
    """Summing float32 that no cache holds."""
    values = torch.ones(int(gigabytes * 2**28))
    return values.nbytes / best(values.sum, 12) / 1e9


def bf16_gflop_per_s() -> float:
    def rate(rows: int, inner: int, outer: int) -> float:
        x, weight = torch.randn(rows, inner).bfloat16(), torch.randn(outer, inner).bfloat16()
        return 2 * rows * inner * outer / best(lambda: F.linear(x, weight), 12) / 1e9

    return max(rate(*SHAPE), rate(*SQUARE))


def int8_gop_per_s() -> float:
    """u8 times s8 through oneDNN; the reference path, many times slower, where it lacks instructions."""

    def rate(rows: int, inner: int, outer: int) -> float:
        x = torch.randint(0, 255, (rows, inner), dtype=torch.uint8)
        packed = torch.ops.onednn.qlinear_prepack(torch.randint(-127, 127, (outer, inner), dtype=torch.int8), None)
        scale, zero = torch.full((outer,), 0.01), torch.zeros(outer, dtype=torch.int64)

        def product() -> object:
            return torch.ops.onednn.qlinear_pointwise(
                x, 0.01, 128, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
            )

        return 2 * rows * inner * outer / best(product, 12) / 1e9

    return max(rate(*SHAPE), rate(*SQUARE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--gigabytes", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        found = {
            "read_gb_per_s": read_gb_per_s(options.gigabytes),
            "bf16_gflop_per_s": bf16_gflop_per_s(),
            "int8_gop_per_s": int8_gop_per_s(),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
