"""The text of the series is what prometheus-client reads and writes for the same values, however often it was made."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from prometheus_client.registry import Collector

from inferd.observe.metrics import Metric
from inferd.observe.series import OPENMETRICS_END, Name, Store, number, number_with_point

COUNTER = Metric("things_total", "Things.", ("model", "kind"), "")
GAUGE = Metric("level", 'A level with "quotes",\na break and a \\.', (), "")
RATIO = Metric("use_ratio", "Use.", ("model",), "")
HISTOGRAM = Metric("wait_seconds", "Waits.", ("model",), "", buckets=(0.1, 1.0, 5.0), has_exemplars=True)
SUMMARY = Metric("took_seconds", "Took.", ("z",), "", is_summary=True)
TABLE = (COUNTER, GAUGE, RATIO, HISTOGRAM, SUMMARY)
OTHERS = ((COUNTER, "other:things_total", ("name", "kind"), 1.0), (HISTOGRAM, "other_wait_ms", ("name",), 1000.0))

Sample = tuple[str, frozenset[tuple[str, str]]]


@dataclass
class Plain:
    """The same values, the plain way: everything is kept, and every page is made from the beginning."""

    counted: dict[tuple[str, str], float] = field(default_factory=dict)
    level: float | None = None
    uses: dict[str, float] = field(default_factory=dict)
    waits: dict[str, list[float]] = field(default_factory=dict)
    quantiles: list[tuple[float, float]] = field(default_factory=lambda: [(0.5, math.nan), (0.99, math.nan)])

    def families(self) -> list[Family]:
        found = []
        for metric, name, labels, scale in (*((row, row.name, row.labels, 1.0) for row in TABLE), *OTHERS):
            family = Family(name.removesuffix("_total"), metric.help, metric.kind)
            if metric is COUNTER:
                for values, total in self.counted.items():
                    family.add_sample(name, dict(zip(labels, values, strict=True)), total)
            elif metric is GAUGE and self.level is not None:
                family.add_sample(name, {}, self.level)
            elif metric is RATIO:
                for model, use in self.uses.items():
                    family.add_sample(name, {"model": model}, use)
            elif metric is HISTOGRAM:
                for model, seconds in self.waits.items():
                    own = {labels[0]: model}
                    for bound in (*HISTOGRAM.buckets, math.inf):
                        le = "+Inf" if bound == math.inf else str(bound * scale)
                        family.add_sample(f"{name}_bucket", {**own, "le": le}, sum(s <= bound for s in seconds))
                    family.add_sample(f"{name}_count", own, len(seconds))
                    family.add_sample(f"{name}_sum", own, sum(seconds, start=0.0) * scale)
            elif metric is SUMMARY:
                for share, value in self.quantiles:
                    family.add_sample(name, {"z": "q", "quantile": f"{share:g}"}, value)
                family.add_sample("took_seconds_count", {"z": "q"}, 1)
                family.add_sample("took_seconds_sum", {"z": "q"}, 2.0)
            found.append(family)
        return found


class Twin(Collector):
    def __init__(self, plain: Plain) -> None:
        self._plain = plain

    def collect(self) -> list[Family]:
        return self._plain.families()


def described(text: str, read: Callable[..., object]) -> dict[str, tuple[str, str, dict[Sample, str]]]:
    """Each name's type, help and samples. As text: NaN is not equal to itself."""
    families: list[Family] = list(read(text))  # type: ignore[call-overload]
    return {
        family.name: (
            family.type,
            family.documentation,
            {(s.name, frozenset(s.labels.items())): repr(float(s.value)) for s in family.samples},
        )
        for family in families
    }


def a_store(plain: Plain) -> Store:
    store = Store(TABLE)
    store.show([(metric, Name(name, labels, scale)) for metric, name, labels, scale in OTHERS])
    took = store.distribution(SUMMARY, "q")
    took.observe(2.0)
    took.quantiles = lambda: plain.quantiles
    return store


WORDS = st.sampled_from(["a", "b", 'c"', "100 %\n\\", "é"])
NUMBERS = st.floats(min_value=-1e300, max_value=1e300) | st.just(math.nan) | st.just(math.inf)
CHANGES = st.one_of(
    st.tuples(st.just("count"), WORDS, WORDS, st.floats(0, 1e9)),
    st.tuples(st.just("level"), NUMBERS),
    st.tuples(st.just("use"), WORDS, NUMBERS),
    st.tuples(st.just("gone"), WORDS),
    st.tuples(st.just("wait"), WORDS, st.lists(st.sampled_from([0.05, 0.1, 0.5, 3.0, 100.0]), max_size=5)),
    st.tuples(st.just("quantiles"), st.floats(0, 1e300) | st.just(math.nan)),
    st.tuples(st.just("page")),
    st.tuples(st.just("openmetrics")),
)


def change(store: Store, plain: Plain, what: tuple[object, ...]) -> None:
    match what:
        case ("count", str(model), str(kind), float(amount)):
            store.value(COUNTER, model, kind).add(amount)
            plain.counted[model, kind] = plain.counted.get((model, kind), 0.0) + amount
        case ("level", float(level)):
            store.value(GAUGE).set(level)
            plain.level = level
        case ("use", str(model), float(use)):
            store.value(RATIO, model).set(use)
            plain.uses[model] = use
        case ("gone", str(model)):
            store.clear(RATIO, model)
            plain.uses.pop(model, None)
        case ("wait", str(model), list(seconds)):
            store.distribution(HISTOGRAM, model).add_all(seconds)
            plain.waits.setdefault(model, []).extend(seconds)
        case ("quantiles", float(value)):
            plain.quantiles = [(0.5, value), (0.99, math.nan)]
        case ("page",):
            store.render()
        case ("openmetrics",):
            store.render(is_open=True)


@given(st.lists(CHANGES, max_size=25))
def test_a_page_is_what_prometheus_client_writes_for_the_same_values(changes: list[tuple[object, ...]]) -> None:
    """Whatever was rendered before, in both formats: text that is kept is never old."""
    plain = Plain()
    store = a_store(plain)
    for what in changes:
        change(store, plain, what)
    registry = CollectorRegistry()
    registry.register(Twin(plain))
    theirs = described(generate_latest(registry).decode(), read_text)
    assert rounded(described(store.render().decode(), read_text)) == rounded(theirs)
    ours = described((store.render(is_open=True) + OPENMETRICS_END).decode(), read_openmetrics)
    assert {name: (kind, samples) for name, (kind, _, samples) in rounded(ours).items()} == {
        name: (kind, samples) for name, (kind, _, samples) in rounded(theirs).items()
    }


def rounded(
    families: dict[str, tuple[str, str, dict[Sample, str]]],
) -> dict[str, tuple[str, str, dict[Sample, str]]]:
    """Sums in the order of addition and in another differ in their last digits. Minus nothing is nothing."""
    return {
        name: (kind, text, {sample: f"{float(value) + 0.0:.9g}" for sample, value in samples.items()})
        for name, (kind, text, samples) in families.items()
    }


def test_a_page_without_changes_is_the_same_bytes() -> None:
    plain = Plain()
    store = a_store(plain)
    store.distribution(HISTOGRAM, "a").add_all([0.5, 3.0])
    store.value(COUNTER, "a", "b").add(2)
    first = store.render()
    store.distribution(HISTOGRAM, "a").add_all([])
    store.value(COUNTER, "a", "b").add(0)
    store.value(GAUGE)
    store.clear(GAUGE)
    assert store.render() == first


@given(st.floats(), st.floats(0, 1e12))
def test_numbers_are_read_as_they_were(value: float, bound: float) -> None:
    assert float(number(value)) == value or value != value
    assert float(number_with_point(bound)) == bound
    assert "." in number_with_point(bound) or "e" in number_with_point(bound)


@given(st.lists(st.floats(0, 10), max_size=30))
def test_a_bucket_names_the_last_of_its_requests(seconds: list[float]) -> None:
    store = Store((HISTOGRAM,))
    one = store.distribution(HISTOGRAM, "a")
    one.add_all(seconds)
    one.exemplify([(value, "request_id", f"r{at}") for at, value in enumerate(seconds)], 1700000000.25)
    (family,) = read_openmetrics((store.render(is_open=True) + OPENMETRICS_END).decode())  # type: ignore[no-untyped-call]
    last = {bisect_left(HISTOGRAM.buckets, value): (f"r{at}", value) for at, value in enumerate(seconds)}
    buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
    for place, sample in enumerate(buckets):
        found = sample.exemplar
        assert (None if found is None else (found.labels["request_id"], found.value)) == last.get(place)
        assert found is None or float(found.timestamp) == 1700000000.25


def test_an_exemplar_is_never_longer_than_openmetrics_allows_and_cannot_end_its_line() -> None:
    store = Store((HISTOGRAM,))
    one = store.distribution(HISTOGRAM, "a")
    one.add_all([0.05, 0.5, 3.0])
    names = ["x" * 119, "x" * 118, 'a"} 1 # {']
    one.exemplify([(value, "request_id", name) for value, name in zip([0.05, 0.5, 3.0], names, strict=True)], 1.0)
    (family,) = read_openmetrics((store.render(is_open=True) + OPENMETRICS_END).decode())  # type: ignore[no-untyped-call]
    assert [sample.exemplar and sample.exemplar.labels for sample in family.samples[:4]] == [
        None,
        {"request_id": "x" * 118},
        None,
        None,
    ]


def test_a_row_does_not_take_labels_that_are_not_its_own() -> None:
    with pytest.raises(AssertionError, match="bug"):
        Store(TABLE).value(COUNTER, "one")


def test_only_gauges_may_be_cleared() -> None:
    store = Store(TABLE)
    store.value(GAUGE).set(1)
    store.clear(GAUGE)
    assert b"\nlevel " not in store.render()
    with pytest.raises(AssertionError, match="bug"):
        store.clear(COUNTER)
