"""Simulated drift against what the monitors promise: ``python -m bench.drift``.

    python -m bench.drift --runs 2000 --picture docs/pictures/drift.svg

Every run takes a reference of 10,000 requests and then compares windows for 30 days, with the server's own code
(``drift/windows.py``). Prints tables in Markdown, and writes a picture. Exit status 1 names what did not hold:

- without a change there is at most one false alarm in 30 days, on average, for slow and for fast traffic, for
  few and many cells, with rare ones, and for unequal traffic;
- windows of embeddings without a change are below a level as often as it says: within the exact binomial 99 % band;
- a change of one label from 10 % to 20 % is found within 3,000 requests (median), a shift of a number by half of its
  standard deviation within 2,000, and one by a tenth within 32,000.

``--only embeddings`` leaves out the cases and changes of another name, and the rules. Beside them stands what usual rules of thumb do on the same windows without a change: PSI above 0.1 or 0.2, and a
Kolmogorov-Smirnov or chi-squared test of each window at 5 %.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from scipy.stats import binomtest, chi2_contingency, ks_2samp  # type: ignore[import-untyped]

from bench.chart import Line, lines
from inferd.config import DriftStream
from inferd.drift.cells import Value
from inferd.drift.mean import SPREAD_VECTORS, Mean, Spread, Vector
from inferd.drift.monitors import DAY_S
from inferd.drift.psi import psi
from inferd.drift.reference import Collection
from inferd.drift.windows import SIZES, Baseline, Windows
from inferd.predict.facts import features_of

FIRST: Final = 10_000
BATCH: Final = 50
POOL: Final = 20_000
"""Embeddings whose features are computed; draws are from these, with replacement."""

TOPICS: Final = 20
SIZE: Final = 384
LEVELS: Final = (0.05, 0.01, 0.003, 0.001, 0.0003)
WINDOW: Final = 1000
DAYS: Final = 30.0
RATE: Final = 1.0 / (DAYS * DAY_S)

Draw = Callable[[np.random.Generator, int], Sequence[Value | Vector]]


class Case(NamedTuple):
    """Traffic without a change: what values are like, and how many there are in 30 days."""

    name: str
    draw: Draw
    requests: int


class Change(NamedTuple):
    """A change, and within how many requests half of the runs must find it."""

    name: str
    before: Draw
    after: Draw
    bound: int


def labels(*shares: float) -> Draw:
    names = np.array([f"label {number}" for number in range(len(shares))])
    return lambda random, size: [str(name) for name in random.choice(names, size=size, p=np.array(shares))]


def normal(mean: float = 0.0, deviation: float = 1.0) -> Draw:
    return lambda random, size: random.normal(mean, deviation, size).tolist()


def geometric(mean: float) -> Draw:
    """Lengths in tokens."""
    return lambda random, size: [float(value) for value in random.geometric(1.0 / mean, size)]


def zipf(count: int) -> Draw:
    weights = 1.0 / np.arange(1, count + 1)
    return labels(*(weights / weights.sum()).tolist())


@functools.cache
def pool(new_topic: float) -> list[list[float]]:
    """Features of embeddings around the centres of topics, whose shares are as of Zipf; ``new_topic``: the share of one
    more."""
    random = np.random.default_rng(20)
    centres = random.standard_normal((TOPICS + 1, SIZE)) + 0.7 * random.standard_normal(SIZE)
    shares = (1.0 - new_topic) / np.arange(1, TOPICS + 1) / (1.0 / np.arange(1, TOPICS + 1)).sum()
    which = random.choice(TOPICS + 1, size=POOL, p=[*shares, new_topic])
    rows = centres[which] + 0.8 * random.standard_normal((POOL, SIZE))
    return [np.frombuffer(features_of(row), np.float32).tolist() for row in rows]


def embeddings(new_topic: float = 0.0) -> Draw:
    def draw(random: np.random.Generator, size: int) -> Sequence[Vector]:
        found = pool(new_topic)
        return [found[index] for index in random.integers(0, POOL, size)]

    return draw


CASES: Final = (
    Case("two labels, 100,000 requests", labels(0.9, 0.1), 100_000),
    Case("two labels, one of 0.1 %, 100,000", labels(0.999, 0.001), 100_000),
    Case("200 labels (Zipf), 100,000", zipf(200), 100_000),
    Case("a number, 100,000", normal(), 100_000),
    Case("lengths, 100,000", geometric(80.0), 100_000),
    Case("a number, 16,000", normal(), 16_000),
    Case("embeddings, 100,000", embeddings(), 100_000),
)
CHANGES: Final = (
    Change("a label from 10 % to 20 %", labels(0.9, 0.1), labels(0.8, 0.2), 3_000),
    Change("a label from 10 % to 12 %", labels(0.9, 0.1), labels(0.88, 0.12), 32_000),
    Change("a new label, 1 %", labels(0.5, 0.5), labels(0.495, 0.495, 0.01), 5_000),
    Change("a number by 0.5 deviations", normal(), normal(0.5), 2_000),
    Change("a number by 0.25 deviations", normal(), normal(0.25), 3_000),
    Change("a number by 0.1 deviations", normal(), normal(0.1), 32_000),
    Change("a deviation from 1 to 1.25", normal(), normal(0.0, 1.25), 5_000),
    Change("lengths of 80 tokens to 100", geometric(80.0), geometric(100.0), 5_000),
    Change("embeddings, 10 % of a new topic", embeddings(), embeddings(0.1), 5_000),
    Change("embeddings, 3 % of a new topic", embeddings(), embeddings(0.03), 50_000),
)


def reference_of(random: np.random.Generator, draw: Draw) -> Baseline[Any]:
    """As the server takes one: the first values choose the cells, or tell the spread, and the others are counted."""
    values = draw(random, FIRST)
    stream: DriftStream = "score" if isinstance(values[0], float | str) else "embedding"
    collection = Collection(FIRST)
    for begin in range(0, FIRST, BATCH):
        collection.add(BATCH, {stream: values[begin : begin + BATCH]})
    return collection.streams(least=1)[stream].baseline


def quiet_alarms(random: np.random.Generator, case: Case, runs: int) -> list[int]:
    """False alarms in 30 days, of each run. Every value is drawn and counted as the server does it."""
    gap = DAYS * DAY_S / case.requests
    found = []
    for _ in range(runs):
        windows = Windows(reference_of(random, case.draw), WINDOW, RATE, 0.0, now=0.0)
        now = 0.0
        for _ in range(case.requests // WINDOW):
            now += float(random.gamma(WINDOW, gap))
            windows.add(case.draw(random, WINDOW), now)
        found.append(windows.num_alarms)
    return found


def delay(random: np.random.Generator, change: Change, most: int = 100_000) -> int:
    """Requests after a change until it is found; ``most``: it is not. There are 100,000 requests in 30 days, and the
    change comes at any time within a window of the largest size."""
    gap = DAYS * DAY_S / 100_000
    windows = Windows(reference_of(random, change.before), WINDOW, RATE, 0.0, now=0.0)
    before = int(random.integers(0, WINDOW * SIZES[-1]))
    now = before * gap
    windows.add(change.before(random, before), now)
    seen = 0
    while seen < most:
        size = WINDOW - (before + seen) % WINDOW
        now += size * gap
        seen += size
        closed = windows.add(change.after(random, size), now)
        if any(reading.is_alarm for readings in closed for reading in readings):
            return seen
    return most


def levels_reached(random: np.random.Generator, windows: int, size: int) -> dict[float, int]:
    """How many of so many windows of ``size`` embeddings without a change are at each level or below. Each is compared
    with a reference of its own, so they are independent. The reference is as the server takes it, computed by numpy."""
    vectors = np.array(pool(0.0))
    found = []
    for _ in range(windows):
        reference = vectors[random.integers(0, POOL, FIRST)]
        window = vectors[random.integers(0, POOL, size)]
        eigenvalues = np.linalg.eigvalsh(np.cov(reference[:SPREAD_VECTORS].T)).clip(0.0)
        spread = Spread(eigenvalues=tuple(eigenvalues.tolist()))
        mean = Mean(num=FIRST, sums=tuple(reference.sum(0).tolist()), spread=spread)
        found.append(mean.probability(size, window.sum(0).tolist()))
    return {level: sum(p <= level for p in found) for level in LEVELS}


def thumbs(random: np.random.Generator, runs: int) -> dict[str, float]:
    """Alarms in 100 windows of 1,000 without a change, on average, of usual rules; ten cells of one size."""
    alarms = dict.fromkeys(("PSI > 0.1", "PSI > 0.2", "chi-squared at 5 %", "Kolmogorov-Smirnov at 5 %"), 0)
    small = 0
    for _ in range(runs):
        values = random.normal(size=FIRST)
        edges = np.quantile(values, np.arange(1, 10) / 10)
        reference = np.bincount(np.searchsorted(edges, values), minlength=10)
        for _ in range(100):
            window = random.normal(size=WINDOW)
            counts = np.bincount(np.searchsorted(edges, window), minlength=10)
            index = psi(reference.tolist(), counts.tolist())
            alarms["PSI > 0.1"] += index > 0.1
            alarms["PSI > 0.2"] += index > 0.2
            alarms["chi-squared at 5 %"] += chi2_contingency([reference, counts]).pvalue < 0.05
            alarms["Kolmogorov-Smirnov at 5 %"] += ks_2samp(values, window, method="asymp").pvalue < 0.05
            some = np.bincount(np.searchsorted(edges, window[:100]), minlength=10)
            small += psi(reference.tolist(), some.tolist()) > 0.1
    found = {name: count / runs for name, count in alarms.items()}
    return {**found, "PSI > 0.1, windows of 100": small / runs}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *["| " + " | ".join(row) + " |" for row in rows]]
    )


def picture(delays: dict[str, list[int]]) -> str:
    curves = []
    for name, found in delays.items():
        places = sorted(found)
        curves.append(Line(name, places, [(number + 1) / len(places) for number in range(len(places))]))
    return lines(
        curves,
        title="Part of simulated changes that were found",
        x_label="requests after the change (100,000 in 30 days, one false alarm in 30 days)",
        y_label="part of the runs",
        log_x=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--changes", type=int, default=300, help="runs of each change")
    parser.add_argument("--windows", type=int, default=20_000, help="windows of embeddings that are tested")
    parser.add_argument("--only", default="", metavar="WORD", help="cases and changes whose name begins so")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(arguments)
    since = time.monotonic()
    failed, rows = [], []
    for number, case in enumerate(CASES):
        if not case.name.startswith(options.only):
            continue
        alarms = quiet_alarms(np.random.default_rng([options.seed, number]), case, options.runs)
        mean = float(np.mean(alarms))
        error = float(np.std(alarms)) / math.sqrt(len(alarms))
        some = sum(alarm > 0 for alarm in alarms) / len(alarms)
        rows.append([case.name, f"{mean:.3f} ± {2 * error:.3f}", f"{100 * some:.1f} %"])
        if mean - 3 * error > 1.0:
            failed.append(f"{case.name}: {mean:.2f} false alarms in 30 days")
    print(table(["without a change, in 30 days", "false alarms, mean", "runs with one or more"], rows))
    rows = []
    for size in (100, WINDOW):
        reached = levels_reached(np.random.default_rng([options.seed, 300, size]), options.windows, size)
        for level, count in reached.items():
            band = binomtest(count, options.windows, level).proportion_ci(0.99, "exact")
            rows.append(
                [f"{size:,}", f"{level}", f"{count / options.windows:.5f}", f"{band.low:.5f} to {band.high:.5f}"]
            )
            if not band.low <= level <= band.high:
                failed.append(f"embeddings: {count} of {options.windows} windows of {size} are below the level {level}")
    print("\n" + table(["embeddings in a window", "level", "part of the windows", "99 % band"], rows))
    delays, rows = {}, []
    for number, change in enumerate(CHANGES):
        if not change.name.startswith(options.only):
            continue
        random = np.random.default_rng([options.seed, 100 + number])
        found = [delay(random, change) for _ in range(options.changes)]
        delays[change.name] = found
        median = float(np.median(found))
        rows.append([change.name, f"{median:,.0f}", f"{np.quantile(found, 0.95):,.0f}"])
        if median > change.bound:
            failed.append(f"{change.name}: found after {median:,.0f} requests (median), not {change.bound:,}")
    print("\n" + table(["change", "requests until it is found, median", "95 % of the runs"], rows))
    if not options.only:
        rules = thumbs(np.random.default_rng([options.seed, 200]), max(1, options.runs // 100))
        rows = [[name, f"{rate:.2f}"] for name, rate in rules.items()]
        print("\n" + table(["rule", "false alarms in 100 windows"], rows))
    if options.picture is not None:
        options.picture.write_text(picture(delays))
    print(f"\n{time.monotonic() - since:.0f} s", file=sys.stderr)
    for sentence in failed:
        print(f"did not hold: {sentence}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
