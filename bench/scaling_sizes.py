"""Requests or their work as what the controller of replicas counts, in simulated time:
``python -m bench.scaling_sizes``.

    python -m bench.scaling_sizes --trace ../shared/data/traces/mooncake/conversation_trace.jsonl --faster 2

A request takes its prompt's tokens at ``PREFILL`` in a second, and ``TOKEN_S`` for each token of its answer. The same
arrivals are given to inferd's controller three times: with requests as its counts, as in the server; with their work,
which only the simulator knows in advance; and with the work as a gateway can estimate it, from the prompt's tokens and
the mean of the answers. Work is in mean requests. A replica computes 16 requests together. The input ``duty`` is
off, so that the counts alone decide. Beside traces there is a step of load by size: at constant Poisson
arrivals, prompts and answers become four times as long for two minutes, and then as they were.

Traces are those of Mooncake (JSON lines) and of Azure (CSV). Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.report import markdown
from inferd.autoscale.decide import Spec
from inferd.autoscale.simulate import Arrival, Controller, Machine, Scaler, View, quantile, simulate

PREFILL: Final = 10_000.0
TOKEN_S: Final = 0.03
SLOTS: Final = 16
MOST: Final = 16
SPEC: Final = Spec(least=1, most=MOST, duty=None)
READY_S: Final = 5.0
LONGER: Final = (600.0, 720.0)
END: Final = 1200.0


class Asked(NamedTuple):
    """A request: when it comes in seconds, and the tokens of its prompt and its answer."""

    at: float
    prompt: float
    answer: float

    @property
    def seconds(self) -> float:
        return self.prompt / PREFILL + self.answer * TOKEN_S


class ByWork:
    """inferd's controller with work in place of requests. ``sizes``: of the requests in order of arrival, as far as
    they are known."""

    def __init__(self, sizes: Sequence[float], mean_s: float) -> None:
        self._scaler = Scaler(SPEC)
        self._until = [0.0, *itertools.accumulate(sizes)]
        self._mean_s = mean_s

    def __call__(self, view: View) -> tuple[int, str]:
        accepted, begun = self._until[view.accepted], self._until[view.accepted - view.waiting]
        ended = min(view.work_s / self._mean_s, begun)
        # The controller's counts are whole requests; work is not.
        counts: dict[str, Any] = {"accepted": accepted, "ended": ended}
        counts |= {"waiting": accepted - begun, "in_flight": begun - ended}
        return self._scaler(view._replace(**counts))


def longer(seed: int) -> list[Asked]:
    """Poisson arrivals, of which those of two minutes are four times as long."""
    drawn, now, found = random.Random(seed), 0.0, []
    while (now := now + drawn.expovariate(6.0)) < END:
        times = 4.0 if LONGER[0] <= now < LONGER[1] else 1.0
        found.append(Asked(now, 500.0 * times, drawn.expovariate(1 / 100.0) * times))
    return found


def read(path: Path, faster: float) -> list[Asked]:
    """The requests of a trace, ``faster`` times as many in a second."""
    with path.open(encoding="utf-8") as lines:
        found = list(_azure(lines) if path.suffix == ".csv" else _mooncake(lines))
    first = min(one.at for one in found)
    return sorted(one._replace(at=(one.at - first) / faster) for one in found)


def _azure(lines: Iterable[str]) -> Iterator[Asked]:
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield Asked(at, float(row["ContextTokens"]), float(row["GeneratedTokens"]))


def _mooncake(lines: Iterable[str]) -> Iterator[Asked]:
    for row in map(json.loads, lines):
        yield Asked(row["timestamp"] / 1000, row["input_length"], row["output_length"])


def compared(name: str, asked: Sequence[Asked]) -> list[list[str]]:
    """The rows of a table for some requests."""
    mean_s = sum(one.seconds for one in asked) / len(asked)
    answer = sum(one.answer for one in asked) / len(asked)
    guessed = [one._replace(answer=answer).seconds / mean_s for one in asked]
    rules: dict[str, Controller] = {
        "requests": Scaler(SPEC),
        "work, known": ByWork([one.seconds / mean_s for one in asked], mean_s),
        "work, by the prompt": ByWork(guessed, mean_s),
    }
    rows = []
    for counted, rule in rules.items():
        machine = Machine(slots=SLOTS, ready_s=READY_S, begin=2, limit=MOST)
        outcome = simulate([Arrival(one.at, one.seconds) for one in asked], rule, machine)
        firsts = [wait + one.prompt / PREFILL for wait, one in zip(outcome.waits, asked, strict=True)]
        shown = [f"{quantile(firsts, part):.2f}" for part in (0.5, 0.95, 0.99)]
        rows.append([name, counted, *shown, f"{outcome.replica_s:,.0f}", f"{outcome.changes}"])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, action="append", default=[])
    parser.add_argument("--faster", type=float, default=1.0)
    given = parser.parse_args(arguments)
    rows = compared("four times as long", longer(0))
    for path in given.trace:
        rows += compared(path.stem, read(path, given.faster))
    head = ["requests", "counted", "TTFT p50, s", "p95, s", "p99, s", "replica-seconds", "changes"]
    print(markdown(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
