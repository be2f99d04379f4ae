"""Time to the first token by what counts as a replica's load, in simulated time: ``python -m bench.choosing TRACE...``.

    python -m bench.choosing mooncake/conversation_trace.jsonl azure-llm-2023/code.csv

Requests of a trace go to replicas by the gateway's own choice (``inferd.router.choosing``). A replica computes steps as
an engine does: chunks of prompts in order of arrival, up to a budget, beside one token of each answer. It keeps blocks of
prompts, least recently used ones last. The load is the number of sequences alone, or with the prompts that are not
computed yet (``inferd.router.replicas.prompt_work``). Traces of Mooncake share prompts; those of Azure have lengths alone.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import heapq
import itertools
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from bench.gateways import Asked, Server, read
from bench.report import markdown
from inferd.router.choosing.affinity import PrefixIndex, indexed_bytes, new_bytes, prefixes
from inferd.router.choosing.policy import choose
from inferd.router.choosing.split import FIRST_TOKENS_PER_BYTE
from inferd.router.replicas.prompt_work import PromptWork

BYTES_PER_TOKEN = 4


@dataclass(slots=True)
class Work:
    """A request in a replica. ``left``: tokens of its prompt that are not computed."""

    name: str
    at: float
    left: int
    answer: int


@dataclass(slots=True)
class Replica:
    """A replica, as the policy sees it and as it computes."""

    index: int
    cache: Server
    counts_prompts: bool
    weight: float = 1.0
    region: str = ""
    is_fallback: bool = False
    can_take: bool = True
    sequences: int = 0
    prompts: PromptWork = field(default_factory=PromptWork)
    waiting: deque[Work] = field(default_factory=deque)
    answers: list[int] = field(default_factory=list)  # the steps in which answers end
    num_steps: int = 0
    is_busy: bool = False

    @property
    def identity(self) -> str:
        return f"replica-{self.index}"

    @property
    def load(self) -> float:
        return self.sequences + (self.prompts.load if self.counts_prompts else 0.0)


class Found(NamedTuple):
    """``waits``: seconds to the first tokens, in order of size. ``hits``: the part of the blocks that were cached."""

    waits: list[float]
    hits: float


def play(requests: Sequence[Asked], options: argparse.Namespace, *, counts_prompts: bool) -> Found:
    """Every request of a trace to its end."""
    random = Random(options.seed)
    replicas = [Replica(index, Server(options.capacity), counts_prompts) for index in range(options.replicas)]
    index = PrefixIndex(20_000)
    numbers = itertools.count()
    steps: list[tuple[float, int, Replica, list[Work]]] = []
    waits: list[float] = []
    hits = total = 0

    def begin(replica: Replica, now: float) -> None:
        """A step, where there is something to compute."""
        budget, computed = options.budget, list[Work]()
        while replica.waiting and budget:
            work = replica.waiting[0]
            part = min(budget, work.left)
            work.left -= part
            budget -= part
            if work.left:
                break
            computed.append(replica.waiting.popleft())
        num_tokens = options.budget - budget
        replica.is_busy = bool(num_tokens or replica.answers)
        if replica.is_busy:
            took = options.step_s + num_tokens * options.prefill_s + len(replica.answers) * options.decode_s
            heapq.heappush(steps, (now + took, next(numbers), replica, computed))

    def end_steps(before: float) -> None:
        while steps and steps[0][0] <= before:
            now, _, replica, computed = heapq.heappop(steps)
            replica.num_steps += 1
            while replica.answers and replica.answers[0] <= replica.num_steps:
                heapq.heappop(replica.answers)
                replica.sequences -= 1
            for work in computed:
                waits.append(now - work.at)
                replica.prompts.remove(work.name)
                heapq.heappush(replica.answers, replica.num_steps + max(1, work.answer - 1))
            begin(replica, now)

    for number, request in enumerate(requests):
        end_steps(request.at)
        keys = prefixes("", request.text)
        seen = index.best(keys) if keys else {}
        chosen = choose(replicas, random=random, prefer=seen, prompt_bytes=indexed_bytes(keys), slack=options.slack)
        assert chosen is not None
        if keys:
            index.note(keys, chosen.index)
        num_tokens = len(request.blocks) * options.block_tokens
        found = chosen.cache.ask(request.blocks) if keys else 0
        hits, total = hits + found, total + len(request.blocks)
        expected = new_bytes(num_tokens * BYTES_PER_TOKEN, seen.get(chosen.index, 0)) * FIRST_TOKENS_PER_BYTE
        chosen.sequences += 1
        chosen.prompts.add(str(number), int(expected))
        left = max(1, num_tokens - found * options.block_tokens)
        chosen.waiting.append(Work(str(number), request.at, left, request.answer))
        if not chosen.is_busy:
            begin(chosen, request.at)
    end_steps(float("inf"))
    return Found(sorted(waits), hits / max(1, total))


def requests_of(path: Path) -> tuple[list[Asked], int]:
    """The requests of a trace in order of arrival, and the tokens of its blocks."""
    if path.suffix != ".csv":
        return read(path)
    with path.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    times = [datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return sorted(
        (
            Asked(at, b"", range(int(row["ContextTokens"])), int(row["GeneratedTokens"]))
            for at, row in zip(times, rows, strict=True)
        ),
        key=lambda asked: asked.at,
    ), 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.choosing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=4000, help="blocks in the cache of a replica")
    parser.add_argument("--slack", type=float, default=1.5)
    parser.add_argument("--budget", type=int, default=2048, help="tokens of prompts in a step")
    parser.add_argument("--step-s", type=float, default=0.01, help="seconds of every step")
    parser.add_argument("--prefill-s", type=float, default=0.0001, help="seconds per token of a prompt")
    parser.add_argument("--decode-s", type=float, default=0.0003, help="seconds per token of an answer")
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster requests come than in the trace")
    parser.add_argument("--limit", type=int, default=6000, help="requests of each trace")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rows = []
    for path in options.traces:
        requests, options.block_tokens = requests_of(path)
        requests = [asked._replace(at=asked.at / options.speed) for asked in requests[: options.limit]]
        for name, counts_prompts in (("sequences", False), ("sequences and prompts", True)):
            found = play(requests, options, counts_prompts=counts_prompts)
            parts = [found.waits[int(part * (len(found.waits) - 1))] for part in (0.5, 0.95, 0.99)]
            rows.append([path.name, name, *(f"{part:.3f}" for part in parts), f"{found.hits:.1%}"])
    print(markdown(["trace", "load", "p50, s", "p95, s", "p99, s", "blocks found"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
