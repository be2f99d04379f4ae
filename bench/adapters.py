"""What adapters cost: ``python -m bench.adapters [--model FOLDER] [--adapters 32] [--rank 16] [--rounds 5]``.

One engine in this process, with random adapters on every projection. Rounds of 32 requests alternate between the base
alone and one request for each adapter; a round is generated tokens per second. Then each answer is compared, tokens and
log-probabilities, with the answer that the request gets alone. Last, an adapter is loaded while a batch runs: the time
until it is loaded, and the longest step beside it compared with the longest step before. Prints Markdown. The bars are
0.85, all answers equal, 200 ms, and a pause of 50 ms; exit status 1 names what did not hold.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.report import markdown
from inferd.config import KVCacheConfig, ModelConfig, SpeculationConfig
from inferd.engine.engine import Engine
from inferd.engine.load import create_backend
from inferd.registry.source import resolve
from inferd.types import GenerateRequest, SamplingParams, TokenPrompt

ROWS: Final = 32
PROMPT_TOKENS: Final = 64
LEAST_RATIO: Final = 0.85
MOST_LOAD_S: Final = 0.2
MOST_PAUSE_S: Final = 0.05


def write_adapter(folder: Path, base: Path, rank: int, seed: int) -> None:
    """Random matrices for every projection of the base's layers."""
    folder.mkdir(parents=True)
    made, tensors = torch.Generator().manual_seed(seed), {}
    modules: set[str] = set()
    for file in sorted(base.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in list(stored.keys()):
                match = re.fullmatch(r"(model\.layers\.\d+\.\w+\.(\w+_proj))\.weight", name)
                if match is None:
                    continue
                outputs, inputs = stored.get_slice(name).get_shape()
                modules.add(match[2])
                for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                    matrix = torch.randn(shape, generator=made) / shape[1] ** 0.5 * 0.2
                    tensors[f"base_model.model.{match[1]}.lora_{side}.weight"] = matrix.to(torch.bfloat16)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def requests(names: list[str], tokens: int, vocab: int) -> list[GenerateRequest]:
    made = torch.Generator().manual_seed(7)
    return [
        GenerateRequest(
            id=f"r{i}",
            model="base",
            adapter=name,
            prompt=TokenPrompt(token_ids=torch.randint(0, vocab, (PROMPT_TOKENS,), generator=made).tolist()),
            sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=0),
            explicit=("temperature",),
        )
        for i, name in enumerate(names)
    ]


Answers = dict[str, list[tuple[int, float]]]


def run(engine: Engine, work: list[GenerateRequest], steps: list[float] | None = None) -> Answers:
    """The tokens and log-probabilities of each answer. ``steps`` gets the seconds of each step."""
    answers: Answers = {request.id: [] for request in work}
    engine.pool.clear_cache()
    for request in work:
        engine.add(engine.prepare(request), 0.0)
    while engine.due(0.0) is not None:
        began = time.perf_counter()
        for output in engine.step(0.0)[0]:
            for delta in output.deltas:
                answers[output.request_id] += [(one.token_id, one.logprob) for one in delta.logprobs or ()]
        if steps is not None:
            steps.append(time.perf_counter() - began)
    return answers


def seconds(engine: Engine, work: list[GenerateRequest]) -> float:
    began = time.perf_counter()
    run(engine, work)
    return time.perf_counter() - began


def load_beside(engine: Engine, wanted: dict[str, str], work: list[GenerateRequest]) -> tuple[float, float]:
    """Seconds of loading one more adapter, and by which the longest single-token step beside it is longer than the
    longest before."""
    quiet: list[float] = []
    run(engine, work, quiet)
    loading: list[float] = []

    def load() -> None:
        time.sleep(sum(quiet) / 3)  # in the middle of the batch
        began = time.perf_counter()
        engine.set_adapters(wanted)
        loading.append(time.perf_counter() - began)

    thread, busy = threading.Thread(target=load), list[float]()
    thread.start()
    run(engine, work, busy)
    thread.join()
    first = max(2, len(quiet) // 4)  # the steps that read prompts are longer
    return loading[0], max(busy[first:]) - max(quiet[first:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    base = resolve(options.model)
    with tempfile.TemporaryDirectory() as folder:
        sources = {f"a{i}": Path(folder) / f"a{i}" for i in range(options.adapters + 1)}
        for seed, place in enumerate(sources.values()):
            write_adapter(place, base, options.rank, seed)
        *most, last = sources
        wanted = {name: str(sources[name]) for name in most}
        config = ModelConfig(
            source=str(base),
            threads=options.threads,
            max_model_len=PROMPT_TOKENS + options.tokens + 1,
            kv_cache=KVCacheConfig(num_blocks=ROWS * (-(-(PROMPT_TOKENS + options.tokens + 1) // 16) + 2)),
            speculation=SpeculationConfig(method="none"),
            adapters=wanted,
        )
        engine = create_backend("base", config, lambda phase, done, total: None)
        failed = [state.failure.message for state in engine.info.adapters.values() if state.failure is not None]
        if failed:
            raise SystemExit(failed[0])
        vocab = engine.info.vocab_size
        plain = requests([""] * ROWS, options.tokens, vocab)
        mixed = requests([most[i % len(most)] for i in range(ROWS)], options.tokens, vocab)
        seconds(engine, mixed)
        pairs = [(seconds(engine, plain), seconds(engine, mixed)) for _ in range(options.rounds)]
        ratio = statistics.median(one / other for one, other in pairs)
        together = run(engine, mixed)
        equal = sum(run(engine, [each])[each.id] == together[each.id] for each in mixed)
        load_s, pause_s = load_beside(engine, {**wanted, last: str(sources[last])}, mixed)
        size = next(iter(engine.info.adapters.values())).num_bytes
    tokens = ROWS * options.tokens
    rows = [
        ["tokens/s of 32 rows of the base", f"{tokens / statistics.median(one for one, _ in pairs):.0f}", ""],
        [
            f"tokens/s of 32 rows, {options.adapters} adapters of rank {options.rank}",
            f"{tokens / statistics.median(other for _, other in pairs):.0f}",
            "",
        ],
        ["their ratio, median of the rounds", f"{ratio:.3f}", f">= {LEAST_RATIO}"],
        ["answers with the bits that they have alone", f"{equal} of {ROWS}", f"{ROWS}"],
        [f"loading one of {size / 1e6:.1f} MB beside a batch", f"{load_s * 1000:.0f} ms", "<= 200 ms"],
        ["the longest step beside it, above the longest before", f"{pause_s * 1000:.0f} ms", "<= 50 ms"],
    ]
    print(f"{datetime.now():%Y-%m-%d %H:%M}, {options.model}, {engine.info.dtype}, {torch.get_num_threads()} threads\n")
    print(markdown(["", "measured", "bar"], rows))
    missed = [
        row[0]
        for row, is_held in zip(
            rows[2:], (ratio >= LEAST_RATIO, equal == ROWS, load_s <= MOST_LOAD_S, pause_s <= MOST_PAUSE_S), strict=True
        )
        if not is_held
    ]
    if missed:
        print("\nDid not hold: " + "; ".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
