"""What only a GPU can show, in one command.

    python -m bench.gpu [--only kernels answers one many] [--json gpu.json]

``kernels``: each against its plain twin on the CPU. ``answers``: the bundled model's greedy tokens and log-probabilities on
the device and on the CPU. ``one``: decoding one sequence of an 8B-shaped random model against the memory's bandwidth
measured in the same run, in bf16 with and without graphs, int8 and fp8. ``many``: 256 sequences against transformers'
continuous batching. Every line is printed and written as soon as it is there; the exit status is 1 where a check failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from bench.gpu import answers, decode, kernels
from bench.gpu.result import Result
from bench.gpu.shapes import LLAMA_8B

PARTS = ("kernels", "answers", "one", "many")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device that torch can use. See docs/gpu.md.", file=sys.stderr)
        return 2
    import triton

    from inferd.engine.cuda.device import CudaDevice

    device = CudaDevice(torch.device("cuda", 0))
    limit = decode.bandwidth(device.where)
    machine = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "bandwidth_GB_s": limit / 1e9,
    }
    print(machine)
    parts: dict[str, Callable[[], Iterator[Result]]] = {
        "kernels": lambda: kernels.measure(device.where, limit),
        "answers": lambda: answers.measure(device.where),
        "one": lambda: decode.measure_one(LLAMA_8B, device, limit),
        "many": lambda: decode.measure_many(LLAMA_8B, device),
    }
    found: list[Result] = []
    for part in asked.only:
        began = time.perf_counter()
        for result in parts[part]():
            found.append(result)
            print(result.line, flush=True)
            asked.json.write_text(json.dumps({"machine": machine, "results": [asdict(r) for r in found]}, indent=1))
        print(f"-- {part}: {time.perf_counter() - began:.0f} s", flush=True)
    return 1 if any(result.passed is False for result in found) else 0


if __name__ == "__main__":
    sys.exit(main())
