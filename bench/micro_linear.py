"""Matrix products of one layer stack in every format of weights: our kernels against torch's and against the machine.

    OMP_NUM_THREADS=1 python bench/micro_linear.py [--rows 1 8 32 128] [--shapes qkv gate_up] [--formats bf16]

Enough different weights are used in turn that none stays in a cache; contestants take turns, and the least of several
rounds counts. Bandwidth is measured beside them (torch's sum over 200 MB), as are torch's bfloat16 product and oneDNN's
product of bytes (u8 x int8) of 512 rows, so that a table's shares of the limits are of the same minute. With OMP_NUM_THREADS=1 times are the thread's own, which a busy
machine disturbs less. ``torch`` is F.linear for bf16, ``_weight_int8pack_mm`` for int8 (bf16 activations) and
``qlinear`` oneDNN's u8 x int8 product without the quantisation of activations, which ours includes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from inferd.native import compiled, ops
from inferd.native.rounding import rounded_weight

SHAPES = {
    "qkv": (4096, 1024),
    "o": (1024, 2048),
    "gate_up": (6144, 1024),
    "down": (1024, 3072),
    "lm_head": (151_936, 1024),
}
FORMS = {"int8": (8, 0), "int8/128": (8, 128), "int4/32": (4, 32), "int4/64": (4, 64), "int4/128": (4, 128)}
SPREAD_BYTES = 60_000_000  # of one format's weights, more than caches hold

Call = Callable[[torch.Tensor], object]


class Contestant:
    """One way to multiply with any of several weights; ``nbytes`` are of one."""

    def __init__(self, calls: list[Call], nbytes: int) -> None:
        self.calls, self.nbytes = calls, nbytes
        self.best_s = float("inf")

    def round(self, x: torch.Tensor, clock: Callable[[], float]) -> None:
        began = clock()
        for call in self.calls:
            call(x)
        self.best_s = min(self.best_s, (clock() - began) / len(self.calls))


def contestants(out: int, size: int, formats: list[str]) -> dict[str, Contestant]:
    """Ours in bf16, which the table's last column is of, torch's, and those of the other ``formats``."""

    def several(item_bits: float) -> int:
        return max(2, min(32, int(SPREAD_BYTES / (out * size * item_bits / 8))))

    weight = torch.randn(out, size, dtype=torch.bfloat16) * 0.02
    plain = [weight.clone() for _ in range(several(16))]
    found = {"bf16": ours([ops.Linear(each) for each in plain])}
    found["bf16 torch"] = Contestant([lambda x, w=w: F.linear(x, w) for w in plain], plain[0].nbytes)
    for name, (bits, group) in FORMS.items():
        if name not in formats:
            continue
        integers = rounded_weight(weight, bits, group)
        found[name] = ours([ops.Linear.quantized(integers) for _ in range(several(bits))])
    if "int8" not in formats:
        return found
    integers = rounded_weight(weight, 8, 0)
    values = [integers.values.clone() for _ in range(several(8))]
    scale = integers.scale.squeeze(1).bfloat16()
    found["int8 torch"] = Contestant(
        [lambda x, w=w: torch.ops.aten._weight_int8pack_mm(x, w, scale) for w in values], values[0].nbytes
    )
    packed = [torch.ops.onednn.qlinear_prepack(w, None) for w in values]
    scales, zeros = integers.scale.squeeze(1), torch.zeros(out, dtype=torch.int64)

    def qlinear(x: torch.Tensor, w: torch.Tensor) -> object:
        return torch.ops.onednn.qlinear_pointwise(
            torch.full(x.shape, 131, dtype=torch.uint8), 0.1, 128, w, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )  # fmt: skip

    found["int8 qlinear"] = Contestant([lambda x, w=w: qlinear(x, w) for w in packed], values[0].nbytes)
    return found


def ours(linears: list[ops.Linear]) -> Contestant:
    return Contestant([lambda x, linear=linear: linear(x) for linear in linears], linears[0].nbytes)


def limits(clock: Callable[[], float]) -> tuple[float, float, float]:
    """Bytes a second that are read, and operations (a multiply-add is two) a second of bfloat16 in torch and of bytes in oneDNN."""
    memory = torch.zeros(25_000_000, dtype=torch.int64)
    a, b = torch.randn(512, 2048, dtype=torch.bfloat16), torch.randn(2048, 2048, dtype=torch.bfloat16)
    whole, middle = torch.full((512, 2048), 131, dtype=torch.uint8), torch.zeros(2048, dtype=torch.int64)
    packed = torch.ops.onednn.qlinear_prepack(torch.randint(-127, 127, (2048, 2048), dtype=torch.int8), None)
    scale = torch.full((2048,), 0.01)
    read = product = of_bytes = float("inf")
    for _ in range(5):
        began = clock()
        memory.sum()
        read = min(read, clock() - began)
        began = clock()
        F.linear(a, b)
        product = min(product, clock() - began)
        began = clock()
        torch.ops.onednn.qlinear_pointwise(
            whole, 0.1, 128, packed, scale, middle, None, 1.0, 0, torch.float32, "none", [], ""
        )  # fmt: skip
        of_bytes = min(of_bytes, clock() - began)
    work = 2 * 512 * 2048 * 2048
    return memory.nbytes / read, work / product, work / of_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 128, 512])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qkv", "o", "gate_up", "down"])
    parser.add_argument("--formats", nargs="+", choices=["bf16", *FORMS], default=["bf16", *FORMS])
    parser.add_argument("--level", default=compiled.level())
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    with compiled.using_level(options.level), torch.inference_mode():
        for name in options.shapes:
            out, size = SHAPES[name]
            for rows in options.rows:
                x = torch.randn(rows, size, dtype=torch.bfloat16)
                taking_part = contestants(out, size, options.formats)
                for _ in range(options.repeat):
                    for one in taking_part.values():
                        one.round(x, clock)
                read, product, of_bytes = limits(clock)
                base = taking_part["bf16"].best_s
                print(
                    f"\n{name} {out} x {size}, {rows} rows; limits: {read / 1e9:.1f} GB/s, "
                    f"bf16 {product / 1e9:.0f} GFLOP/s, int8 {of_bytes / 1e9:.0f} GOP/s"
                )
                print(
                    "| weights | us | GB/s | of the bandwidth | GOP/s | of torch's bf16 | of oneDNN's int8 | bf16's time / this |"
                )
                print("| --- | --- | --- | --- | --- | --- | --- | --- |")
                for label, one in taking_part.items():
                    bandwidth, rate = one.nbytes / one.best_s, 2 * rows * out * size / one.best_s
                    print(
                        f"| {label} | {one.best_s * 1e6:.0f} | {bandwidth / 1e9:.1f} | {bandwidth / read:.0%} | "
                        f"{rate / 1e9:.0f} | {rate / product:.2f} | {rate / of_bytes:.2f} | {base / one.best_s:.2f} |"
                    )


if __name__ == "__main__":
    main()
