"""What must add up whatever was injected: the invariants, read from outside like any operator would.

I1 blocks, I2 queues, I3 descriptors, threads and children, I4 one outcome per request, I5 usage, I6 no
silent end, I7 errors with a shape, I8 truthful health, I9 golden answers, I10 no traceback without a metric.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tests.worker.watching import children

FORGIVEN = 2  # descriptors, threads and children above the baseline

Series = tuple[str, frozenset[tuple[str, str]]]


class Page:
    """One reading of /metrics."""

    def __init__(self, text: str) -> None:
        self.values: dict[Series, float] = {}
        self.counters: set[Series] = set()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                series = (sample.name, frozenset(sample.labels.items()))
                self.values[series] = sample.value
                if family.type == "counter":
                    self.counters.add(series)

    def sum(self, name: str, **labels: str) -> float:
        """All series of a name whose labels include these."""
        return sum(value for (found, own), value in self.values.items() if found == name and own >= set(labels.items()))

    def decreased(self, before: Page) -> list[str]:
        """Counters that stand lower than they did."""
        return [
            f"{name}{dict(labels)} fell from {before.values[name, labels]} to {self.values[name, labels]}"
            for name, labels in self.counters & before.counters
            if self.values[name, labels] < before.values[name, labels] and not name.startswith("process_")
        ]


@dataclass(frozen=True)
class Vitals:
    """What a process holds."""

    descriptors: int
    threads: int
    children: int

    @staticmethod
    def of(pid: int) -> Vitals:
        status = Path(f"/proc/{pid}/status").read_text()
        return Vitals(
            descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
            threads=int(status.split("Threads:")[1].split()[0]),
            children=len(children(pid)),
        )

    def above(self, baseline: Vitals) -> list[str]:
        return [
            f"{name}: {getattr(baseline, name)} before, {getattr(self, name)} after"
            for name in ("descriptors", "threads", "children")
            if getattr(self, name) > getattr(baseline, name) + FORGIVEN
        ]


@dataclass
class Tally:
    """What the clients of an experiment saw, added up by them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_whole: int = 0  # answers with usage that came whole
    num_cut: int = 0  # answers whose end the client did not see, so that it cannot know their usage
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def used(self, usage: dict[str, int]) -> None:
        with self._lock:
            self.num_whole += 1
            self.prompt_tokens += usage["prompt_tokens"]
            self.completion_tokens += usage["completion_tokens"]

    def cut(self) -> None:
        with self._lock:
            self.num_cut += 1

    def note(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)
