"""An engine in this process for a claim: settings by name, equal-length answers, seconds."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

from bench.claims.claim import Scale
from inferd.config import ModelConfig, single_model_config
from inferd.llm import LLM
from inferd.types import SamplingParams


def has_setting(name: str) -> bool:
    return name in ModelConfig.__struct_fields__


def load(scale: Scale, settings: Mapping[str, object]) -> LLM:
    (config,) = single_model_config(scale.model, model={"threads": scale.threads, **settings}).models.values()
    return LLM(scale.model, config=config, progress=False)


def random_prompts(llm: LLM, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Token ids that share no prefix."""
    draw = random.Random(seed)
    return [[draw.randrange(llm.info.vocab_size) for _ in range(length)] for length in lengths]


def timed(llm: LLM, prompts: Sequence[list[int]], answers: Sequence[int]) -> float:
    """Seconds until every prompt has an answer of exactly the length asked for."""
    sampling = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in answers]
    began = time.perf_counter()
    done = llm.generate(list(prompts), sampling, progress=False)
    seconds = time.perf_counter() - began
    made = [len(one.outputs[0].token_ids) for one in done]
    assert made == list(answers), f"answers of {answers} tokens were asked for, got {made}"
    return seconds
