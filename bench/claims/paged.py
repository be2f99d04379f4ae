"""A paged KV cache against contiguous reservations: requests at the same time, and tokens per second, in the same memory."""

from __future__ import annotations

import random

from bench.chart import bars
from bench.claims.claim import Claim, Scale
from bench.claims.engine import load, random_prompts, timed
from bench.prefix_replay import Cost, replay, reserved
from bench.report import Figure
from bench.traces import Arrival

SIZE = 16
LONGEST = 512  # tokens a request may have
CAPACITY = 6 * LONGEST  # tokens of KV cache


def requests(count: int) -> list[Arrival]:
    """Prompts of 16 to 160 tokens, answers of 8 to 96, most of them short."""
    draw = random.Random(3)
    found = []
    for number in range(count):
        prompt, answer = min(160, 16 + int(draw.expovariate(1 / 48))), min(96, 8 + int(draw.expovariate(1 / 24)))
        found.append(Arrival(0.0, [number * LONGEST + i for i in range(prompt)], answer))
    return found


def measure(scale: Scale) -> Claim:
    asked = requests(scale.pick(96, 384))
    answer = max(one.answer for one in asked)
    at_once = {
        "reserve the longest allowed": reserved(asked, CAPACITY, lambda _: LONGEST),
        "reserve prompt + longest answer": reserved(asked, CAPACITY, lambda one: len(one.prompt) + answer),
        "paged": replay(
            asked,
            num_blocks=CAPACITY // SIZE,
            block_size=SIZE,
            cost=Cost(1.0, 0.0, 0.0),
            prefix_caching=False,
            max_num_seqs=len(asked),
            max_num_batched_tokens=1 << 20,
        ).mean_running,
    }
    # A contiguous cache runs what it has room to reserve: the same engine with so many sequences at most.
    slots = {name: max(1, int(value)) for name, value in at_once.items()}
    slots["paged"] = len(asked)
    speeds = {
        name: Figure(tuple(_speed(scale, asked, n) for _ in range(scale.pick(2, 5)))) for name, n in slots.items()
    }
    base_name, right_sized, paged = at_once
    times, modest = at_once[paged] / at_once[base_name], at_once[paged] / at_once[right_sized]
    faster = speeds[paged].median / speeds[base_name].median
    return Claim(
        name="paged",
        claim="Pages let 2 to 4 times as many requests run in the same memory as contiguous reservations, which raises throughput.",
        baseline=f"a reservation of contiguous memory for each request, {LONGEST} tokens or its prompt with the longest answer; its throughput is the same engine's with as many sequences as have room.",
        head=["KV cache", "requests at the same time", "times", "tokens/s"],
        rows=[
            [name, f"{value:.1f}", f"{value / at_once[base_name]:.2f}", str(speeds[name])]
            for name, value in at_once.items()
        ],
        picture=bars(
            list(at_once),
            [("requests at the same time", list(at_once.values()))],
            title=f"Requests in {CAPACITY} tokens of KV cache",
            y_label="requests",
        ),
        verdicts=[
            (
                times >= 2.0,
                f"{times:.1f} times the requests of reserving the longest, {modest:.1f} of prompt + longest answer",
            ),
            (faster > 1.0, f"{faster:.2f} times the tokens per second of reserving the longest"),
        ],
        data={"at_once": at_once, "tokens_per_s": {name: figure.values for name, figure in speeds.items()}},
    )


def _speed(scale: Scale, asked: list[Arrival], sequences: int) -> float:
    settings = {
        "max_model_len": LONGEST,
        "kv_cache": {"num_blocks": CAPACITY // SIZE, "block_size": SIZE},
        "scheduler": {"max_num_seqs": sequences, "prefix_caching": False},
    }
    with load(scale, settings) as llm:
        prompts = random_prompts(llm, [len(one.prompt) for one in asked], 5)
        timed(llm, prompts[:2], [2, 2])
        return sum(one.answer for one in asked) / timed(llm, prompts, [one.answer for one in asked])
