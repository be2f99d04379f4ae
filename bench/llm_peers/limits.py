"""What the machine can do: bytes read per second, and products per second. Measured beside the engines, in the same run.

    python -m bench.llm_peers.limits [--threads 2]

The best of several attempts: what neighbours take is no limit of the machine. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import mmap
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

SHAPE = (512, 1024, 6144)  # rows, in, out: a prompt's chunk and the widest matrix of the 0.6B shape
SQUARE = (2048, 2048, 2048)


def best(call: Callable[[], object], attempts: int) -> float:
    """Seconds of the fastest."""
    found = []
    for _ in range(attempts):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


class Reading:
    """Reading float32 that no cache holds, in large pages where the system has them, by whichever reduction is fastest:
    a sum alone stays a quarter below what memory gives."""

    def __init__(self, gigabytes: float) -> None:
        count = int(gigabytes * 2**28)
        memory = mmap.mmap(-1, count * 4)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._values = torch.frombuffer(memory, dtype=torch.float32)
        self._values.fill_(1.0)
        first, second = self._values[: count // 2], self._values[count // 2 : count // 2 * 2]
        self._ways: tuple[Callable[[], object], ...] = (
            self._values.sum,
            self._values.max,
            lambda: torch.dot(first, second),
        )

    def gb_per_s(self, attempts: int) -> float:
        """The best of so many attempts of each way."""
        return self._values.nbytes / min(best(way, attempts) for way in self._ways) / 1e9


def bf16_gflop_per_s() -> float:
    def rate(rows: int, inner: int, outer: int) -> float:
        x, weight = torch.randn(rows, inner).bfloat16(), torch.randn(outer, inner).bfloat16()
        return 2 * rows * inner * outer / best(lambda: F.linear(x, weight), 13) / 1e9

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

        return 2 * rows * inner * outer / best(product, 13) / 1e9

    return max(rate(*SHAPE), rate(*SQUARE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--gigabytes", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        found = {
            "read_gb_per_s": Reading(options.gigabytes).gb_per_s(8),
            "bf16_gflop_per_s": bf16_gflop_per_s(),
            "int8_gop_per_s": int8_gop_per_s(),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
