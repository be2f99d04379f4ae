"""Simulated rollouts against what they promise: ``python -m bench.rollouts``.

    python -m bench.rollouts --runs 10000 --picture docs/pictures/rollouts.svg

Units arrive one by one, are divided by the share of the new version, and are bad or not. After every bad event the
evidence is looked at, which is the most often that one can look. Prints tables in Markdown, and writes a picture of
how many rollouts were withdrawn after how many units of the new version. Exit status 1 names what did not hold:

- at most alpha = 1 % of the rollouts of equal versions are withdrawn, at any length, while the share grows;
- 0.1 % of bad units against 50 %: withdrawn after at most 15 units of the new version (median, at a share of 5 %);
- 1 % against 5 %: after at most 150;
- of a million users as many get the new version as a share of 5 % allows (binomial, 99.9 %).

The simulation computes the evidence of all rollouts together, as arrays. In ``CHECKED`` rollouts it is compared, unit
by unit, with what the server's own code decides.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.stats import binom, binomtest  # type: ignore[import-untyped]

from bench.chart import Line, lines
from inferd.config import Config
from inferd.config.versions import draw
from inferd.rollout.evidence import RISKS, Count, added
from inferd.rollout.judge import judge
from inferd.rollout.machine import Progress, Seen, observed
from inferd.rollout.plan import Guard, Plan, Step, plan_of
from inferd.rollout.split import Split, with_weights

ALPHA: Final = 0.01
SHARE: Final = 0.05
STEPS: Final = (0.01, 0.05, 0.25)
EVENTS: Final = 3000
"""Bad events of a rollout of equal versions, a third of them in each step."""

CHECKED: Final = 60
CHUNK: Final = 250

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Case(NamedTuple):
    """Parts of the units that are bad, and the units of the new version after which half must be withdrawn."""

    stable: float
    new: float
    units: int  # of both versions that a rollout is followed for
    bound: int | None = None

    @property
    def name(self) -> str:
        return f"{100 * self.stable:g} % to {100 * self.new:g} %"


CASES: Final = (
    Case(0.001, 0.5, 4_000, 15),
    Case(0.001, 0.05, 20_000),
    Case(0.01, 0.05, 40_000, 150),
    Case(0.01, 0.02, 400_000),
)


def log_evidence_of(new: npt.NDArray[np.bool_], shares: Floats) -> Floats:
    """The logarithm of the evidence after each bad event, of each rollout (rows)."""
    found = np.full(new.shape, -np.inf)
    for risk in RISKS:
        steps = np.where(new, math.log(risk), 0.0) - np.log1p(shares * (risk - 1.0))
        np.logaddexp(found, np.cumsum(steps, axis=1), out=found)
    return found - math.log(len(RISKS))


def false_alarms(random: np.random.Generator, runs: int) -> int:
    """The number of rollouts of equal versions that are withdrawn."""
    shares = np.repeat(np.array(STEPS), EVENTS // len(STEPS))
    withdrawn = 0
    for begin in range(0, runs, CHUNK):
        new = random.random((min(CHUNK, runs - begin), EVENTS)) < shares
        evidence = log_evidence_of(new, shares)
        withdrawn += int((evidence >= math.log(1.0 / ALPHA)).any(axis=1).sum())
        if begin == 0:
            for row in range(CHECKED):
                assert withdrawn_at(new[row], shares) == first(evidence[row] >= math.log(1.0 / ALPHA))
    return withdrawn


def first(holds: npt.NDArray[np.bool_]) -> int | None:
    return int(holds.argmax()) if holds.any() else None


def withdrawn_at(new: npt.NDArray[np.bool_], shares: Floats) -> int | None:
    """The bad event after which the server's own code withdraws the new version."""
    plan = Plan(
        model="m",
        stable="1",
        new="2",
        steps=(Step(share=0.5, for_s=math.inf), Step(share=1.0)),
        guards=(Guard(kind="errors", max_ratio=2.0),),
        alpha=ALPHA,
    )
    progress = Progress(state="running", share=0.5, step=0, plan=plan.digest)
    counts: dict[float, Count] = {}
    for index, (is_new, share) in enumerate(zip(new.tolist(), shares.tolist(), strict=True)):
        counts = added(counts, {share: Count(new=1) if is_new else Count(stable=1)})
        verdict = judge(plan, {"errors": counts}, {})
        progress = observed(plan, progress, Seen(now=float(index), is_ready=True, verdict=verdict))
        if progress.state == "rolled_back":
            return index
    return None


def peeking_alarms(random: np.random.Generator, runs: int, looks: int = 100) -> int:
    """The number of rollouts of equal versions that a one-sided z-test of two proportions withdraws, which is made at
    each of the looks with alpha."""
    units, rate = 10_000, 0.01  # per look
    new = np.cumsum(random.binomial(int(units * SHARE), rate, (runs, looks)), axis=1)
    stable = np.cumsum(random.binomial(int(units * (1 - SHARE)), rate, (runs, looks)), axis=1)
    number = np.arange(1, looks + 1)
    num_new, num_stable = number * units * SHARE, number * units * (1 - SHARE)
    pooled = (new + stable) / (num_new + num_stable)
    deviation = np.sqrt(pooled * (1 - pooled) * (1 / num_new + 1 / num_stable))
    z = (new / num_new - stable / num_stable) / deviation
    return int((z > 2.3263478740408408).any(axis=1).sum())


def units_until_withdrawn(random: np.random.Generator, runs: int, case: Case) -> Ints:
    """The units of the new version after which each rollout is withdrawn; -1: never in ``case.units``."""
    found = np.full(runs, -1)
    for run in range(runs):
        is_new = random.random(case.units) < SHARE
        is_bad = random.random(case.units) < np.where(is_new, case.new, case.stable)
        (at,) = np.nonzero(is_bad)
        shares = np.full((1, len(at)), SHARE)
        evidence = log_evidence_of(is_new[at][None, :], shares)[0]
        event = first(evidence >= math.log(1.0 / ALPHA))
        if run < CHECKED // len(CASES):
            assert withdrawn_at(is_new[at], shares[0]) == event
        if event is not None:
            found[run] = int(is_new[: at[event] + 1].sum())
    return found


def split_of_users(users: int) -> int:
    """How many of as many users get the new version at a share of 5 %."""
    rollout = {"stable": 1, "new": 2}
    models = {"m": {"source": "x", "version": "1", "rollout": rollout}, "m@2": {"source": "y", "version": "2"}}
    config = msgspec.convert({"models": models}, Config)
    plan = plan_of("m", config.models["m"])
    assert plan is not None
    divided = with_weights(config, {"m": plan}, {"m": Split(plan.name, 1, SHARE, True, "m", "m@2", "auto")}).models
    return sum(draw(divided, "m", f"tenant\0user {number}").entry == "m@2" for number in range(users))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)])


def picture(found: dict[str, Ints]) -> str:
    """How many rollouts were withdrawn after how many units of the new version."""
    curves = []
    for name, units in found.items():
        seen = np.sort(units[units > 0])
        every = max(1, len(seen) // 100)
        percent = 100.0 * np.arange(1, len(seen) + 1) / len(units)
        curves.append(Line(name, seen[::every].tolist(), percent[::every].tolist()))
    return lines(
        curves,
        title="Rollouts that were withdrawn, at a share of 5 % and alpha 1 %",
        x_label="units of the new version",
        y_label="% of the rollouts",
        log_x=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10_000, help="rollouts of equal versions")
    parser.add_argument("--users", type=int, default=1_000_000, help="users that are divided")
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--picture", type=Path, help="where the picture is written, as SVG")
    options = parser.parse_args()
    random, since, failed = np.random.default_rng(options.seed), time.monotonic(), []

    alarms, peeking = false_alarms(random, options.runs), peeking_alarms(random, options.runs)
    if binomtest(alarms, options.runs, ALPHA, alternative="greater").pvalue < 0.001 or alarms > ALPHA * options.runs:
        failed.append(f"{alarms} of {options.runs} rollouts of equal versions were withdrawn")
    print(
        table(
            ["test, alpha 1 %", "rollouts of equal versions", "withdrawn", "%"],
            [
                ["inferd, looking after each bad event", *_part(alarms, options.runs)],
                ["z-test of two proportions, 100 looks", *_part(peeking, options.runs)],
            ],
        ),
        end="\n\n",
    )

    found, rows = {}, []
    for case in CASES:
        units = found[case.name] = units_until_withdrawn(random, max(100, options.runs // 10), case)
        late = np.where(units < 0, np.iinfo(np.int64).max, units)
        median, last = (float(value) for value in np.quantile(late, [0.5, 0.95], method="inverted_cdf"))
        rows.append([case.name, f"{(units >= 0).mean():.1%}", f"{median:,.0f}", f"{last:,.0f}", f"{case.bound or ''}"])
        if case.bound is not None and median > case.bound:
            failed.append(f"{case.name}: {median:,.0f} units of the new version until half are withdrawn")
    print(table(["bad units", "withdrawn", "units of the new version: median", "p95", "at most"], rows), end="\n\n")

    new = split_of_users(options.users)
    low, high = binom.ppf([0.0005, 0.9995], options.users, SHARE)
    if not low <= new <= high:
        failed.append(f"{new} of {options.users} users got the new version")
    p = binomtest(new, options.users, SHARE).pvalue
    print(
        table(
            ["users", "with the new version", "binomial 99.9 %", "p"],
            [[f"{options.users:,}", f"{new:,}", f"{low:,.0f} to {high:,.0f}", f"{p:.3f}"]],
        )
    )
    if options.picture is not None:
        options.picture.write_text(picture(found))
    print(f"\n{time.monotonic() - since:.0f} s", file=sys.stderr)
    for sentence in failed:
        print(f"did not hold: {sentence}", file=sys.stderr)
    return 1 if failed else 0


def _part(number: int, of: int) -> list[str]:
    return [f"{of:,}", f"{number:,}", f"{100 * number / of:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
