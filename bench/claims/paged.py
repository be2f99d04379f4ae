"""A paged KV cache against contiguous reservations: requests at the same time, and tokens per second, in the same memory.

Two claims are taken apart. Pages hold more requests: counted by the scheduler on one hand and by arithmetic on the other. Pages *and* continuous
batching make more tokens per second than a naive server, which reserves the longest request for each of a static batch: measured. What pages
alone bring to the speed depends on what a step costs with more rows, and is said beside it.
"""

from __future__ import annotations

from bench.chart import bars
from bench.claims.claim import Claim, Scale
from bench.claims.engine import load, random_prompts, timed
from bench.claims.static import static_seconds
from bench.claims.traffic import requests
from bench.prefix_replay import Cost, replay, reserved
from bench.report import Figure
from bench.traces import Arrival

SIZE = 16
LONGEST = 512  # tokens a request may have
CAPACITY = 6 * LONGEST  # tokens of KV cache
LOAD = "ShareGPT"
MEAN_ANSWER = 24.0
NAIVE, RESERVED, SIZED, PAGED = (
    "naive: reserved, static batches",
    "reserved, continuous",
    "prompt + longest answer, continuous",
    "paged, continuous",
)


def arrivals(asked: list[tuple[int, int]]) -> list[Arrival]:
    """All there from the start; prompts share nothing."""
    return [Arrival(0.0, [i * LONGEST + j for j in range(prompt)], answer) for i, (prompt, answer) in enumerate(asked)]


def at_once(asked: list[tuple[int, int]]) -> dict[str, float]:
    """Requests that run at the same time while somebody waits."""
    burst = arrivals(asked)
    longest_answer = max(answer for _, answer in asked)
    slots = float(CAPACITY // LONGEST)
    return {
        NAIVE: slots,
        RESERVED: reserved(burst, CAPACITY, lambda _: LONGEST),
        SIZED: reserved(burst, CAPACITY, lambda one: len(one.prompt) + longest_answer),
        PAGED: replay(
            burst,
            num_blocks=CAPACITY // SIZE,
            block_size=SIZE,
            cost=Cost(1.0, 0.0, 0.0),
            prefix_caching=False,
            max_num_seqs=len(burst),
            max_num_batched_tokens=1 << 20,
        ).mean_running,
    }


def measure(scale: Scale) -> Claim:
    asked = requests(LOAD, scale.pick(96, 240), MEAN_ANSWER, LONGEST, 3)
    counted = at_once(asked)
    speeds: dict[str, list[float]] = {name: [] for name in counted}
    rounds = scale.pick(2, 3)
    for number in range(rounds):
        for i, name in enumerate(speeds):
            scale.say(number * len(speeds) + i, rounds * len(speeds), name)
            sequences = len(asked) if name == PAGED else max(1, int(counted[name]))
            speeds[name].append(_speed(scale, asked, sequences, is_static=name == NAIVE))
    return judge(counted, {name: Figure(tuple(values)) for name, values in speeds.items()}, len(asked))


def judge(counted: dict[str, float], speeds: dict[str, Figure], count: int) -> Claim:
    base, wins = counted[RESERVED], {name: speeds[PAGED].median / speeds[name].median for name in speeds}
    times, modest = counted[PAGED] / base, counted[PAGED] / counted[SIZED]
    return Claim(
        name="paged",
        claim="Pages let 2 to 4 times as many requests run in the same memory as contiguous reservations of the longest; with "
        "continuous batching that is 2 to 4 times the tokens per second of a naive server.",
        baseline=f"contiguous memory for {LONGEST} tokens per request, in {CAPACITY} tokens of memory. The naive server makes static batches of that many: prompts "
        "padded to the longest, all rows computed until the longest answer is done. The others take in the next request at once; 'prompt + longest answer' "
        f"knows the longest answer that will come. {count} requests with lengths as in {LOAD}, scaled to {MEAN_ANSWER:.0f} tokens per answer, all there.",
        head=["KV cache and batches", "requests at the same time", "times", "tokens/s", "paged and continuous: times"],
        rows=[
            [name, f"{value:.1f}", f"{value / base:.2f}", str(speeds[name]), f"{wins[name]:.2f}"]
            for name, value in counted.items()
        ],
        picture=bars(
            ["naive", "reserved", "prompt + longest", "paged"],
            [
                ("requests at the same time", [value / base for value in counted.values()]),
                ("tokens/s", [speeds[name].median / speeds[NAIVE].median for name in counted]),
            ],
            title=f"{CAPACITY} tokens of KV cache, requests as in {LOAD}: times the naive server's",
            y_label="times",
        ),
        verdicts=[
            (
                times >= 2.0,
                f"{times:.1f} times the requests of reserving the longest, {modest:.1f} of prompt + longest answer",
            ),
            (wins[NAIVE] >= 2.0, f"{wins[NAIVE]:.2f} times the tokens per second of the naive server"),
            (
                wins[RESERVED] >= 0.95,
                f"no speed lost to continuous batching with reservations: {wins[RESERVED]:.2f} times",
            ),
        ],
        data={"at_once": counted, "tokens_per_s": {name: figure.values for name, figure in speeds.items()}},
    )


def _speed(scale: Scale, asked: list[tuple[int, int]], sequences: int, *, is_static: bool) -> float:
    # A naive server's rows are as long as the longest, for which it has reserved memory.
    settings = {
        "max_model_len": LONGEST,
        "kv_cache": {"num_blocks": CAPACITY // SIZE, "block_size": SIZE},
        "scheduler": {"max_num_seqs": sequences, "prefix_caching": False},
    }
    with load(scale, settings) as llm:
        timed(llm, random_prompts(llm, [16] * 2, 0), [2, 2])
        if is_static:
            seconds = static_seconds(llm, asked, sequences, 5, pad=True)
        else:
            prompts = random_prompts(llm, [prompt for prompt, _ in asked], 5)
            seconds = timed(llm, prompts, [answer for _, answer in asked])
    return sum(answer for _, answer in asked) / seconds
