"""The values of the metrics, and their text in Prometheus' exposition format.

A series is a row and the values of its labels. This file knows kinds (counter, gauge, histogram,
summary), not what any metric means. One thread writes and renders.

The text is written here and not by prometheus-client because a scrape runs on the gateway's event loop,
beside streams: what never changes of a line is made once, with the series. The tests hold it to what
prometheus-client writes for the same values, byte for byte.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (text, 0.0.4)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from math import inf

from inferd.observe.metrics import Metric, Name

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[str, ...]
Quantiles = Callable[[], list[tuple[float, float]]]


class Value:
    """A counter or a gauge."""

    __slots__ = ("_beginnings", "value")

    def __init__(self, metric: Metric, labels: Labels) -> None:
        self.value = 0.0
        self._beginnings = [_line(name.name, name.labels, labels) for name in metric.names]

    def add(self, amount: float = 1.0) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    def lines(self, name: int) -> list[str]:
        """Its text under the row's ``name``-th name."""
        return [self._beginnings[name] + number(self.value)]


class Distribution:
    """A histogram, or a summary where there are no bounds.

    Values are sorted into their buckets many at a time (``take``), which costs a tenth of doing it one by one.
    """

    __slots__ = ("_beginnings", "_bounds", "_metric", "counts", "labels", "quantiles", "total")

    def __init__(self, metric: Metric, labels: Labels) -> None:
        self._metric = metric
        self._bounds = metric.buckets
        self.labels = labels
        # Values up to each bound and above the one before it; the last is above all.
        self.counts = [0] * (len(metric.buckets) + 1)
        self.total = 0.0
        self.quantiles: Quantiles | None = None  # of a summary: (share, value) pairs, read when rendered
        self._beginnings = [self._lines_of(name) for name in metric.names]

    def observe(self, value: float) -> None:
        """One value. Where there are many, ``take`` them."""
        self.total += value
        self.counts[bisect_left(self._bounds, value)] += 1

    def add_all(self, values: Iterable[float]) -> None:
        """All of these values."""
        ordered = sorted(values)
        self.total = sum(ordered, self.total)
        below = 0
        for index, bound in enumerate(self._bounds):
            up_to = bisect_right(ordered, bound, below)
            self.counts[index] += up_to - below
            if up_to == len(ordered):
                return
            below = up_to
        self.counts[-1] += len(ordered) - below

    def lines(self, name: int) -> list[str]:
        beginnings, made = self._beginnings[name], []
        if self._bounds:
            made = [begin + number(n) for begin, n in zip(beginnings[2:], accumulate(self.counts), strict=True)]
        elif self.quantiles is not None:
            own = self._metric.names[name]
            labels = (*own.labels, "quantile")
            made = [_line(own.name, labels, (*self.labels, f"{q:g}")) + number(v) for q, v in self.quantiles()]
        return [*made, beginnings[1] + number(sum(self.counts)), beginnings[0] + number(self.total)]

    def _lines_of(self, name: Name) -> list[str]:
        """Of the sum, the count, and each bucket."""
        plain = [_line(f"{name.name}_{part}", name.labels, self.labels) for part in ("sum", "count")]
        if not self._bounds:
            return plain
        bounds = [*map(number, self._bounds), "+Inf"]
        return plain + [_line(f"{name.name}_bucket", (*name.labels, "le"), (*self.labels, le)) for le in bounds]


class Store:
    """All series, by row and labels. A series is made when it is first used."""

    def __init__(self, table: Iterable[Metric]) -> None:
        self._values: dict[Metric, dict[Labels, Value]] = {}
        self._distributions: dict[Metric, dict[Labels, Distribution]] = {}
        self._table = tuple(table)
        for metric in self._table:
            if metric.kind in ("counter", "gauge"):
                self._values[metric] = {}
            else:
                self._distributions[metric] = {}

    def value(self, metric: Metric, *labels: str) -> Value:
        series = self._values[metric]
        found = series.get(labels)
        if found is None:
            found = series[labels] = Value(metric, labels)
        return found

    def distribution(self, metric: Metric, *labels: str) -> Distribution:
        series = self._distributions[metric]
        found = series.get(labels)
        if found is None:
            found = series[labels] = Distribution(metric, labels)
        return found

    def clear(self, metric: Metric, *labels: str) -> None:
        """Drop a gauge's series whose labels start with these, because what they describe is gone."""
        assert metric.kind == "gauge", f"{metric.name} must not go back. This is a bug."
        series = self._values[metric]
        for key in [key for key in series if key[: len(labels)] == labels]:
            del series[key]

    def render(self) -> str:
        """Every series under every name of its row."""
        lines: list[str] = []
        for metric in self._table:
            series = (self._values.get(metric) or self._distributions.get(metric) or {}).values()
            for at, name in enumerate(metric.names):
                lines += (f"# HELP {name.name} {_escaped_help(metric.help)}", f"# TYPE {name.name} {metric.kind}")
                for one in series:
                    lines += one.lines(at)
        return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """As Prometheus reads and Go writes it: NaN, +Inf, 1e+06."""
    value = float(value)
    if value != value:
        return "NaN"
    if value in (inf, -inf):
        return "+Inf" if value > 0 else "-Inf"
    text = repr(value)
    dot = text.find(".")
    if value > 0 and dot > 6:  # Go changes to exponents sooner than Python
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+{dot - 1:02d}"
    return text


def _line(name: str, labels: Labels, values: Labels) -> str:
    """A line up to its number; labels in the order of their names."""
    assert len(labels) == len(values), f"{name} has labels {labels}, not {values}. This is a bug."
    inside = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(zip(labels, values, strict=True)))
    return f"{name}{{{inside}}} " if inside else f"{name} "


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escaped_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
