"""The page in OpenMetrics: two parsers read it, its names are those of the text format, and buckets name requests."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from tests.observe.prometheus_server import asked, prometheus
from tests.observe.test_dashboards import a_busy_moment, a_page, until_scraped
from tests.observe.test_exposition import a_busy_observer
from tests.observe.test_observer import ended
from tests.server_process import running

from inferd.config import AliasDialect
from inferd.events import HttpServed
from inferd.observe import Observer
from inferd.observe import metrics as m
from inferd.observe.aliases import ALIASES, Derived
from inferd.types import Timings, Usage

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def page(observer: Observer) -> str:
    made = asyncio.run(observer.page(OPENMETRICS))
    assert made.media == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    return made.body.decode()


def families_of(text: str) -> list[Any]:
    return list(read_openmetrics(text))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("aliases", [(), get_args(AliasDialect)], ids=["own", "aliases"])
def test_the_page_is_read_and_has_the_samples_of_the_text_format(aliases: tuple[AliasDialect, ...]) -> None:
    observer = a_busy_observer(aliases)
    for number in range(3):
        for event in a_busy_moment(number):
            observer.emit(event)
    text = page(observer)
    assert text.endswith("\n# EOF\n")
    assert text.count("# EOF") == 1
    found = families_of(text)
    open_samples = {(s.name, frozenset(s.labels.items())) for family in found for s in family.samples}
    plain = observer.render_metrics().decode()
    # The text parser adds _total to the counters that lack it, as Triton's do; a scrape does not.
    lacking = {f"{one.name}_total" for one in read_text(plain) if one.type == "counter" and one.name[:3] == "nv_"}
    samples = {
        (s.name.removesuffix("_total") if s.name in lacking else s.name, frozenset(s.labels.items()))
        for family in read_text(plain)
        for s in family.samples
    }
    assert open_samples == samples


def test_units_are_told_and_are_the_ends_of_names() -> None:
    units = {family.name: family.unit for family in families_of(page(a_busy_observer()))}
    assert units["inferd_time_to_first_token_seconds"] == "seconds"
    assert units["inferd_response_cache_bytes"] == "bytes"
    assert units["inferd_kv_usage_ratio"] == "ratio"
    assert units["inferd_running"] == ""
    assert all(name.endswith(f"_{unit}") for name, unit in units.items() if unit)
    assert {row.unit for row in m.TABLE} - {""} <= {*units.values()} | {"celsius", "watts", "joules"}


TIMINGS = Timings(dispatched=0.1, tokenized=0.2, scheduled=0.25, first_token=0.5, finished=1.5)


def served(**changes: Any) -> HttpServed:
    values: dict[str, Any] = {
        "request_id": "req-1",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "duration_s": 1.5,
        "model": "tiny",
        "replica": 0,
        "outcome": "done",
        "finish_reasons": ("stop",),
        "usage": Usage(prompt_tokens=10, completion_tokens=5),
        "timings": TIMINGS,
    }
    return HttpServed(**{**values, **changes})


def exemplars(observer: Observer) -> dict[tuple[str, str], tuple[dict[str, str], float]]:
    """By the name and bound of a bucket."""
    return {
        (sample.name, sample.labels["le"]): (sample.exemplar.labels, sample.exemplar.value)
        for family in families_of(page(observer))
        for sample in family.samples
        if sample.exemplar is not None
    }


def an_observer() -> Observer:
    observer = a_busy_observer()
    page(observer)  # what is kept of this page is not shown again
    return observer


def test_a_request_is_named_in_its_bucket_of_four_histograms() -> None:
    observer = an_observer()
    observer.emit(ended())
    page(observer)  # between the count and the name
    observer.emit(served())
    named = {"request_id": "req-1"}
    assert exemplars(observer) == {
        ("inferd_time_to_first_token_seconds_bucket", "0.5"): (named, 0.5),
        ("inferd_request_time_per_output_token_seconds_bucket", "0.3"): (named, 0.25),
        ("inferd_request_latency_seconds_bucket", "1.5"): (named, 1.5),
        ("inferd_request_queue_time_seconds_bucket", "0.3"): (named, 0.25),
    }
    assert {name for name, _ in exemplars(observer)} == {f"{row.name}_bucket" for row in m.TABLE if row.has_exemplars}


@pytest.mark.parametrize(
    ("trace", "named"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", {"trace_id": TRACE}),
        (f"00-{TRACE}-b7ad6b7169203331-00", {"request_id": "req-1"}),
        ("", {"request_id": "req-1"}),
    ],
)
def test_a_sampled_trace_is_named_before_the_request(trace: str, named: dict[str, str]) -> None:
    observer = an_observer()
    observer.emit(served(trace=trace))
    assert {labels["trace_id" if "trace_id" in labels else "request_id"] for labels, _ in exemplars(observer).values()}
    assert all(labels == named for labels, _ in exemplars(observer).values())


def test_a_request_that_failed_is_named_only_where_it_is_counted() -> None:
    observer = an_observer()
    observer.emit(served(outcome="failed"))
    assert [name for name, _ in exemplars(observer)] == ["inferd_time_to_first_token_seconds_bucket"]


def test_of_many_requests_the_slowest_and_the_last_are_named() -> None:
    observer = an_observer()
    for number in range(200):
        seconds = 70.0 if number == 20 else 1.5
        timings = msgspec.structs.replace(TIMINGS, finished=seconds)
        observer.emit(served(request_id=f"req-{number}", duration_s=seconds, timings=timings))
    named = {
        labels["request_id"]
        for (name, _), (labels, _) in exemplars(observer).items()
        if name == "inferd_request_latency_seconds_bucket"
    }
    assert named == {"req-20", "req-199"}


def test_a_request_without_a_model_or_of_hostile_names_hurts_nothing() -> None:
    observer = an_observer()
    observer.emit(served(model=None, timings=None, outcome=None, usage=None))
    observer.emit(served(request_id='x"} 1 # {', model='no"\n model'))
    observer.emit(served(trace="not a trace"))
    found = families_of(page(observer))
    failures = next(family for family in found if family.name == "inferd_observer_failures")
    assert [sample.value for sample in failures.samples] == [1], "the trace that is none, and nothing else"


def test_the_text_format_has_no_exemplars() -> None:
    observer = an_observer()
    observer.emit(served())
    assert " # {" not in observer.render_metrics().decode()


def test_a_real_server_negotiates_the_format() -> None:
    with running() as server:
        asked_for = httpx.get(f"{server.url}/metrics", headers={"accept": OPENMETRICS})
        plain = httpx.get(f"{server.url}/metrics")
        ask = {"model": "tiny", "prompt": "a", "max_tokens": 3}
        made = httpx.post(f"{server.url}/v1/completions", json=ask)
        after = httpx.get(f"{server.url}/metrics", headers={"accept": OPENMETRICS})
    assert asked_for.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "accept" in plain.headers["vary"]
    families_of(asked_for.text)
    assert "# EOF" not in plain.text
    examples = [s.exemplar for f in families_of(after.text) for s in f.samples if s.exemplar is not None]
    assert {example.labels["request_id"] for example in examples} == {made.headers["x-request-id"]}
    assert len(examples) >= 3


def test_prometheus_reads_the_page_stores_exemplars_and_computes_aliases_from_their_rules(tmp_path: Path) -> None:
    """It asks for OpenMetrics by itself. The rules of the aliases are evaluated over the page that also has them."""
    with a_page(tmp_path, aliases=get_args(AliasDialect)) as url, prometheus(tmp_path, url, exemplars=True) as port:
        until_scraped(port)
        (target,) = asked(port, "targets")["activeTargets"]
        assert target["health"] == "up", target["lastError"]
        now = time.time()
        query = 'inferd_request_latency_seconds_bucket{model="tiny"}'
        found = asked(port, "query_exemplars", query=query, start=str(now - 600), end=str(now + 600))
        labels = [example["labels"] for series in found for example in series["exemplars"]]
        assert labels
        assert all(set(label) == {"request_id"} for label in labels)
        for alias in (one for one in ALIASES if isinstance(one, Derived) and one.dialect == "triton"):
            name = (
                f"{alias.name}{{{','.join(f'{label}={chr(34)}{value}{chr(34)}' for label, value in alias.constants)}}}"
            )
            difference = f"abs(sum({name}) - sum({alias.rule})) / (sum({name}) > 0 or vector(1)) > 1e-9"
            assert asked(port, "query", query=difference)["result"] == [], alias.name
            assert asked(port, "query", query=f"sum({name})")["result"] != [], alias.name
