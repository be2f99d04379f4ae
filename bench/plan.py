"""How far a plan's speed and memory are from what this machine does.

    python -m bench.plan                     four shapes in three formats
    python -m bench.plan --shapes qwen3-0.6b --requests 1 8
    python -m bench.plan --write             also write src/inferd/planning/measured.json, which plans quote
    python -m bench.plan --memory            the resident memory of a full replica beside its plan

Checkpoints have random weights, because throughput does not depend on their values. Everything runs on one thread and
is measured by processor time, so other processes disturb it less; the rates of the machine (``native.roofline``) are
measured before the steps of each format, in turns with them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import save_file

from inferd import models
from inferd.checkpoints.architecture import read_config
from inferd.checkpoints.declared_tensors import declared_tensors
from inferd.checkpoints.decoder_config import Source
from inferd.cli.plan.command import this_machine
from inferd.config import KVCacheConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from inferd.engine.load import create_backend
from inferd.engine.model.layouts import Layout
from inferd.native.roofline import Weights
from inferd.planning.measured import Measured, Row
from inferd.planning.memory import plan_model
from inferd.planning.shape import of_folder
from inferd.planning.speed import step_seconds
from inferd.types import GenerateRequest, SamplingParams, TokenPrompt

_COMMON: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES: Final[dict[str, dict[str, int]]] = {
    "tiny-20m": {
        "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 24, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 64,
    },
    "wide-250m": {
        "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 7, "num_attention_heads": 16,
        "num_key_value_heads": 16, "head_dim": 96, "vocab_size": 32_000,
    },
    "smollm-360m": {
        "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15,
        "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 49_152,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    },
}  # fmt: skip
"""A model that waits for little but its kernels and the engine, and three between 250 and 600 million weights."""

FORMS: Final[tuple[Weights, ...]] = ("fp16", "int8", "int4")
PROMPT: Final = 64
STEPS: Final = 24
QUANTIZATION: Final = {"fp16": "none", "int8": "int8", "int4": "int4"}


def write_checkpoint(folder: Path, sizes: dict[str, int]) -> None:
    """A folder with random weights and the bundled model's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.path("demo") / name, folder / name)
    (folder / "config.json").write_text(json.dumps({**_COMMON, **sizes}))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(entry.shape, generator=generator).mul_(0.02).to(torch.bfloat16)
        for name, entry in declared_tensors(read_config(Source(folder / "config.json"))).items()
    }
    save_file(tensors, str(folder / "model.safetensors"))


def settings(folder: Path, form: Weights, *, cache_bytes: int = 200_000_000) -> ModelConfig:
    return ModelConfig(
        source=str(folder),
        dtype="bfloat16",
        quantization=QUANTIZATION[form],  # type: ignore[arg-type]
        quantization_cache_bytes=0,
        threads=1,
        max_model_len=1024,
        kv_cache=KVCacheConfig(memory_bytes=cache_bytes),
        scheduler=SchedulerConfig(max_num_seqs=16, prefix_caching=False),
        speculation=SpeculationConfig(method="none"),
    )


def decode_seconds(engine: Any, requests: int) -> float:
    """Processor seconds from a token to the next while ``requests`` prompts are answered together.

    That of the fastest fifth of the steps: rates are the fastest of five runs too.
    """
    sampling = SamplingParams(max_tokens=STEPS + 8, temperature=0.0, ignore_eos=True)
    for index in range(requests):
        prompt = TokenPrompt(token_ids=[3 + (7 * index + at) % 2000 for at in range(PROMPT)])
        request = GenerateRequest(
            id=f"{requests}-{index}",
            model="m",
            prompt=prompt,
            sampling=sampling,
            explicit=("max_tokens", "temperature"),
        )
        engine.add(engine.prepare(request), time.monotonic())
    begun: set[str] = set()
    seconds: list[float] = []
    ended = 0
    while ended < requests:
        before = time.process_time()
        outputs, _ = engine.step(time.monotonic())
        took = time.process_time() - before
        if len(begun) == requests and all(output.end is None for output in outputs):
            seconds.append(took)
        begun |= {output.request_id for output in outputs if output.deltas}
        ended += sum(output.end is not None for output in outputs)
    seconds.sort()
    return seconds[len(seconds) // 5]


def compare(names: Sequence[str], counts: Sequence[int]) -> list[Row]:
    rows = []
    layout = Layout(tensor=1, pipeline=1)
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / name
            write_checkpoint(folder, SHAPES[name])
            shape = of_folder(folder, name)
            for form in FORMS:
                engine = create_backend("m", settings(folder, form), lambda *_: None)
                device = this_machine(shape, (form,))
                for requests in counts:
                    measured = decode_seconds(engine, requests)
                    step = step_seconds(shape, form, requests, PROMPT + STEPS / 2, layout, device)
                    row = Row(
                        model=name, form=form, requests=requests, estimated=round(requests / step, 2),
                        measured=round(requests / measured, 2),
                    )  # fmt: skip
                    rows.append(row)
                    print(
                        f"{name:14}{form:6}{requests:3} requests  estimated {row.estimated:8.1f} tokens/s  "
                        f"measured {row.measured:8.1f}  {100 * row.error:+5.1f} %  "
                        f"({device.stream(form) / 1e9:.1f} GB/s, {device.operations(form) / 1e9:.0f} GFLOPS, overlap "
                        f"{device.overlap(form):.2f}, cache {device.cache_stream / 1e9:.1f} GB/s)",
                        flush=True,
                    )
                engine.close()
    return rows


_FULL: Final = """
import sys, time
from pathlib import Path
from bench.plan import decode_seconds, settings
from inferd.engine.load import create_backend
from inferd.machine.memory import rss_bytes
engine = create_backend("m", settings(Path(sys.argv[1]), sys.argv[2], cache_bytes=int(sys.argv[3])), lambda *_: None)
decode_seconds(engine, 8)
for arena in (*engine._runner.cache.keys, *engine._runner.cache.values):
    arena.zero_()
print(rss_bytes())
"""


def memory(cache_bytes: int = 1_000_000_000) -> None:
    """The resident memory of a replica whose cache is full, in a process of its own, beside its plan."""
    for name, form in zip(list(SHAPES)[1:], FORMS, strict=True):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / name
            write_checkpoint(folder, SHAPES[name])
            estimate = plan_model("m", settings(folder, form, cache_bytes=cache_bytes))
            assert estimate is not None
            ran = subprocess.run(
                [sys.executable, "-c", _FULL, str(folder), form, str(cache_bytes)],
                capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
            resident = int(ran.stdout)
            print(
                f"{name:14}{form:6} planned {estimate.total_bytes / 1e6:7.0f} MB  resident {resident / 1e6:7.0f} MB  "
                f"{100 * (estimate.total_bytes / resident - 1):+5.1f} %",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write what plans quote")
    parser.add_argument("--memory", action="store_true", help="compare memory instead of speed")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    words = parser.parse_args()
    torch.set_num_threads(1)
    if words.memory:
        memory()
        return
    rows = compare(words.shapes, words.requests)
    found = Measured(machine=_machine(), date=str(datetime.date.today()), rows=tuple(rows))
    print(f"within {found.within} on {found.machine}")
    if words.write:
        path = Path(__file__).resolve().parent.parent / "src/inferd/planning/measured.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
    ]
    return f"one thread of {names[0] if names else platform.processor()}"


if __name__ == "__main__":
    main()
