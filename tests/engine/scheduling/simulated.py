"""The scheduler under a simulated clock: what a step takes is a sum over its tokens, and nothing is computed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from inferd.config import SchedulerConfig
from inferd.engine.scheduling.blocks import BlockPool
from inferd.engine.scheduling.scheduler import Scheduler
from inferd.engine.scheduling.sequence import Sequence
from inferd.types import RANKS, PriorityClass, SamplingParams


@dataclass(frozen=True)
class Job:
    """One request: its arrival, its prompt and output length, its class and its tenant."""

    at: float
    prompt: int
    answer: int
    kind: PriorityClass = "normal"
    tenant: str = ""
    weight: float = 1.0


@dataclass
class Fate:
    """What became of a job."""

    job: Job
    sequence: Sequence
    first_token_at: float | None = None
    finished_at: float | None = None
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        assert self.first_token_at is not None
        return self.first_token_at - self.job.at


class Simulation:
    """Runs jobs to their ends, or until a time."""

    def __init__(
        self,
        *,
        fixed: float = 0.005,
        per_token: float = 0.0001,
        per_decode: float = 0.0001,
        num_blocks: int = 4096,
        tpot_s: float | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
    ) -> None:
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.scheduler = Scheduler(config, BlockPool(num_blocks), 16, tpot_s=tpot_s)
        self.fixed, self.per_token, self.per_decode = fixed, per_token, per_decode
        self.now = 0.0
        self._ids = itertools.count()

    def run(self, jobs: Iterable[Job], until: float = float("inf")) -> list[Fate]:
        arrivals = [(job.at, next(self._ids), job) for job in jobs]
        heapq.heapify(arrivals)
        fates: dict[Sequence, Fate] = {}
        scheduler = self.scheduler
        while (arrivals or scheduler.has_work) and self.now < until:
            if not scheduler.has_work:
                self.now = max(self.now, arrivals[0][0])
            while arrivals and arrivals[0][0] <= self.now:
                _, number, job = heapq.heappop(arrivals)
                sequence = Sequence(
                    request_id=str(number),
                    index=0,
                    prompt_ids=[number * 10_000 + i for i in range(job.prompt)],
                    sampling=SamplingParams(),
                    seed=0,
                    tenant=job.tenant,
                    weight=job.weight,
                    priority=RANKS[job.kind],
                    arrived_at=job.at,
                )
                fates[sequence] = Fate(job, sequence)
                scheduler.add(sequence)
            step = scheduler.schedule()
            assert step.slices, "work was left and nothing was computed"
            decodes = sum(part.count == 1 for part in step.slices)
            seconds = self.fixed + self.per_token * (step.num_tokens - decodes) + self.per_decode * decodes
            self.now += seconds
            scheduler.record_cost(step, seconds)
            scheduler.commit(step)
            for part in step.slices:
                if part.catches_up:
                    self._extend(fates[part.sequence])
        return list(fates.values())

    def _extend(self, fate: Fate) -> None:
        fate.sequence.tokens.append(1)
        fate.token_times.append(self.now)
        if fate.first_token_at is None:
            fate.first_token_at = self.now
        if fate.sequence.num_outputs == fate.job.answer:
            fate.finished_at = self.now
            self.scheduler.remove(fate.sequence)


def p95(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * 0.95), len(ordered) - 1)]
