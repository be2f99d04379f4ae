"""The values of the metrics, and their text in Prometheus' exposition formats.

A series is a row and the values of its labels. This file knows kinds (counter, gauge, histogram, summary), not what any
metric means. One thread writes and renders.

The text is written here and not by prometheus-client because a scrape runs on the gateway's event loop, beside streams.
The text of every series is kept, and made again only when its value has changed. The tests hold the page to what
prometheus-client reads from it and writes for the same values.

Formats: https://prometheus.io/docs/instrumenting/exposition_formats/ (text, 0.0.4) and
https://prometheus.io/docs/specs/om/open_metrics_spec/ (OpenMetrics, 1.0.0).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, ItemsView, Iterable, Iterator
from math import inf
from typing import Any, Final, Generic, TypeVar

from inferd.observe.metrics import Metric, unit_of

TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OPENMETRICS_END: Final = b"# EOF\n"

Labels = tuple[str, ...]
Todo = list[tuple[Callable[[Any], None], object]]
"""Which values are to be added to which series. Nothing is added before all of them are known."""

Quantiles = Callable[[], list[tuple[float, float]]]

MAX_EXEMPLAR_CHARACTERS: Final = 128
"""The limit of OpenMetrics for the names and values of an exemplar's labels together."""

_PLAIN_NAME: Final = re.compile(r"[\w.:/@+=-]+", re.ASCII)

S = TypeVar("S", "Value", "Distribution")


class Changes:
    """How often the series of one row have changed, so that rows without a change need no look at their series."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Value:
    """A counter or a gauge."""

    __slots__ = ("_changes", "value")

    def __init__(self, changes: Changes) -> None:
        self.value = 0.0
        self._changes = changes

    def add(self, amount: float = 1.0) -> None:
        if amount:
            self.value += amount
            self._changes.count += 1

    def set(self, value: float) -> None:
        if value != self.value:
            self.value = value
            self._changes.count += 1


class Distribution:
    """A histogram, or a summary where there are no bounds.

    Values are sorted into their buckets many at a time (``add_all``), which costs a tenth of doing it one by one.
    """

    __slots__ = (
        "_bounds",
        "_changes",
        "_texts",
        "_texts_of",
        "count",
        "counts",
        "exemplars",
        "num_changes",
        "quantiles",
        "total",
    )

    def __init__(self, metric: Metric, changes: Changes) -> None:
        self._changes = changes
        self._bounds = metric.buckets
        # Values up to each bound and above the one before it; the last is above all.
        self.counts = [0] * (len(metric.buckets) + 1)
        self.count = 0
        self.num_changes = 0
        self.total = 0.0
        self.quantiles: Quantiles | None = None  # of a summary: (share, value) pairs, read when rendered
        self.exemplars: dict[int, bytes] = {}  # by bucket: what OpenMetrics shows behind its count
        self._texts: list[bytes] = []
        self._texts_of = -1  # the change after which they were made

    def observe(self, value: float) -> None:
        """One value. Where there are many, ``add_all`` them."""
        self.total += value
        self.count += 1
        self._changed()
        self.counts[bisect_left(self._bounds, value)] += 1

    def continue_from(self, total: float, counts: list[int]) -> None:
        """Add what was counted before: the sum of the values, and their number in each bucket."""
        self.total += total
        self.count += sum(counts)
        self.counts = [before + more for before, more in zip(self.counts, counts, strict=True)]
        self._changed()

    def add_all(self, values: Iterable[float]) -> None:
        """All of these values."""
        ordered = sorted(values)
        self.total = sum(ordered, self.total)
        self.count += len(ordered)
        self._changed()
        below = 0
        for index, bound in enumerate(self._bounds):
            up_to = bisect_right(ordered, bound, below)
            self.counts[index] += up_to - below
            if up_to == len(ordered):
                return
            below = up_to
        self.counts[-1] += len(ordered) - below

    def exemplify(self, examples: Iterable[tuple[float, str, str]], at: float) -> None:
        """Name a request for the bucket of each of these values, which were added at the time ``at``, in seconds since
        the epoch. An example is a value, a label's name and the request's. The last one of a bucket remains. A name of
        other characters than ids have is not shown: some parsers do not read quotes in exemplars."""
        last = {bisect_left(self._bounds, value): (value, label, name) for value, label, name in examples}
        for bucket, (value, label, name) in last.items():
            if len(label) + len(name) <= MAX_EXEMPLAR_CHARACTERS and _PLAIN_NAME.fullmatch(name):
                self.exemplars[bucket] = f' # {{{label}="{name}"}} {number(value)} {at:.3f}\n'.encode()
        self._changed()

    def texts(self) -> list[bytes]:
        """The ends of its lines: the number of values up to each bound and of all values, the latter again, and their
        sum. Every name of the series shows the same ones, so they are made once for each change."""
        if self._texts_of != self.num_changes:
            self._texts_of = self.num_changes
            below, text = 0, b"0\n"
            texts: list[bytes] = []
            for count in self.counts:
                if count:
                    below += count
                    text = b"%d\n" % below
                texts.append(text)
            self._texts = [*texts, text, b"%b\n" % number(self.total).encode()]
        return self._texts

    def _changed(self) -> None:
        self.num_changes += 1
        self._changes.count += 1


class Name:
    """A name under which the series of a row are shown. Bounds and sums are multiplied by ``scale``."""

    __slots__ = ("labels", "name", "scale")

    def __init__(self, name: str, labels: Labels, scale: float = 1.0) -> None:
        self.name = name
        self.labels = labels
        self.scale = scale


class _ValueLines:
    """The text of a row's counters or gauges under one name."""

    __slots__ = ("_begins", "_body", "_changes", "_name", "_num_changes", "_pieces", "_series", "_shown")

    def __init__(self, name: Name, row: Row[Value]) -> None:
        self._name = name
        self._series = row.series
        self._changes = row.changes
        self._num_changes = -1
        self._shown: list[float] = []
        self._begins: list[str] = []
        self._pieces: list[str] = []
        self._body = b""

    def forget(self) -> None:
        """Series were removed."""
        self._shown, self._begins, self._pieces, self._body = [], [], [], b""

    def body(self) -> bytes:
        if self._num_changes == self._changes.count:
            return self._body
        self._num_changes = self._changes.count
        shown, pieces, begins, known = self._shown, self._pieces, self._begins, len(self._shown)
        is_same = True
        for at, (labels, one) in enumerate(self._series.items()):
            value = one.value
            if at == known:
                begins.append(line_begin(self._name.name, self._name.labels, labels))
                pieces.append(f"{begins[at]}{number(value)}\n")
                shown.append(value)
                known += 1
                is_same = False
            elif shown[at] != value:
                pieces[at] = f"{begins[at]}{number(value)}\n"
                shown[at] = value
                is_same = False
        if not is_same:
            self._body = "".join(pieces).encode()
        return self._body


class _DistributionLines:
    """The text of a row's histograms or summaries under one name. ``has_exemplars``: with those of its buckets.

    A line is joined from three texts: the name with the labels of its series, the bound, which all series have, and the
    number. So the texts to read are few and stay in the processor's cache.
    """

    __slots__ = (
        "_changes",
        "_fragments",
        "_has_exemplars",
        "_heads",
        "_metric",
        "_name",
        "_num_changes",
        "_pieces",
        "_series",
        "_shown",
    )

    def __init__(self, metric: Metric, name: Name, row: Row[Distribution], has_exemplars: bool = False) -> None:
        self._metric = metric
        self._name = name
        self._series = row.series
        self._changes = row.changes
        self._num_changes = -1
        self._has_exemplars = has_exemplars
        self._fragments: dict[bool, list[bytes]] = {}  # of one series, by whether it has quantiles
        self._shown: list[tuple[int, list[tuple[float, float]] | None]] = []
        self._heads: list[tuple[bytes, bytes, bytes]] = []  # of each series: of its buckets or quantiles, count and sum
        self._pieces: list[bytes] = []

    def pieces(self) -> list[bytes]:
        """The lines of each series. What summaries show of the recent past changes with time too, so their series are
        always looked at."""
        pieces, shown = self._pieces, self._shown
        if self._num_changes == self._changes.count and self._metric.buckets:
            return pieces
        self._num_changes = self._changes.count
        at, known = -1, len(pieces)
        for labels, one in self._series.items():
            at += 1
            quantiles = None if one.quantiles is None else one.quantiles()
            if at == known:
                known += 1
                pieces.append(b"")
                shown.append((-1, None))
                self._heads.append(self._heads_of(labels))
            num_changes, before = shown[at]
            # Quantiles that did not change are the same list: NaN is not equal to itself.
            if num_changes != one.num_changes or before is not quantiles:
                pieces[at] = self._piece(self._heads[at], one, quantiles)
                shown[at] = (one.num_changes, quantiles)
        return pieces

    def _piece(
        self, heads: tuple[bytes, bytes, bytes], one: Distribution, quantiles: list[tuple[float, float]] | None
    ) -> bytes:
        has_quantiles = quantiles is not None
        if has_quantiles not in self._fragments:
            self._fragments[has_quantiles] = self._fragments_of(quantiles)
        fragments, texts = self._fragments[has_quantiles], one.texts()
        if not self._metric.buckets:
            texts = texts[-2:]
            if quantiles is not None:
                texts = [b"%b\n" % number(value).encode() for _, value in quantiles] + texts
        elif self._has_exemplars and one.exemplars:
            texts = texts.copy()
            for bucket, example in one.exemplars.items():
                texts[bucket] = texts[bucket][:-1] + example
        head, count_head, sum_head = heads
        fragments[::3] = [head] * (len(texts) - 2) + [count_head, sum_head]
        fragments[2::3] = texts
        if self._name.scale != 1.0:
            fragments[-1] = b"%b\n" % number(one.total * self._name.scale).encode()
        return b"".join(fragments)

    def _heads_of(self, labels: Labels) -> tuple[bytes, bytes, bytes]:
        name = self._name.name
        inside = "{" + _inside(self._name.labels, labels)
        bucket = f"{name}_bucket{inside}" if self._metric.buckets else f"{name}{inside}"
        if not labels:
            inside = ""
        return bucket.encode(), f"{name}_count{inside}".encode(), f"{name}_sum{inside}".encode()

    def _fragments_of(self, quantiles: list[tuple[float, float]] | None) -> list[bytes]:
        """The lines of a series, each with a place for its head, its bound, and a place for its number."""
        bounds: list[str] = []
        if self._metric.buckets:
            scaled = [round(bound * self._name.scale, 9) for bound in self._metric.buckets]
            bounds = [_inside(("le",), (text,)) for text in (*map(number_with_point, scaled), "+Inf")]
        elif quantiles is not None:
            bounds = [_inside(("quantile",), (f"{share:g}",)) for share, _ in quantiles]
        comma, end = (",", "} ") if self._name.labels else ("", " ")
        fragments: list[bytes] = []
        for bound in bounds:
            fragments += (b"", f"{comma}{bound}}} ".encode(), b"")
        return [*fragments, *(b"", end.encode(), b"") * 2]


class Row(Generic[S]):
    """All series of one metric, by the values of their labels."""

    __slots__ = ("changes", "num_arrangements", "series")

    def __init__(self) -> None:
        self.series: dict[Labels, S] = {}
        self.changes = Changes()
        self.num_arrangements = 0  # how often a series came or went


class _Family:
    """A name on the page: its description in both formats, and its lines."""

    __slots__ = ("_distributions", "_exemplars", "_head", "_open_head", "_values", "metric")

    def __init__(
        self,
        metric: Metric,
        name: Name,
        values: Row[Value] | None,
        distributions: Row[Distribution] | None,
    ) -> None:
        self.metric = metric
        self._head = head(name.name, metric.kind, metric.help)
        self._open_head = open_head(name.name, metric.kind, metric.help)
        self._values = None if values is None else _ValueLines(name, values)
        self._distributions = None if distributions is None else _DistributionLines(metric, name, distributions)
        # Made beside the others, so that no scrape makes lines of the other format again.
        self._exemplars = (
            _DistributionLines(metric, name, distributions, has_exemplars=True)
            if distributions is not None and metric.has_exemplars
            else None
        )

    def head(self, is_open: bool) -> bytes:
        return self._open_head if is_open else self._head

    def pieces(self, is_open: bool) -> list[bytes]:
        """The text of the series, in pieces that follow each other."""
        if self._values is not None:
            return [self._values.body()]
        lines = self._exemplars if is_open and self._exemplars is not None else self._distributions
        assert lines is not None
        return lines.pieces()

    def forget(self) -> None:
        if self._values is not None:
            self._values.forget()


class Store:
    """All series, by row and labels. A series is made when it is first used."""

    def __init__(self, table: Iterable[Metric]) -> None:
        self._values: dict[Metric, Row[Value]] = {}
        self._distributions: dict[Metric, Row[Distribution]] = {}
        self._table = tuple(table)
        for metric in self._table:
            if metric.kind in ("counter", "gauge"):
                self._values[metric] = Row()
            else:
                self._distributions[metric] = Row()
        self._families: list[_Family] = []
        self.show(())

    def show(self, names: Iterable[tuple[Metric, Name]]) -> None:
        """Show these names beside the rows' own."""
        own = [(metric, Name(metric.name, metric.labels)) for metric in self._table]
        self._families = [
            _Family(metric, name, self._values.get(metric), self._distributions.get(metric))
            for metric, name in (*own, *names)
        ]

    def value(self, metric: Metric, *labels: str) -> Value:
        row = self._values[metric]
        found = row.series.get(labels)
        if found is None:
            _check(metric, labels)
            found = row.series[labels] = Value(row.changes)
            row.changes.count += 1
            row.num_arrangements += 1
        return found

    def distribution(self, metric: Metric, *labels: str) -> Distribution:
        row = self._distributions[metric]
        found = row.series.get(labels)
        if found is None:
            _check(metric, labels)
            found = row.series[labels] = Distribution(metric, row.changes)
            row.changes.count += 1
            row.num_arrangements += 1
        return found

    def values_of(self, metric: Metric) -> ItemsView[Labels, Value]:
        """All series of a counter or gauge, with their labels."""
        return self._values[metric].series.items()

    def distributions_of(self, metric: Metric) -> ItemsView[Labels, Distribution]:
        """All series of a histogram or summary, with their labels."""
        return self._distributions[metric].series.items()

    def num_arrangements(self, metric: Metric) -> int:
        """How often a series of the row came or went."""
        values = self._values.get(metric)
        return self._distributions[metric].num_arrangements if values is None else values.num_arrangements

    def clear(self, metric: Metric, *labels: str) -> None:
        """Drop a gauge's series whose labels start with these, because what they describe is gone."""
        assert metric.kind == "gauge", f"{metric.name} must not go back. This is a bug."
        self._remove(metric, [key for key in self._values[metric].series if key[: len(labels)] == labels])

    def _remove(self, metric: Metric, gone: list[Labels]) -> None:
        row = self._values[metric]
        for key in gone:
            del row.series[key]
        if gone:
            row.changes.count += 1
            row.num_arrangements += 1
            for family in self._families:
                if family.metric is metric:
                    family.forget()

    def withdraw(self, metric: Metric, labels: Labels) -> float:
        """Show a series no more, because its source cannot be read now; the value that it had."""
        value = self._values[metric].series[labels].value
        self._remove(metric, [labels])
        return value

    def parts(self, is_open: bool = False) -> Iterator[list[bytes]]:
        """The page, one name after the other: each is read as it is when it is asked for. A name is a list of pieces,
        so that the text of a large page is copied once."""
        for family in self._families:
            yield [family.head(is_open), *family.pieces(is_open)]

    def render(self, is_open: bool = False) -> bytes:
        """Every series under every name, without the end of OpenMetrics."""
        return b"".join([piece for part in self.parts(is_open) for piece in part])


def number(value: float) -> str:
    """As Prometheus reads it: NaN, +Inf, 5, 0.25, 1e-07."""
    value = float(value)
    if value != value:
        return "NaN"
    if value in (inf, -inf):
        return "+Inf" if value > 0 else "-Inf"
    if value.is_integer() and -1e15 < value < 1e15:
        return str(int(value))
    return repr(value)


def number_with_point(value: float) -> str:
    """A bound or share as OpenMetrics wants it in a label: 5.0, not 5."""
    text = number(value)
    return f"{text}.0" if text.lstrip("-").isdigit() else text


def head(name: str, kind: str, text: str) -> bytes:
    """What the text format says of a name before its lines."""
    return f"# HELP {name} {_escaped_help(text)}\n# TYPE {name} {kind}\n".encode()


def open_head(name: str, kind: str, text: str) -> bytes:
    """What OpenMetrics wants before the lines of a name. Samples of its counters end in _total, so a counter that does
    not is of the type unknown there."""
    if kind == "counter":
        if name.endswith("_total"):
            name = name.removesuffix("_total")
        else:
            kind = "unknown"
    unit = unit_of(name)
    described = f"# UNIT {name} {unit}\n" if unit else ""
    return f"# TYPE {name} {kind}\n{described}# HELP {name} {_escaped(text)}\n".encode()


def line_begin(name: str, labels: Labels, values: Labels) -> str:
    """A sample up to its number."""
    return f"{name}{{{_inside(labels, values)}}} " if labels else f"{name} "


def _check(metric: Metric, labels: Labels) -> None:
    assert len(labels) == len(metric.labels), f"{metric.name} has labels {metric.labels}, not {labels}. This is a bug."


def _inside(labels: Labels, values: Labels) -> str:
    """Labels in the order of their names."""
    return ",".join([f'{label}="{_escaped(value)}"' for label, value in sorted(zip(labels, values, strict=True))])


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escaped_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
