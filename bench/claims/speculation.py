"""Speculative decoding against none: talk with a draft model, answers that quote their prompt, and a full batch.

The loads are those of ``bench/speculation.py``, which measures more of them. Quoting is prescribed there: what is said is exchanged for a
text that quotes the prompt for four fifths, since small models cannot quote; costs and chances are the real ones.
"""

from __future__ import annotations

import argparse

from bench.chart import bars
from bench.claims.claim import Claim, Scale
from bench.report import Figure
from bench.speculation import Bench, Prescribed, play, questions, quoting
from inferd.engine.speculation.speculation import Speculation
from inferd.types import GenerateRequest

NONE = "none"
FULL = 32  # sequences of a full batch


def measure(scale: Scale) -> Claim:
    draft = "demo-draft" if scale.model == "demo" else None
    options = argparse.Namespace(
        model=scale.model, threads=scale.threads, max_model_len=2048, batch=FULL, draft=draft, rounds=scale.pick(3, 7)
    )
    bench = Bench(options)
    talkers = {name: way for name, way in bench.ways.items() if name != "auto"}
    found: dict[str, dict[str, Figure]] = {"talk, alone": {}, "quoting, alone": {}, f"talk, {FULL} at once": {}}
    is_chat = bench.engine.info.has_chat_template
    for name, size, count in (("talk, alone", 1, 10), (f"talk, {FULL} at once", FULL, 2 * FULL)):
        asked = questions(count, 0.0, 100, is_chat=is_chat)
        found[name] = _in_turn(bench, talkers, asked, size, options.rounds)
    scripts: dict[int, list[int]] = {}
    bench.engine._sampler = Prescribed(bench.engine._sampler._vocab_size, scripts)
    quoters = {name: talkers[name] for name in (NONE, "prompt lookup")}
    found["quoting, alone"] = _in_turn(bench, quoters, quoting(bench.engine, 4, 0.8, scripts), 1, options.rounds)

    def gain(load: str, name: str) -> float | None:
        return found[load][name].median / found[load][NONE].median if name in found[load] else None

    ways = list(talkers)
    goals = [("quoting, alone", "prompt lookup", 1.5), ("talk, alone", "draft model", 1.5)]
    goals += [(f"talk, {FULL} at once", name, 0.97) for name in ways[1:]]
    judged = [(load, name, goal, gain(load, name)) for load, name, goal in goals]
    return Claim(
        name="speculation",
        claim="Guessed tokens that are checked together make single streams at least 1.5 times as fast, say the same, and cost a full batch at most 3 %.",
        baseline="the same engine with speculation.method none, in turn; every answer is compared with its, token by token.",
        head=["load", *(f"{name}, tokens/s" for name in ways), *(f"{name}, times" for name in ways[1:])],
        rows=[
            [
                load,
                *(str(by[name]) if name in by else "-" for name in ways),
                *("-" if gain(load, name) is None else f"{gain(load, name):.2f}" for name in ways[1:]),
            ]
            for load, by in found.items()
        ],
        picture=bars(
            list(found),
            [(name, [gain(load, name) for load in found]) for name in ways],
            title="Speculation: times the speed without",
            y_label="times",
        ),
        verdicts=[
            (times >= goal, f"{load}, {name}: {times:.2f} times the speed, at least {goal} is promised")
            for load, name, goal, times in judged
            if times is not None
        ],
        data={load: {name: figure.values for name, figure in by.items()} for load, by in found.items()},
    )


def _in_turn(
    bench: Bench, ways: dict[str, Speculation | None], requests: list[GenerateRequest], size: int, rounds: int
) -> dict[str, Figure]:
    """Tokens per second of each. The first round is left out: what pays is learnt there."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        said = None
        for name, way in ways.items():
            one = play(bench.engine, way, requests, size)
            said = said or one.said
            if one.said != said:
                raise SystemExit(f"speculation by {name} says something else than without")
            if number:
                speeds[name].append(one.num_tokens / one.seconds)
    return {name: Figure(tuple(values)) for name, values in speeds.items()}
