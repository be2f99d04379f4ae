"""Speculative decoding against none: answers that quote their prompt (prompt lookup), a draft model, and a full batch."""

from __future__ import annotations

import time

from bench.chart import bars
from bench.claims.claim import Claim, NotYetError, Scale
from bench.claims.engine import has_setting, load
from bench.report import Figure
from inferd.llm import LLM
from inferd.types import SamplingParams

ANSWER = 96  # tokens
QUOTED = (
    "The harbour master wrote: the ferry leaves at seven, stops at the lighthouse and returns before dark. "
    "Bring bread, water and a warm coat, for the wind is cold on the upper deck. "
)
STORIES = ("Once upon a time there was a", "The little dog ran to the", "Tom and Lily went to the park and")


def measure(scale: Scale) -> Claim:
    if not has_setting("speculation"):
        raise NotYetError("this inferd does not speculate.")
    settings: dict[str, dict[str, object]] = {"none": {"method": "none"}, "prompt lookup": {"method": "prompt_lookup"}}
    if scale.model == "demo":
        settings["draft model"] = {"method": "draft", "draft": "demo-draft"}
    engines = {name: load(scale, {"speculation": chosen}) for name, chosen in settings.items()}
    quote = QUOTED + "\nRepeat what the harbour master wrote.\n" + QUOTED + QUOTED[:40]
    loads: dict[str, list[str]] = {"quote, alone": [quote], "story, alone": [STORIES[0]]}
    loads["stories, 16 at once"] = [f"{STORIES[i % 3]} {i}" for i in range(16)]
    try:
        found = {load_name: _in_turn(scale, engines, prompts) for load_name, prompts in loads.items()}
    finally:
        for llm in engines.values():
            llm.close()

    def gain(load_name: str, name: str) -> float:
        return found[load_name][name].median / found[load_name]["none"].median

    verdicts = [
        (
            gain("quote, alone", "prompt lookup") >= 1.5,
            f"prompt lookup: {gain('quote, alone', 'prompt lookup'):.2f} times on quotes",
        )
    ]
    if "draft model" in engines:
        alone = gain("story, alone", "draft model")
        verdicts.append((alone >= 1.5, f"the bundled draft model: {alone:.2f} times on a story"))
    worst = min(gain("stories, 16 at once", name) for name in engines)
    verdicts.append((worst >= 0.97, f"{worst:.2f} times at 16 sequences, where it should be off"))
    return Claim(
        name="speculation",
        claim="Guessed tokens that are checked together make single streams at least 1.5 times as fast, with the same answers, and cost a full batch at most 3 %.",
        baseline="the same engine with speculation.method none, in turn; greedy answers, compared token by token.",
        head=[
            "load",
            *(f"{name}, tokens/s" for name in engines),
            *(f"{name}, times" for name in engines if name != "none"),
        ],
        rows=[
            [
                load_name,
                *(str(by[name]) for name in engines),
                *(f"{gain(load_name, name):.2f}" for name in engines if name != "none"),
            ]
            for load_name, by in found.items()
        ],
        picture=bars(
            list(found),
            [(name, [gain(load_name, name) for load_name in found]) for name in engines],
            title="Speculation: times the speed without",
            y_label="times",
        ),
        verdicts=verdicts,
        data={load_name: {name: figure.values for name, figure in by.items()} for load_name, by in found.items()},
    )


def _in_turn(scale: Scale, engines: dict[str, LLM], prompts: list[str]) -> dict[str, Figure]:
    """Tokens per second of each; every answer must be the first engine's, token by token."""
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    expected: list[tuple[int, ...]] | None = None
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(scale.pick(4, 9)):
        for name, llm in engines.items():
            began = time.perf_counter()
            done = llm.generate(list(prompts), sampling, progress=False)
            seconds = time.perf_counter() - began
            answers = [one.outputs[0].token_ids for one in done]
            expected = expected or answers
            if answers != expected:
                raise SystemExit(f"speculation {name!r} changed a greedy answer: {expected} became {answers}")
            if number:  # the first round also fills the prefix caches
                speeds[name].append(len(prompts) * ANSWER / seconds)
    return {name: Figure(tuple(values)) for name, values in speeds.items()}
