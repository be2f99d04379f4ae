"""The bundled model on the device and on the CPU: the same tokens, logits that are close. Whole engine: load, plan, graphs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu.result import Result
from inferd.config import ModelConfig
from inferd.llm import LLM
from inferd.types import SamplingParams

PROMPTS = [
    "Once upon a time there was a little robot.",
    "The capital of France is",
    "def add(a, b):",
    "One two three four five",
    "Tell me a story about the sea, and about a ship that sailed on it for many years.",
]


def measure(device: torch.device, source: str = "demo", tokens: int = 48) -> Iterator[Result]:
    """In float32, as rounding would let near ties fall either way."""
    found = {}
    for where in ("cpu", str(device)):
        config = ModelConfig(source=source, dtype="float32", device=where, max_model_len=256)
        with LLM(config=config, progress=False) as llm:
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=5, ignore_eos=True)
            found[where] = [c.outputs[0] for c in llm.generate(PROMPTS, sampling)]
            again = [c.outputs[0].token_ids for c in llm.generate(PROMPTS[:1], sampling)]
            yield Result(
                f"the same alone and among others, {where}", 1.0, "", passed=again == [found[where][0].token_ids]
            )
    ours, theirs = found[str(device)], found["cpu"]
    same = sum(a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True))
    yield Result("greedy answers that equal the CPU's", same, f"of {len(PROMPTS)}", passed=same == len(PROMPTS))
    worst = max(
        abs(a.logprob - b.logprob)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True)
        if one.token_ids == other.token_ids
    )
    yield Result("log-probabilities against the CPU's", worst, "largest error", passed=worst < 1e-3)
