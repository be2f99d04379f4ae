"""The arithmetic of static and continuous batching, over lengths of answers in tokens. Pure; a step computes one token of each row.

A static batch is full before it begins, its prompts are padded to the longest, every row goes on until the longest answer is done, all
are answered then, and only then the next batch begins. That is what a server does which calls a model's ``generate`` with batches. In a
continuous batch, whoever is done makes room for the next at once.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def waves(lengths: Sequence[int], batch: int) -> list[Sequence[int]]:
    """The static batches, in order of arrival; the last may not be full."""
    return [lengths[i : i + batch] for i in range(0, len(lengths), batch)]


def static_steps(answers: Sequence[int], batch: int) -> int:
    return sum(map(max, waves(answers, batch)))


def continuous_steps(answers: Sequence[int], batch: int) -> int:
    """Every answer takes the place that is free first."""
    places = [0] * batch
    for answer in answers:
        heapq.heapreplace(places, places[0] + answer)
    return max(places)


def in_use(answers: Sequence[int], batch: int, steps: int) -> float:
    """The share of all rows of all steps that compute a token somebody wants."""
    return sum(answers) / (batch * steps)


def variation(lengths: Sequence[int]) -> float:
    """The coefficient of variation: standard deviation / mean."""
    return statistics.pstdev(lengths) / statistics.fmean(lengths)


def log_normal(cv: float, count: int, mean: float, seed: int) -> list[int]:
    """Lengths with a tail like that of real answers, of a given coefficient of variation; 0: all equal."""
    draw, sigma = random.Random(seed), math.sqrt(math.log1p(cv * cv))
    mu = math.log(mean) - sigma * sigma / 2
    return [max(round(draw.lognormvariate(mu, sigma)), 1) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of decoding by a step's cost: so much for the step, and so much for each row."""

    static: float
    dropped: float  # static, but finished rows are not computed
    continuous: float


def times(answers: Sequence[int], batch: int, per_step: float, per_row: float) -> Times:
    steps, wanted = static_steps(answers, batch), per_row * sum(answers)
    rows = sum(len(wave) * max(wave) for wave in waves(answers, batch))
    return Times(
        static=per_step * steps + per_row * rows,
        dropped=per_step * steps + wanted,
        continuous=per_step * continuous_steps(answers, batch) + wanted,
    )


def arrivals(count: int, per_second: float, seed: int) -> list[float]:
    """When requests come that know nothing of each other: a Poisson process."""
    draw, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(per_second)
        found.append(now)
    return found


def static_waits(answers: Sequence[int], come: Sequence[float], batch: int, per_step: float, per_row: float) -> float:
    """Mean seconds from a request's arrival to its answer: the batch fills, the one before it ends, its longest answer is done."""
    free_at = waited = 0.0
    for wave, times_of in zip(waves(answers, batch), waves(range(len(come)), batch), strict=True):
        begin = max(free_at, come[times_of[-1]])
        free_at = begin + max(wave) * (per_step + per_row * len(wave))
        waited += sum(free_at - come[i] for i in times_of)
    return waited / len(answers)


def continuous_waits(
    answers: Sequence[int], come: Sequence[float], batch: int, per_step: float, per_row: float
) -> float:
    """The same, where whoever has come is taken in with the next step as long as there is a place."""
    running: list[tuple[int, int]] = []  # a heap: (step after which it is done, which)
    now, step, waited, following = 0.0, 0, 0.0, 0
    while running or following < len(answers):
        if not running:
            now = max(now, come[following])
        while following < len(answers) and come[following] <= now and len(running) < batch:
            heapq.heappush(running, (step + answers[following], following))
            following += 1
        each, count = per_step + per_row * len(running), running[0][0] - step
        if following < len(answers) and len(running) < batch:  # steps until somebody comes
            count = min(count, max(math.ceil((come[following] - now) / each), 1))
        now, step = now + count * each, step + count
        while running and running[0][0] == step:
            waited += now - come[heapq.heappop(running)[1]]
    return waited / len(answers)


def times_fewer(answers: Sequence[int], batch: int) -> float:
    """Steps of static batching for one of continuous batching."""
    return static_steps(answers, batch) / continuous_steps(answers, batch)
