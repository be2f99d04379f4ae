"""Real traffic through inferd's scheduler and block pool under a simulated clock: ``python -m bench.prefix_replay``.

    python -m bench.prefix_replay mooncake/conversation_trace.jsonl --output replay
    python -m bench.prefix_replay aibrix-sharegpt/8min_up_and_down.jsonl --capacities 2000,8000 --output replay

Nothing is computed: a step takes what the cost model says (seconds: fixed, and per prefill token, and per decode), so
no torch is needed. What decides (admission, chunks, preemption, eviction) is the server's own code. Arrival times are stretched so
that without a cache the server would be busy for the share ``--load`` of the time. At every capacity:

- blocks reused, beside the ideals of ``bench/reuse.py``: the clairvoyant one, the best without foresight and LRU's at this
  capacity, and the unlimited one;
- time to first token with the prefix cache and without it;
- requests that run at the same time in the same memory, paged and with contiguous reservations.

Writes DIR/NAME.json, .md and .svg for each trace.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.chart import Line, lines
from bench.report import markdown
from bench.reuse import Numbering, clairvoyant, recent, statistical, unlimited
from bench.traces import Arrival, read
from inferd.benchmark.stats import percentile
from inferd.config import SchedulerConfig
from inferd.engine.scheduling.blocks import BlockPool
from inferd.engine.scheduling.scheduler import Scheduler
from inferd.engine.scheduling.sequence import Sequence as EngineSequence
from inferd.types import SamplingParams

# Seconds per step, measured with the 0.6B shape in bf16 on two cores: 29 ms alone, 139 ms at 32 sequences, 415 tokens/s of prefill.
MEASURED = (0.0255, 0.00241, 0.0035)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step."""

    fixed: float
    prefill: float  # per token
    decode: float  # per sequence

    def of(self, prefill_tokens: int, decodes: int) -> float:
        return self.fixed + self.prefill * prefill_tokens + self.decode * decodes


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of a trace at one capacity."""

    reused: int  # blocks found in the prefix cache at first admission
    ttft_s: tuple[float, ...]
    preempted: int
    mean_running: float  # requests per step, over the steps in which somebody waited
    ended_at: float


def replay(
    arrivals: Sequence[Arrival],
    *,
    num_blocks: int,
    block_size: int,
    cost: Cost,
    prefix_caching: bool = True,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 512,
) -> Replay:
    """Every request to its end. Answers are tokens that no prompt has."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, prefix_caching=prefix_caching
    )
    scheduler = Scheduler(config, BlockPool(num_blocks), block_size)
    coming = deque(arrivals)
    answers: dict[EngineSequence, int] = {}
    first: list[float] = []
    fresh = itertools.count(-1, -1)
    now, reused, preempted, ids = 0.0, 0, 0, itertools.count()
    crowded, crowd = 0, 0
    sampling = SamplingParams()
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, coming[0].at)
        while coming and coming[0].at <= now:
            arrival = coming.popleft()
            sequence = EngineSequence(
                request_id=str(next(ids)),
                index=0,
                prompt_ids=arrival.prompt,
                sampling=sampling,
                seed=0,
                arrived_at=arrival.at,
            )
            answers[sequence] = arrival.answer
            scheduler.add(sequence)
        step = scheduler.schedule()
        decodes = sum(part.count == 1 for part in step.slices)
        now += cost.of(step.num_tokens - decodes, decodes)
        preempted += step.num_preempted
        if scheduler.num_waiting:
            crowded += 1
            crowd += len(scheduler.running)
        scheduler.commit(step)
        for part in step.slices:
            if part.catches_up:
                sequence = part.sequence
                if not sequence.num_outputs:
                    first.append(now - sequence.arrived_at)
                    reused += sequence.num_cached // block_size
                sequence.tokens.append(next(fresh))
                if sequence.num_outputs == answers[sequence]:
                    del answers[sequence]
                    scheduler.remove(sequence)
    scheduler.pool.check()
    return Replay(reused, tuple(sorted(first)), preempted, crowd / crowded if crowded else 0.0, now)


def reserved(arrivals: Sequence[Arrival], capacity: int, reserve: Callable[[Arrival], int]) -> float:
    """Requests that run at the same time, per step in which somebody waits, when each takes ``reserve`` tokens of
    ``capacity`` from its start to its end: no pages, no preemption. All have arrived; first come, first served."""
    waiting = deque(arrivals)
    running: list[list[int]] = []  # [steps left, tokens held]
    free, steps, total = capacity, 0, 0
    while waiting:
        while waiting and reserve(waiting[0]) <= free:
            arrival = waiting.popleft()
            free -= reserve(arrival)
            running.append([arrival.answer, reserve(arrival)])
        if not running:
            raise ValueError(f"{capacity} tokens do not hold a request that reserves {reserve(waiting[0])}.")
        if waiting:
            steps += 1
            total += len(running)
        for one in running:
            one[0] -= 1
        free += sum(held for left, held in running if not left)
        running = [one for one in running if one[0]]
    return total / steps if steps else 0.0


def at_load(arrivals: Sequence[Arrival], load: float, busy_s: float) -> list[Arrival]:
    """The same requests, their times stretched so that ``busy_s`` of work fills ``load`` of the time."""
    began = arrivals[0].at
    factor = busy_s / load / max(arrivals[-1].at - began, 1e-9)
    return [Arrival((a.at - began) * factor, a.prompt, a.answer) for a in arrivals]


def busy_time(arrivals: Sequence[Arrival], **how: Any) -> float:
    """Seconds for all of them without a cache, from some of them that come all at once."""
    some = [Arrival(0.0, a.prompt, a.answer) for a in arrivals[:: max(len(arrivals) // 1000, 1)]]
    share = sum(len(a.prompt) + a.answer for a in some) / sum(len(a.prompt) + a.answer for a in arrivals)
    return replay(some, prefix_caching=False, **how).ended_at / share


def measure(arrivals: Sequence[Arrival], capacities: Sequence[int], options: argparse.Namespace) -> dict[str, object]:
    size, cost = options.block_size, Cost(*options.cost)
    numbering = Numbering(size)
    visits = [numbering.visit(a.prompt, a.answer) for a in arrivals]
    total, most = sum(v.findable for v in visits), unlimited(visits)
    longest = max(-(-(len(a.prompt) + a.answer) // size) for a in arrivals)
    busy_s = busy_time(
        arrivals, num_blocks=max(*capacities, longest), block_size=size, cost=cost, max_num_seqs=options.max_num_seqs
    )
    timed = at_load(arrivals, options.load, busy_s)
    rows = []
    for capacity in capacities:
        if capacity < longest:
            say(f"{capacity} blocks do not hold the longest request, {longest} blocks: left out")
            continue
        found = replay(timed, num_blocks=capacity, block_size=size, cost=cost, max_num_seqs=options.max_num_seqs)
        without = replay(
            timed,
            num_blocks=capacity,
            block_size=size,
            cost=cost,
            prefix_caching=False,
            max_num_seqs=options.max_num_seqs,
        )
        best, lru = clairvoyant(visits, capacity), recent(visits, capacity)
        blind = statistical(visits, capacity)
        rows.append(
            {
                "capacity_blocks": capacity,
                "reused": found.reused,
                "reused_share": found.reused / total,
                "clairvoyant_share": best / total,
                "statistical_share": blind / total,
                "recent_share": lru / total,
                "unlimited_share": most / total,
                "of_clairvoyant": found.reused / max(best, 1),
                "of_statistical": found.reused / max(blind, 1.0),
                "of_recent": found.reused / max(lru, 1),
                "of_unlimited": found.reused / max(most, 1),
                "preempted": found.preempted,
                "ttft_s": quantiles(found.ttft_s),
                "ttft_without_cache_s": quantiles(without.ttft_s),
            }
        )
        say(
            f"{capacity} blocks: {found.reused / total:.1%} reused, {found.reused / max(best, 1):.1%} of the clairvoyant ideal"
        )
    return {
        "requests": len(arrivals),
        "prompt_blocks": total,
        "block_size": size,
        "cost": asdict(cost),
        "load": options.load,
        "capacities": rows,
        "concurrency": concurrency(arrivals[: options.concurrency_requests], size, longest),
    }


def concurrency(arrivals: Sequence[Arrival], size: int, longest: int) -> dict[str, float]:
    """Requests that run together in memory for eight of the longest, every one of them there from the start."""
    num_blocks = 8 * longest
    burst = [Arrival(0.0, a.prompt, a.answer) for a in arrivals]
    answer = max(a.answer for a in arrivals)
    free, many = Cost(1.0, 0.0, 0.0), 1 << 20  # a prompt is one step, as it is with reservations

    def paged(*, prefix_caching: bool) -> float:
        return replay(
            burst,
            num_blocks=num_blocks,
            block_size=size,
            cost=free,
            prefix_caching=prefix_caching,
            max_num_seqs=len(burst),
            max_num_batched_tokens=many,
        ).mean_running

    return {
        "tokens": num_blocks * size,
        "contiguous, the longest that may come": reserved(burst, num_blocks * size, lambda _: longest * size),
        "contiguous, prompt + longest answer": reserved(burst, num_blocks * size, lambda a: len(a.prompt) + answer),
        "contiguous, exact lengths foreknown": reserved(burst, num_blocks * size, lambda a: len(a.prompt) + a.answer),
        "paged": paged(prefix_caching=False),
        "paged, prefixes shared": paged(prefix_caching=True),
    }


def quantiles(ordered: Sequence[float]) -> dict[str, float]:
    return {"mean": sum(ordered) / max(len(ordered), 1)} | {f"p{p}": percentile(ordered, p) for p in (50, 95, 99)}


def report(name: str, found: dict[str, object]) -> str:
    rows, held = found["capacities"], found["concurrency"]
    assert isinstance(rows, list)
    assert isinstance(held, dict)
    reuse = markdown(
        [
            "blocks",
            "reused",
            "clairvoyant",
            "statistical",
            "LRU alone",
            "unlimited",
            "of clairvoyant",
            "of statistical",
            "of LRU",
        ],
        [
            [
                str(row["capacity_blocks"]),
                *(
                    f"{row[key]:.1%}"
                    for key in (
                        "reused_share",
                        "clairvoyant_share",
                        "statistical_share",
                        "recent_share",
                        "unlimited_share",
                    )
                ),
                *(f"{row[key]:.1%}" for key in ("of_clairvoyant", "of_statistical", "of_recent")),
            ]
            for row in rows
        ],
    )
    ttft = markdown(
        ["blocks", "TTFT mean with / without, s", "p50", "p95", "mean: times shorter", "preempted"],
        [
            [
                str(row["capacity_blocks"]),
                *(f"{row['ttft_s'][p]:.2f} / {row['ttft_without_cache_s'][p]:.2f}" for p in ("mean", "p50", "p95")),
                f"{row['ttft_without_cache_s']['mean'] / max(row['ttft_s']['mean'], 1e-9):.2f}",
                str(row["preempted"]),
            ]
            for row in rows
        ],
    )
    base = held["contiguous, the longest that may come"]
    memory = markdown(
        ["KV cache", "requests at the same time", "times"],
        [[key, f"{value:.1f}", f"{value / base:.2f}"] for key, value in held.items() if key != "tokens"],
    )
    return (
        f"# {name}\n\n{found['requests']} requests, {found['prompt_blocks']} blocks that could be found cached, "
        f"{found['block_size']} tokens each; work at {found['load']:.0%} of the time without a cache.\n\n"
        f"{reuse}\n{ttft}\nIn {held['tokens']} tokens of memory:\n\n{memory}"
    )


def picture(name: str, found: dict[str, object]) -> str:
    rows = found["capacities"]
    assert isinstance(rows, list)
    x = [float(row["capacity_blocks"]) for row in rows]

    def curve(label: str, key: str) -> Line:
        return Line(label, x, [100 * row[key] for row in rows])

    return lines(
        [
            curve("unlimited", "unlimited_share"),
            curve("clairvoyant", "clairvoyant_share"),
            curve("best without foresight", "statistical_share"),
            curve("inferd", "reused_share"),
            curve("LRU alone", "recent_share"),
        ],
        title=f"Blocks reused, {name}",
        x_label="capacity, blocks",
        y_label="% of prompt blocks",
        log_x=True,
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="Mooncake's or AIBrix's JSON lines")
    parser.add_argument("--capacities", default="4000,8000,16000,32000,64000,128000", help="blocks, with commas")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--load", type=float, default=0.5, help="share of the time that the work without a cache takes")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--requests", type=int, help="only so many, the first ones")
    parser.add_argument("--concurrency-requests", type=int, default=1000, help="likewise for the last table")
    parser.add_argument(
        "--cost",
        type=lambda text: [float(part) for part in text.split(",")],
        default=MEASURED,
        help="seconds: fixed, per prefill token, per decode",
    )
    parser.add_argument("--output", type=Path, default=Path("replay"), help="folder that is written to")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    capacities = [int(part) for part in options.capacities.split(",")]
    for trace in options.traces:
        say(str(trace))
        arrivals = read(trace, options.block_size)[: options.requests]
        found = measure(arrivals, capacities, options)
        name = trace.stem
        (options.output / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        (options.output / f"{name}.md").write_text(report(name, found))
        (options.output / f"{name}.svg").write_text(picture(name, found))
        print(report(name, found))


if __name__ == "__main__":
    main()
