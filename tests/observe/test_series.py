"""The text of the series is what prometheus-client writes for the same values, byte for byte."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from inferd.observe.metrics import Metric
from inferd.observe.series import Store

COUNTER = Metric("things_total", "Things.", ("model", "kind"), "", also="vllm:things_total")
GAUGE = Metric("level", 'A level with "quotes",\na break and a \\.', (), "")
HISTOGRAM = Metric("wait_seconds", "Waits.", ("model",), "", buckets=(0.1, 1.0, 5.0), also="vllm:wait_seconds")
SUMMARY = Metric("took_seconds", "Took.", ("z",), "", is_summary=True)
TABLE = (COUNTER, GAUGE, HISTOGRAM, SUMMARY)

NUMBERS = st.floats(min_value=-1e300, max_value=1e300) | st.just(math.nan) | st.just(math.inf)
QUANTILES = [(0.5, 1.5), (0.99, math.nan)]


class Twin(Collector):
    """The same values, the plain way."""

    def __init__(self, counted: list[tuple[str, str, float]], level: float, waits: list[tuple[str, float]]) -> None:
        self.counted, self.level, self.waits = counted, level, waits

    def collect(self) -> Iterator[Family]:
        for name in COUNTER.names:
            family = Family(name.name.removesuffix("_total"), COUNTER.help, "counter")
            sums: dict[tuple[str, str], float] = {}
            for first, second, amount in self.counted:
                sums[first, second] = sums.get((first, second), 0.0) + amount
            for values, total in sums.items():
                family.add_sample(name.name, dict(zip(name.labels, values, strict=True)), total)
            yield family
        level = Family("level", GAUGE.help, "gauge")
        level.add_sample("level", {}, self.level)
        yield level
        for name in HISTOGRAM.names:
            family = Family(name.name, HISTOGRAM.help, "histogram")
            for model in dict.fromkeys(model for model, _ in self.waits):
                mine = [seconds for name, seconds in self.waits if name == model]
                for bound in (*HISTOGRAM.buckets, math.inf):
                    le = "+Inf" if bound == math.inf else str(bound)
                    family.add_sample(
                        f"{name.name}_bucket", {name.labels[0]: model, "le": le}, sum(s <= bound for s in mine)
                    )
                family.add_sample(f"{name.name}_count", {name.labels[0]: model}, len(mine))
                family.add_sample(f"{name.name}_sum", {name.labels[0]: model}, sum(mine, start=0.0))
            yield family
        took = Family("took_seconds", SUMMARY.help, "summary")
        for share, value in QUANTILES:
            took.add_sample("took_seconds", {"z": "q", "quantile": f"{share:g}"}, value)
        took.add_sample("took_seconds_count", {"z": "q"}, 1)
        took.add_sample("took_seconds_sum", {"z": "q"}, 2.0)
        yield took


@given(
    st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5), st.floats(0, 1e9)), max_size=5),
    NUMBERS,
    st.lists(st.tuples(st.text(max_size=5), st.floats(0, 100)), max_size=20),
)
def test_the_text_is_prometheus_clients(
    counted: list[tuple[str, str, float]], level: float, waits: list[tuple[str, float]]
) -> None:
    store = Store(TABLE)
    for first, second, amount in counted:
        store.value(COUNTER, first, second).add(amount)
    store.value(GAUGE).set(level)
    for model, seconds in waits:
        store.distribution(HISTOGRAM, model).observe(seconds)
    took = store.distribution(SUMMARY, "q")
    took.observe(2.0)
    took.quantiles = lambda: QUANTILES
    registry = CollectorRegistry()
    registry.register(Twin(counted, level, waits))
    assert sorted(store.render().splitlines()) == sorted(generate_latest(registry).decode().splitlines())


def test_a_row_does_not_take_labels_that_are_not_its_own() -> None:
    with pytest.raises(AssertionError, match="bug"):
        Store(TABLE).value(COUNTER, "one")


def test_only_gauges_may_be_cleared() -> None:
    store = Store(TABLE)
    store.value(GAUGE).set(1)
    store.clear(GAUGE)
    assert "\nlevel " not in store.render()
    with pytest.raises(AssertionError, match="bug"):
        store.clear(COUNTER)
