"""What micro-batches save: ``python -m bench.stages [--layers 28] [--rows 32 128 512] [--rounds 4]``.

A model of Qwen3-0.6B's shape with random weights is divided between two processes of one thread each (``parallel:
{pipeline: 2}``). Prompts alternate between steps that are cut into micro-batches and steps in which the stages take
turns. The arithmetic is the same. Prints Markdown: the medians of both, their ratio, and what the ratio is by the
arithmetic of turns alone. Two cores and 4 GB are needed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.ranks import SHAPE
from bench.report import markdown
from inferd.config import KVCacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, SpeculationConfig
from inferd.engine import load
from inferd.engine.ranks import cut, lead
from inferd.types import GenerateRequest, SamplingParams, TokenPrompt


def prompt_s(engine: Any, rows: int, number: str) -> float:
    """Seconds of the step that computes a prompt and its first token."""
    prompt = TokenPrompt(token_ids=[3 + 7 * at % 2000 for at in range(rows)])
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(
        id=number, model="m", prompt=prompt, sampling=sampling, explicit=("max_tokens", "temperature")
    )
    engine.add(engine.prepare(request), time.monotonic())
    began = time.perf_counter()
    (output,), stats = engine.step(time.monotonic())
    taken = time.perf_counter() - began
    assert output.end is not None
    assert stats.step_tokens == rows
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128, 512], help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--quantization", default="none")
    words = parser.parse_args()
    sizes = {**SHAPE, "num_hidden_layers": words.layers}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        writes = f"from pathlib import Path; from bench.plan import write_checkpoint; write_checkpoint(Path({str(folder)!r}), {sizes})"
        subprocess.run([sys.executable, "-c", writes], check=True)
        config = ModelConfig(
            source=str(folder),
            dtype="bfloat16",
            quantization=words.quantization,
            threads=1,
            max_model_len=1024,
            parallel=ParallelConfig(pipeline=2),
            kv_cache=KVCacheConfig(memory_bytes=200_000_000),
            scheduler=SchedulerConfig(max_num_batched_tokens=1024, prefix_caching=False),
            speculation=SpeculationConfig(method="none"),
        )
        engine = load.create_backend("m", config, lambda *_: None)
        taken: dict[tuple[int, bool], list[float]] = {(rows, is_cut): [] for rows in words.rows for is_cut in (0, 1)}
        try:
            for turn in range(words.rounds + 1):
                for rows, is_cut in taken:
                    lead.cuts = cut.cuts if is_cut else lambda *_: []  # type: ignore[assignment]
                    found = prompt_s(engine, rows, f"{turn} {rows} {is_cut}")
                    if turn:  # the first one touches memory for the first time
                        taken[rows, is_cut].append(found)
        finally:
            engine.close()
    table = []
    for rows in words.rows:
        turns_s, cut_s = (statistics.median(taken[rows, is_cut]) for is_cut in (False, True))
        count = 1 + len(cut.cuts(rows, 2))
        table.append(
            [
                str(rows),
                str(count),
                f"{1000 * turns_s:.0f}",
                f"{1000 * cut_s:.0f}",
                f"{cut_s / turns_s:.2f}",
                f"{(count + 1) / count / 2:.2f}",
            ]
        )
    heads = ["rows", "micro-batches", "in turns ms", "cut ms", "ratio", "ratio of turns"]
    print(markdown(heads, table))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
