"""Compiles the kernels for a GPU on a machine that has none: everything but running them.

    TRITON_INTERPRET=0 python -m bench.gpu.compile [--capability 90] [--few]

What is compiled is what the engine launches: the launches are taken down instead of done, with their own tile sizes, number formats
and options. Triton brings NVIDIA's assembler, which tells registers, spilled bytes and shared memory of each; a kernel that
spills, or needs more shared memory than the device has, is marked.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.kernels import FORMS, batch_of, cache_of
from inferd.native.attention import HeadTransform, Scoring
from inferd.native.triton import attention, eight_bit, rows
from inferd.native.triton.kernels import attention as attention_kernels
from inferd.native.triton.kernels import products as product_kernels
from inferd.native.triton.kernels import rows as row_kernels

# Bytes of shared memory that a block of threads may have, by compute capability.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
_PROCESSORS = 132  # of the device that is compiled for, as launches depend on it


@dataclass(frozen=True, slots=True)
class Compiled:
    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


class _Launches:
    """Stands in for a kernel: compiles what it is launched with."""

    def __init__(self, kernel: Any, capability: int, found: dict[str, Compiled]) -> None:
        self._kernel, self._capability, self._found = kernel, capability, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compile

    def _compile(self, *given: object, **named: object) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self._kernel.arg_names
        options = {key: named.pop(key) for key in list(named) if key not in names}
        values = {**dict(zip(names, given, strict=False)), **named}
        signature, constants, hints = {}, {}, {}
        for at, name in enumerate(names):
            value = values[name]
            if isinstance(value, torch.Tensor):
                signature[name] = "*" + _TYPES[value.dtype]
                hints[(at,)] = [["tt.divisibility", 16]]
            elif value is None or self._kernel.params[at].is_constexpr:
                signature[name], constants[(at,)] = "constexpr", value
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
        label = " ".join(
            [
                self._kernel.__name__,
                *sorted(set(signature.values()) & {f"*{kind}" for kind in ("bf16", "fp16", "i8", "fp8e4nv")}),
            ]
            + [f"{key}={values[key]}" for key in names if key.isupper() and key not in ("KV_HEADS", "WIDE")]
        )
        if label in self._found:
            return
        source = ASTSource(self._kernel, signature, constants, hints)
        made = triton.compile(source, target=GPUTarget("cuda", self._capability, 32), options=options)
        self._found[label] = _told(label, made, self._capability)


def _told(label: str, made: Any, capability: int) -> Compiled:
    """What the assembler says of a kernel."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(made.asm["ptx"])
        architecture = re.search(r"\.target (\w+)", made.asm["ptx"])
        assert architecture is not None
        command = [
            triton.knobs.nvidia.ptxas.path,
            "-v",
            f"--gpu-name={architecture[1]}",
            "-o",
            str(source) + ".o",
            str(source),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None, said
    return Compiled(label, int(registers[1]), int(spilled[1]) if spilled else 0, int(made.metadata.shared))


def compile_all(capability: int, *, few: bool = False) -> list[Compiled]:
    """Every kernel as a model of 32 heads would launch it; ``few``: once each."""
    found: dict[str, Compiled] = {}
    for module, names in (
        (attention_kernels, ("attend", "combine")),
        (row_kernels, ("norm", "gate", "turn_and_write")),
        (product_kernels, ("product",)),
    ):
        for name in names:
            setattr(module, name, _Launches(getattr(module, name), capability, found))
    attention.num_processors.cache_clear()
    attention.num_processors = eight_bit.num_processors = lambda device: _PROCESSORS  # type: ignore[assignment]
    _attend(few)
    for dtype in (torch.bfloat16,) if few else (torch.bfloat16, torch.float16, torch.float32):
        _other(dtype, few)
    return list(found.values())


def _attend(few: bool) -> None:
    cpu = torch.device("cpu")
    shapes = [(32, 8, 128, torch.bfloat16)]
    if not few:
        shapes += [(32, 8, 128, torch.float16), (32, 8, 128, torch.float32), (12, 12, 64, torch.bfloat16)]
        shapes += [(16, 8, 256, torch.bfloat16), (32, 32, 80, torch.bfloat16)]
    for heads, kv_heads, dim, dtype in shapes:
        for in_bytes in (False, True) if dtype == torch.bfloat16 and dim % 32 == 0 else (False,):
            for parts in ([(30, 1)], [(5, 40)], [(0, 1000)]):
                batch, blocks = batch_of(parts, cpu)
                cache = cache_of(blocks, kv_heads, dim, dtype, cpu, in_bytes=in_bytes)
                qkv = torch.zeros((len(batch.positions), (heads + 2 * kv_heads) * dim), dtype=dtype)
                norm, table = torch.ones(dim), torch.zeros((2, dim // 2))
                options = (None, None) if few or heads != 16 else (1024, 50.0)
                attention.TritonAttention(cache, batch).projected(
                    0,
                    qkv,
                    heads,
                    HeadTransform((norm, norm), 1e-5, (table, table)),
                    Scoring(0.1, *options),
                )
            if few:
                break


def _other(dtype: torch.dtype, few: bool) -> None:
    x, weight = torch.zeros((2, 4096), dtype=dtype), torch.ones(4096, dtype=dtype)
    rows.add_rms_norm(x, x, weight, 1e-5)
    rows.rms_norm(x, weight, 1e-5)
    for activation in ("silu",) if few else ("silu", "gelu", "gelu_tanh"):
        rows.gate_and_mul(x, activation)
    for form in FORMS[2:] if few else FORMS:
        matrix = eight_bit.rounded_to(form, torch.ones((4096, 4096)))
        for count in (1,) if few else (1, 64):
            eight_bit.triton_product(torch.zeros((count, 4096), dtype=dtype), matrix, None, dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, choices=sorted(SHARED_BYTES), default=90)
    parser.add_argument("--few", action="store_true", help="each kernel once")
    asked = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("Triton is told to interpret: unset TRITON_INTERPRET.", file=sys.stderr)
        return 2
    most, failed = SHARED_BYTES[asked.capability], 0
    for one in compile_all(asked.capability, few=asked.few):
        wrong = one.shared_bytes > most
        failed += wrong
        mark = "TOO MUCH SHARED MEMORY" if wrong else "spills" if one.spilled_bytes else ""
        print(
            f"{one.registers:>4} registers {one.spilled_bytes:>6} B spilled {one.shared_bytes:>7} B shared  {one.name}  {mark}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
