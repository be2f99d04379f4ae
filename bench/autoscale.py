"""The controller of replicas against the rules of others, in simulated time: ``python -m bench.autoscale``.

    python -m bench.autoscale --picture docs/pictures/autoscaling.svg
    python -m bench.autoscale --trace ../shared/data/traces/mooncake/conversation_trace.jsonl --model-seconds 2

Arrivals are Poisson, of 0.2 s each on one core: 4 in a second, and 16 in a second for one minute (the spike of 1x to
4x). Every rule begins with two replicas and may have 1 to 8. The responses are those to the requests that arrive in the
spike and in the minute after it; the replica-seconds are of the whole run. Numbers are medians over seeds. Prints tables
in Markdown, and writes a picture of one run. Exit status 1 names what did not hold:

- the p95 in the spike is at least 60 % lower than with scaling on CPU use, for replicas that are ready after 2 s;
- the first decision comes at most 1 s after the step (median), and at most 0.5 s where requests are more and shorter
  (``STEPS``): a few arrivals do not show yet that the rate has grown;
- under constant arrivals the number does not change, for loads up to eight replicas.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from bench.report import markdown
from bench.scaling_rules import HpaOnCpu, Keda, Knative, RayServe
from inferd.autoscale.decide import Spec
from inferd.autoscale.meter import pause_s
from inferd.autoscale.picture import picture
from inferd.autoscale.simulate import Arrival, Controller, Machine, Outcome, Scaler, quantile, simulate
from inferd.autoscale.trace import read_trace

SECONDS: Final = 0.2
BASE: Final = 4.0
SPIKE: Final = (600.0, 660.0)
END: Final = 1200.0
MOST: Final = 8
EVEN_S: Final = 0.25
SEEDS: Final = 9
STEPS: Final = ((4.0, 0.2, 1), (16.0, 0.2, 4), (40.0, 0.02, 1))
"""Other steps of 1x to 4x: arrivals per second before it, seconds of a request, requests that a replica works at."""

RULES: Final[dict[str, Callable[[], Controller]]] = {
    "inferd": lambda: Scaler(Spec(least=1, most=MOST)),
    "Knative": Knative,
    "KEDA": Keda,
    "HPA on CPU": HpaOnCpu,
    "Ray Serve": RayServe,
}


def spike(seed: int, base: float = BASE, seconds: float = SECONDS, end: float = END) -> list[Arrival]:
    """Poisson arrivals with one minute of four times as many."""
    drawn, now, found = random.Random(seed), 0.0, []
    while True:
        now += drawn.expovariate(base * (4.0 if SPIKE[0] <= now < SPIKE[1] else 1.0))
        if now >= end:
            return found
        found.append(Arrival(now, seconds))


def in_spike(outcome: Outcome) -> list[float]:
    """The responses to the requests of the spike and of the minute after it."""
    pairs = zip(outcome.arrivals, outcome.responses, strict=True)
    return [response for at, response in pairs if SPIKE[0] <= at < SPIKE[1] + 60.0]


def run(name: str, arrivals: Sequence[Arrival], rule: Controller, machine: Machine) -> Outcome:
    """What a rule makes of arrivals. Those of others look at exact times, whose multiples are their periods."""
    machine = machine._replace(limit=MOST)
    return simulate(arrivals, rule, machine, pause=pause_s if name == "inferd" else lambda number: EVEN_S)


def reaction_s(outcome: Outcome) -> float:
    """Seconds from the step until more replicas were wanted than before."""
    before = next(tick.desired for tick in reversed(outcome.ticks) if tick.at < SPIKE[0])
    return next((tick.at - SPIKE[0] for tick in outcome.ticks if tick.at >= SPIKE[0] and tick.desired > before), END)


def compared(ready_s: float) -> tuple[list[list[str]], dict[str, float], float]:
    """The rows of a table, the p95 in the spike of every rule, and the reaction of inferd."""
    rows, p95s, reaction = [], {}, 0.0
    for name, rule in RULES.items():
        outcomes = [run(name, spike(seed), rule(), Machine(ready_s=ready_s, begin=2)) for seed in range(SEEDS)]
        p50, p95, p99 = (
            statistics.median(quantile(in_spike(one), part) for one in outcomes) for part in (0.5, 0.95, 0.99)
        )
        reacted = statistics.median(reaction_s(one) for one in outcomes)
        replica_s = statistics.median(one.replica_s for one in outcomes)
        changes = statistics.median(one.changes for one in outcomes)
        p95s[name] = p95
        reaction = reacted if name == "inferd" else reaction
        cells = [f"{reacted:.2f}", f"{p50:.2f}", f"{p95:.2f}", f"{p99:.2f}", f"{replica_s:,.0f}", f"{changes:.0f}"]
        rows.append([name, *cells])
    return rows, p95s, reaction


def reactions(base: float, seconds: float, slots: int) -> list[float]:
    """The seconds from a step until the decision, of every seed."""
    machine, end = Machine(slots=slots, begin=2, limit=MOST), SPIKE[0] + 10.0
    return [
        reaction_s(simulate(spike(seed, base, seconds, end), Scaler(Spec(least=1, most=MOST)), machine))
        for seed in range(SEEDS)
    ]


def settled_changes() -> int:
    """Changes under constant arrivals, after five minutes, for loads of a quarter to eight replicas, 15 minutes each."""
    changes = 0
    for quarter in range(1, 33):
        rate = quarter / 4 / SECONDS
        arrivals = [Arrival(number / rate, SECONDS) for number in range(int(900 * rate))]
        outcome = simulate(arrivals, Scaler(Spec(least=1, most=MOST)), Machine(limit=MOST))
        changes += sum(300 < at < 900 for at, _, _ in outcome.decisions)
    return changes


def chance_changes() -> float:
    """Changes in an hour under Poisson arrivals of a constant rate: the mean over loads of a half to six replicas."""
    found = []
    for half in range(1, 13):
        drawn, now, arrivals = random.Random(half), 0.0, []
        while now < 7200:
            now += drawn.expovariate(half / 2 / SECONDS)
            arrivals.append(Arrival(now, SECONDS))
        outcome = simulate(arrivals, Scaler(Spec(least=1, most=MOST)), Machine(limit=MOST))
        found.append(sum(3600 < at < 7200 for at, _, _ in outcome.decisions))
    return statistics.mean(found)


HEAD: Final = ["rule", "first decision, s", "p50, s", "p95, s", "p99, s", "replica-seconds", "changes"]


def replayed(path: Path, model_seconds: float, most: int) -> None:
    """A table of a trace."""
    with path.open("rb") as lines:
        arrivals = read_trace(lines, model_seconds)
    rows = []
    rules = {**RULES, "inferd": lambda: Scaler(Spec(least=1, most=most))}
    for name, rule in rules.items():
        even = {} if name == "inferd" else {"pause": lambda number: EVEN_S}
        outcome = simulate(arrivals, rule(), Machine(begin=2, limit=most), **even)
        times = [f"{quantile(outcome.responses, part):.2f}" for part in (0.5, 0.95, 0.99)]
        rows.append([name, *times, f"{outcome.replica_s:,.0f}", f"{outcome.changes}"])
    print(f"{path.name}: {len(arrivals)} requests of {model_seconds:g} s in the mean, 1 to {most} replicas\n")
    print(markdown([HEAD[0], *HEAD[2:]], rows))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--model-seconds", type=float, default=1.0)
    parser.add_argument("--max", type=int, default=16)
    given = parser.parse_args(arguments)
    if given.trace is not None:
        replayed(given.trace, given.model_seconds, given.max)
        return 0
    problems = []
    for ready_s in (2.0, 5.0):
        rows, p95s, reaction = compared(ready_s)
        print(f"Replicas are ready after {ready_s:g} s:\n\n{markdown(HEAD, rows)}")
        lower = 1 - p95s["inferd"] / p95s["HPA on CPU"]
        print(f"p95 in the spike: {100 * lower:.0f} % lower than with scaling on CPU use.\n")
        if ready_s == 2.0 and lower < 0.6:
            problems.append(f"the p95 in the spike is {100 * lower:.0f} % lower than with scaling on CPU use, not 60 %")
        if reaction > 1.0:
            problems.append(
                f"the first decision came {reaction:.2f} s after the step, not 1 s (ready in {ready_s:g} s)"
            )
    rows = []
    for base, seconds, slots in STEPS:
        found = reactions(base, seconds, slots)
        median = statistics.median(found)
        shown = [f"{base:g} to {4 * base:g} in a second, {slots} x {seconds:g} s", f"{median:.2f}", f"{max(found):.2f}"]
        rows.append(shown)
        if median > (0.5 if base > BASE else 1.0):
            problems.append(f"the first decision came {median:.2f} s after a step of {shown[0]}")
    print(f"{markdown(['step, requests of a replica', 'median, s', 'longest, s'], rows)}\n")
    changes = settled_changes()
    print(f"Changes under constant arrivals, after five minutes: {changes}.")
    print(f"Changes in the second hour of Poisson arrivals, mean of twelve loads: {chance_changes():.1f}.")
    if changes:
        problems.append(f"{changes} changes under constant arrivals")
    if given.picture is not None:
        shown = {name: run(name, spike(0), rule(), Machine(begin=2)) for name, rule in RULES.items()}
        title = "A spike of 1x to 4x for one minute, replicas ready after 2 s"
        given.picture.write_text(picture(title, list(shown.items())), encoding="utf-8")
    for problem in problems:
        print(f"NOT HELD: {problem}.", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
