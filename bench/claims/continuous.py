"""Continuous against static batching: a finished sequence's place is taken at once, or when its whole batch has finished.

Three things are said apart. *Steps* follow from the lengths alone (``batching``), and are time where a step takes as long with many rows
as with few: decoding on a machine that waits for memory. What it is where rows cost something follows from a step's measured cost.
*Tokens per second* are measured here, where rows cost arithmetic, with prompts
and answers as long as in real traffic (``traffic``), scaled to the model.
"""

from __future__ import annotations

from bench.chart import Line, lines
from bench.claims.batching import (
    arrivals,
    continuous_steps,
    continuous_waits,
    in_use,
    log_normal,
    static_steps,
    static_waits,
    times,
    times_fewer,
    variation,
)
from bench.claims.claim import Claim, Scale
from bench.claims.engine import load, random_prompts, timed
from bench.claims.static import static_seconds
from bench.claims.traffic import TRAFFIC, requests
from bench.prefix_replay import MEASURED
from bench.report import Figure

BATCH = 32
RUN = ("Azure, chat", "ShareGPT")  # whose prompts and answers fit a small model's context when scaled alike
MEAN_ANSWER = 16.0  # tokens
LONGEST = 1024  # tokens of a prompt with its answer
MANY = 60_000  # requests for the arithmetic
COMING = 6_400  # requests that come at random
LOAD = 0.8  # of what static batching can do
SPREADS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
BATCHES = (8, 32, 128)
CLAIMED = 3.0
FEWER_STEPS = 2.5
"""For every trace, also for chat whose answers have an upper bound, where three are not reached."""
STATIC, DROPPED, CONTINUOUS = "static", "static, finished rows dropped", "continuous"


def measure(scale: Scale) -> Claim:
    rounds, count = scale.pick(1, 2), scale.pick(96, 160)
    measured: dict[str, dict[str, Figure]] = {}
    total, done = len(RUN) * rounds * 3, 0
    settings = {"max_model_len": LONGEST, "scheduler": {"max_num_seqs": BATCH, "prefix_caching": False}}
    with load(scale, settings) as llm:
        timed(llm, random_prompts(llm, [16] * 2, 0), [2, 2])
        for name in RUN:
            asked = requests(name, count, MEAN_ANSWER, LONGEST, 1)
            found: dict[str, list[float]] = {STATIC: [], DROPPED: [], CONTINUOUS: []}
            for number in range(rounds):
                for way, speeds in found.items():
                    scale.say(done, total, f"{name}, {way}")
                    if way == CONTINUOUS:
                        prompts = random_prompts(llm, [prompt for prompt, _ in asked], 7 + number)
                        seconds = timed(llm, prompts, [answer for _, answer in asked])
                    else:
                        seconds = static_seconds(llm, asked, BATCH, number, pad=way == STATIC)
                    speeds.append(sum(answer for _, answer in asked) / seconds)
                    done += 1
            measured[name] = {way: Figure(tuple(speeds)) for way, speeds in found.items()}
    return judge(measured, count)


def judge(measured: dict[str, dict[str, Figure]], count: int) -> Claim:
    lengths = {name: [a for _, a in requests(name, MANY, t.mean_answer(), 1 << 20, 1)] for name, t in TRAFFIC.items()}
    per_step, _, per_row = MEASURED
    by_cost = {name: times(answers, BATCH, per_step, per_row) for name, answers in lengths.items()}
    waits = {}
    for name, answers in lengths.items():
        some = answers[:COMING]
        come = arrivals(len(some), LOAD * len(some) / times(some, BATCH, per_step, per_row).static, 2)
        waits[name] = [wait(some, come, BATCH, per_step, per_row) for wait in (static_waits, continuous_waits)]
    rows, fewer, data = [], {}, {}
    for name, answers in lengths.items():
        steps = static_steps(answers, BATCH), continuous_steps(answers, BATCH)
        fewer[name] = steps[0] / steps[1]
        shares = [in_use(answers, BATCH, number) for number in steps]
        speeds = measured.get(name)
        gains = "-" if speeds is None else f"{_gain(speeds, STATIC):.2f} / {_gain(speeds, DROPPED):.2f}"
        rows.append(
            [
                name,
                f"{variation(answers):.2f}",
                f"{shares[0]:.0%} / {shares[1]:.0%}",
                f"{fewer[name]:.1f}",
                f"{by_cost[name].static / by_cost[name].continuous:.1f} / {by_cost[name].dropped / by_cost[name].continuous:.1f}",
                f"{waits[name][0]:.0f} / {waits[name][1]:.0f}",
                *("-" if speeds is None else str(speeds[way]) for way in (STATIC, DROPPED, CONTINUOUS)),
                gains,
            ]
        )
        data[name] = {
            "variation": variation(answers),
            "in_use": shares,
            "steps": steps,
            "waits_s": waits[name],
            "tokens_per_s": {} if speeds is None else {way: figure.values for way, figure in speeds.items()},
        }
    drawn = [log_normal(cv, MANY, 200.0, 5) for cv in SPREADS]
    curves = {batch: [times_fewer(some, batch) for some in drawn] for batch in BATCHES}
    least = {batch: reached(curve) for batch, curve in curves.items()}
    faster = {name: _gain(speeds, STATIC) for name, speeds in measured.items()}
    return Claim(
        name="continuous",
        claim="Continuous batching makes 3 to 10 times the tokens per second of static batching, where answers differ enough in length: from a "
        f"variation of {', '.join(f'{cv:.2f} ({batch} sequences)' for batch, cv in least.items() if cv)} on, if they are distributed log-normally.",
        baseline=f"static batching: batches of {BATCH} in order of arrival, prompts padded to the longest, all rows computed until the longest answer is done, "
        "everybody answered then. 'Finished rows dropped': neither pads nor computes what nobody wants, and yet takes nobody in. "
        f"The steps are arithmetic over {MANY} requests, and so are the times of a 0.6B model, whose step takes {1e3 * per_step:.1f} ms and "
        f"{1e3 * per_row:.1f} ms per row on two cores; it is asked at random times, at {LOAD:.0%} of what static batching can do. Tokens/s are of {count} requests that are all there, on the same engine, "
        f"lengths scaled to {MEAN_ANSWER:.0f} tokens per answer.",
        head=[
            "answers as in",
            "their variation",
            "rows in use, static / continuous",
            "times fewer steps",
            "0.6B model: times static / dropped",
            f"s until answered at {LOAD:.0%} load, static / continuous",
            "static, tokens/s",
            "finished rows dropped, tokens/s",
            "continuous, tokens/s",
            "times static / dropped",
        ],
        rows=rows,
        picture=lines(
            [Line(f"batch of {batch}", SPREADS, curve) for batch, curve in curves.items()]
            + [Line(f"{CLAIMED:.0f} times", (SPREADS[0], SPREADS[-1]), (CLAIMED, CLAIMED), dashed=True)]
            + [
                Line(f"{name}, {BATCH}", (variation(answers),), (fewer[name],), joined=False)
                for name, answers in lengths.items()
            ],
            title="Static batching's steps for one of continuous batching",
            x_label="standard deviation / mean of answers' lengths",
            y_label="times",
        ),
        verdicts=[
            *(
                (times >= FEWER_STEPS, f"{name}: {times:.1f} times fewer steps at {BATCH} sequences")
                for name, times in fewer.items()
            ),
            *(
                (times >= CLAIMED, f"{name}: {times:.1f} times the tokens/s on this machine")
                for name, times in faster.items()
            ),
        ],
        data={"traffic": data, "curves": {str(b): c for b, c in curves.items()}, "spreads": SPREADS, "from": least},
    )


def reached(curve: list[float]) -> float | None:
    """The variation from which on there are ``CLAIMED`` times fewer steps, between two of ``SPREADS`` by a straight line."""
    for i in range(1, len(SPREADS)):
        low, high = curve[i - 1], curve[i]
        if low < CLAIMED <= high:
            return SPREADS[i - 1] + (SPREADS[i] - SPREADS[i - 1]) * (CLAIMED - low) / (high - low)
    return None


def _gain(speeds: dict[str, Figure], way: str) -> float:
    return speeds[CONTINUOUS].median / speeds[way].median
