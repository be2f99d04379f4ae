"""int8 and int4 weights, and an 8-bit KV cache, against the checkpoint's own numbers: memory, speed, perplexity.

Perplexity is exp of the mean negative log-probability of tokens, each given what stands before it in its piece, as the served
engine states it (``prompt_logprobs``). The pieces are ``CHARACTERS`` of ``--text FILE``; without one, ``CONTEXT`` tokens that the
unquantised model itself wrote at temperature 1, so that a difference is the distance between the models and not a matter of taste.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.chart import bars
from bench.claims.claim import Claim, NotYetError, Scale
from bench.claims.engine import has_setting, load, random_prompts, timed
from bench.report import Figure
from inferd.config import KVCacheConfig
from inferd.llm import LLM
from inferd.types import SamplingParams

CONTEXT = 256  # tokens
CHARACTERS = 800
LOSSES = {"int8": 0.005, "int4": 0.02, "8-bit KV": 0.002}  # at most so much more perplexity


def ways() -> dict[str, dict[str, object]]:
    """Settings by name; what this inferd does not have is left out."""
    found: dict[str, dict[str, object]] = {"as it is": {}}
    if has_setting("quantization"):
        found["as it is"] = {"quantization": "none"}
        found |= {"int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}}
    if "dtype" in KVCacheConfig.__struct_fields__:
        found["8-bit KV"] = {**found["as it is"], "kv_cache": {"dtype": "int8"}}
    if len(found) == 1:
        raise NotYetError("this inferd computes in the checkpoint's own number format only.")
    return found


def measure(scale: Scale) -> Claim:
    settings = ways()
    engines = {name: load(scale, chosen) for name, chosen in settings.items()}
    try:
        scale.say(0, 3, "a text")
        pieces = _pieces(scale, engines["as it is"])
        scale.say(1, 3, "perplexity")
        perplexities = {name: perplexity(llm, pieces) for name, llm in engines.items()}
        scale.say(2, 3, "speed")
        speeds = _speeds(scale, engines)
        weights = {name: llm.info.memory.weights_bytes / 1e6 for name, llm in engines.items()}
        per_token = {name: llm.info.memory.kv_bytes_per_token for name, llm in engines.items()}
    finally:
        for llm in engines.values():
            llm.close()
    base = perplexities["as it is"]
    changes = {name: value / base - 1 for name, value in perplexities.items()}
    return Claim(
        name="quantisation",
        claim="Weights of 8 and 4 bits take less memory and decode faster, with at most 0.5 % and 2 % more perplexity; a KV cache of 8 bits at most 0.2 %.",
        baseline=f"the same engine with the checkpoint's own numbers; perplexity over {len(pieces)} pieces of {'a text' if scale.text else 'its own writing'}.",
        head=["weights", "MB", "KV bytes per token", "decode of one, tokens/s", "of eight", "perplexity", "change"],
        rows=[
            [
                name,
                f"{weights[name]:.1f}",
                str(per_token[name]),
                str(speeds[name, 1]),
                str(speeds[name, 8]),
                f"{perplexities[name]:.3f}",
                f"{changes[name]:+.2%}",
            ]
            for name in engines
        ],
        picture=bars(
            list(engines),
            [
                ("weights, % of the original", [100 * weights[n] / weights["as it is"] for n in engines]),
                ("decode of one, %", [100 * speeds[n, 1].median / speeds["as it is", 1].median for n in engines]),
                ("perplexity, %", [100 * (1 + changes[n]) for n in engines]),
            ],
            title="Quantised, in % of the original",
            y_label="%",
        ),
        verdicts=[
            (changes[name] <= limit, f"{name} changes perplexity by {changes[name]:+.2%}, {limit:.1%} are allowed")
            for name, limit in LOSSES.items()
            if name in changes
        ]
        + [
            (
                weights[name] < 0.75 * weights["as it is"],
                f"{name} weights take {weights[name] / weights['as it is']:.0%} of the memory, "
                f"{speeds[name, 1].median / speeds['as it is', 1].median:.2f} times the speed",
            )
            for name in ("int8", "int4")
            if name in engines
        ],
        data={
            "perplexity": perplexities,
            "weights_mb": weights,
            "kv_bytes_per_token": per_token,
            "tokens_per_s": {f"{name}, {n}": figure.values for (name, n), figure in speeds.items()},
        },
    )


def perplexity(llm: LLM, pieces: Sequence[str | list[int]]) -> float:
    """Over all pieces; the first token of each is given."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    losses = [
        -entry.logprob
        for one in llm.generate(list(pieces), sampling, progress=False)
        for entry in one.prompt_logprobs or ()
        if entry is not None
    ]
    return math.exp(sum(losses) / len(losses))


def _pieces(scale: Scale, llm: LLM) -> Sequence[str | list[int]]:
    count = scale.pick(16, 160)
    if scale.text is not None:
        text = scale.text.read_text(encoding="utf-8", errors="replace")[: count * CHARACTERS]
        return [text[i : i + CHARACTERS] for i in range(0, len(text) - 1, CHARACTERS)]
    starts = random_prompts(llm, [1] * count, 11)
    sampling = SamplingParams(max_tokens=CONTEXT - 1, temperature=1.0, top_p=1.0, top_k=0, seed=5, ignore_eos=True)
    written = llm.generate(list(starts), sampling, progress=False)
    return [[*start, *one.outputs[0].token_ids] for start, one in zip(starts, written, strict=True)]


def _speeds(scale: Scale, engines: dict[str, LLM]) -> dict[tuple[str, int], Figure]:
    """Decode alone: what 64 tokens take beyond what one takes, engines in turn."""
    found: dict[tuple[str, int], list[float]] = {}
    for number in range(scale.pick(3, 7)):
        for name, llm in engines.items():
            for clients in (1, 8):
                prompts = random_prompts(llm, [32] * clients, 100 + number)
                fresh = random_prompts(llm, [32] * clients, 200 + number)
                first = timed(llm, fresh, [1] * clients)
                whole = timed(llm, prompts, [65] * clients)
                found.setdefault((name, clients), []).append(64 * clients / (whole - first))
    return {key: Figure(tuple(values)) for key, values in found.items()}
