"""A server of static batches, played on the engine of a server of continuous ones."""

from __future__ import annotations

from collections.abc import Sequence

from bench.claims.batching import waves
from bench.claims.engine import random_prompts, timed
from inferd.llm import LLM


def padded(wave: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is computed for requests of (prompt, answer) tokens: for each the longest prompt and the longest answer."""
    return [(max(prompt for prompt, _ in wave), max(answer for _, answer in wave))] * len(wave)


def static_seconds(llm: LLM, asked: Sequence[tuple[int, int]], batch: int, seed: int, *, pad: bool) -> float:
    """Seconds for batch after batch; without ``pad`` rows that are done leave, and prompts are as long as they are."""
    seconds = 0.0
    for number, places in enumerate(waves(range(len(asked)), batch)):
        wave = [asked[i] for i in places]
        if pad:
            wave = padded(wave)
        prompts = random_prompts(llm, [prompt for prompt, _ in wave], 1000 * seed + number)
        seconds += timed(llm, prompts, [answer for _, answer in wave])
    return seconds
