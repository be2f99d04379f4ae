"""Continuous against static batching: a finished sequence's place is taken at once, or when its whole batch has finished."""

from __future__ import annotations

import random

from bench.chart import bars
from bench.claims.claim import Claim, Scale
from bench.claims.engine import load, random_prompts, timed
from bench.prefix_replay import Cost, replay
from bench.report import Figure
from bench.traces import Arrival

BATCHES = (4, 8, 16)
PROMPT = 64  # tokens


def lengths(count: int, seed: int) -> list[int]:
    """Answers of 4 to 128 tokens, most of them short: what makes a batch wait for its longest."""
    draw = random.Random(seed)
    return [min(128, max(4, int(draw.expovariate(1 / 32)))) for _ in range(count)]


def steps(answers: list[int], batch: int) -> int:
    """Steps that the scheduler takes for requests which are all there: what a machine without any noise would show."""
    burst = [Arrival(0.0, [1] * PROMPT, answer) for answer in answers]
    found = replay(
        burst,
        num_blocks=batch * (PROMPT + max(answers)),
        block_size=16,
        cost=Cost(1.0, 0.0, 0.0),
        prefix_caching=False,
        max_num_seqs=batch,
    )
    return round(found.ended_at)


def measure(scale: Scale) -> Claim:
    rows: list[list[str]] = []
    columns: tuple[list[float], list[float]] = ([], [])
    count, rounds = scale.pick(48, 192), scale.pick(2, 5)
    data: dict[str, object] = {}
    fewer: list[float] = []
    for batch in BATCHES:
        with load(scale, {"scheduler": {"max_num_seqs": batch}}) as llm:
            seconds: tuple[list[float], list[float]] = ([], [])
            answers = lengths(count, 1)
            for number in range(rounds):
                for way in (0, 1):
                    prompts = random_prompts(llm, [PROMPT] * count, 2 * number + way)
                    if way == 0:  # the next batch is submitted when all of this one are answered
                        parts = range(0, count, batch)
                        spent = sum(timed(llm, prompts[i : i + batch], answers[i : i + batch]) for i in parts)
                    else:
                        spent = timed(llm, prompts, answers)
                    seconds[way].append(spent)
        static, continuous = (Figure(tuple(sum(answers) / s for s in way)) for way in seconds)
        gain = continuous.median / static.median
        waves = sum(steps(answers[i : i + batch], batch) for i in range(0, count, batch))
        whole = steps(answers, batch)
        fewer.append(waves / whole)
        columns[0].append(static.median)
        columns[1].append(continuous.median)
        rows.append([str(batch), f"{waves} / {whole}", str(static), str(continuous), f"{gain:.2f}"])
        data[str(batch)] = {"static": static.values, "continuous": continuous.values, "steps": [waves, whole]}
    gains = [c / s for s, c in zip(*columns, strict=True)]
    return Claim(
        name="continuous",
        claim="Continuous batching serves more tokens per second than static batching when answers differ in length.",
        baseline=f"the same engine, given {count} requests in batches of which the next begins when all of one are answered; answers of 4 to 128 tokens.",
        head=["sequences at a time", "steps, static / continuous", "static, tokens/s", "continuous, tokens/s", "times"],
        rows=rows,
        picture=bars(
            [f"{batch} sequences" for batch in BATCHES],
            [("static", columns[0]), ("continuous", columns[1])],
            title="Continuous against static batching",
            y_label="output tokens/s",
        ),
        verdicts=[
            (min(gains) > 1.0, f"{min(gains):.2f} to {max(gains):.2f} times the tokens per second"),
            (min(fewer) > 1.2, f"static batching takes {min(fewer):.2f} to {max(fewer):.2f} times the steps"),
        ],
        data=data,
    )
