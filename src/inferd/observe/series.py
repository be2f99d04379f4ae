"""The values behind the table's rows, and their way out through prometheus-client.

A series is a row and the values of its labels. This file knows kinds (counter, gauge, histogram,
summary), not what any metric means. One thread writes; rendering reads on the same thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from inferd.observe.metrics import Metric

Labels = tuple[str, ...]
Quantiles = Callable[[], list[tuple[float, float]]]


class Value:
    """A counter or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value


class Distribution:
    """A histogram, or a summary where there are no bounds."""

    __slots__ = ("bounds", "counts", "quantiles", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.quantiles: Quantiles | None = None  # of a summary: (share, value) pairs, read when rendered

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Store(Collector):
    """All series, by row and labels; a series is made when it is first asked for."""

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
            assert len(labels) == len(metric.labels), f"{metric.name} has labels {metric.labels}. This is a bug."
            found = series[labels] = Value()
        return found

    def distribution(self, metric: Metric, *labels: str) -> Distribution:
        series = self._distributions[metric]
        found = series.get(labels)
        if found is None:
            assert len(labels) == len(metric.labels), f"{metric.name} has labels {metric.labels}. This is a bug."
            found = series[labels] = Distribution(metric.buckets)
        return found

    def clear(self, metric: Metric, *labels: str) -> None:
        """Drop a gauge's series whose labels start with these, as they describe nothing any more."""
        assert metric.kind == "gauge", f"{metric.name} must not go back. This is a bug."
        series = self._values[metric]
        for key in [key for key in series if key[: len(labels)] == labels]:
            del series[key]

    def collect(self) -> Iterator[Family]:
        for metric in self._table:
            if metric.kind in ("counter", "gauge"):
                yield from self._collect_values(metric)
            else:
                yield from self._collect_distributions(metric)

    def _collect_values(self, metric: Metric) -> Iterator[Family]:
        for name, names in _all_names(metric):
            family = Family(name.removesuffix("_total") if metric.kind == "counter" else name, metric.help, metric.kind)
            for labels, series in self._values[metric].items():
                family.add_sample(name, dict(zip(names, labels, strict=True)), series.value)
            yield family

    def _collect_distributions(self, metric: Metric) -> Iterator[Family]:
        for name, names in _all_names(metric):
            family = Family(name, metric.help, metric.kind)
            for labels, series in self._distributions[metric].items():
                own = dict(zip(names, labels, strict=True))
                count = 0
                for bound, here in zip((*map(str, series.bounds), "+Inf"), series.counts, strict=True):
                    count += here
                    if metric.kind == "histogram":
                        family.add_sample(f"{name}_bucket", {**own, "le": bound}, count)
                for share, value in series.quantiles() if series.quantiles is not None else ():
                    family.add_sample(name, {**own, "quantile": f"{share:g}"}, value)
                family.add_sample(f"{name}_sum", own, series.total)
                family.add_sample(f"{name}_count", own, count)
            yield family


def _all_names(metric: Metric) -> Iterator[tuple[str, Labels]]:
    yield metric.name, metric.labels
    for alias in metric.aliases:
        yield alias.name, alias.labels
