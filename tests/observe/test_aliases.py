"""Names of other servers show the values that their stated rules give."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tests.observe.promql import problems
from tests.observe.test_dashboards import a_busy_moment
from tests.observe.test_observer import an_observer, ended, step

from inferd.events import Event, HttpServed, RequestRefused
from inferd.observe import Observer
from inferd.observe.aliases import ALIASES, Derived, Renamed

Values = dict[frozenset[tuple[str, str]], float]
DERIVED = [alias for alias in ALIASES if isinstance(alias, Derived)]


@functools.lru_cache(maxsize=4)
def samples(observer: Observer) -> list[Sample]:
    """Read once: nothing is told to an observer between two looks, but where a test says so."""
    families = text_string_to_metric_families(observer.render_metrics().decode())
    return [sample for family in families for sample in family.samples]


def values(observer: Observer, name: str) -> Values:
    """The samples of a name. The parser adds _total to the names of counters without it, which Triton's are."""
    return {
        frozenset(sample.labels.items()): sample.value
        for sample in samples(observer)
        if sample.name in (name, f"{name}_total")
    }


def told(*events: Event, models: dict[str, int] | None = None) -> Observer:
    observer = an_observer(models or {"tiny": 1})
    for event in events:
        observer.emit(event)
    observer.close()
    return observer


@functools.cache
def after_two_moments() -> Observer:
    return told(*a_busy_moment(1), *a_busy_moment(2))


def of_tiny(observer: Observer, name: str, **labels: str) -> float:
    return values(observer, name)[frozenset({"model": "tiny", "version": "1", **labels}.items())]


@pytest.mark.parametrize("alias", [alias for alias in ALIASES if isinstance(alias, Renamed)], ids=lambda a: a.name)
def test_a_renamed_metric_has_the_values_of_its_row(alias: Renamed) -> None:
    observer = after_two_moments()
    for suffix in {"histogram": ("_bucket", "_count", "_sum"), "summary": ("_count", "_sum")}.get(alias.kind, ("",)):
        own, theirs = values(observer, alias.of.name + suffix), values(observer, alias.name + suffix)
        back = dict(zip(alias.labels, alias.of.labels, strict=True))
        scale = alias.scale if suffix == "_sum" else 1.0
        assert len(own) == len(theirs)
        for labels, value in theirs.items():
            called = {back.get(label, label): text for label, text in labels}
            if "le" in called and called["le"] != "+Inf":
                called["le"] = repr(float(called["le"]) / alias.scale)
            assert value == pytest.approx(own[frozenset(called.items())] * scale)


def test_triton_counts_what_was_answered_refused_cancelled_and_failed() -> None:
    observer = told(
        ended(),
        ended(),
        ended(outcome="cancelled"),
        ended(outcome="failed", error_kind="worker_died", replica=None),
        RequestRefused(model="tiny", reason="queue_full"),
    )
    assert of_tiny(observer, "nv_inference_request_success") == 2
    failures = {"REJECTED": 1, "CANCELED": 1, "BACKEND": 1}
    for reason, count in failures.items():
        assert of_tiny(observer, "nv_inference_request_failure", reason=reason) == count


def test_triton_has_microseconds_and_milliseconds() -> None:
    observer = told(ended(), ended())
    assert of_tiny(observer, "nv_inference_request_duration_us") == 3_000_000
    assert of_tiny(observer, "nv_inference_queue_duration_us") == 500_000
    assert of_tiny(observer, "nv_inference_compute_infer_duration_us") == 2_500_000  # generated: no stages
    (count,) = (
        value
        for labels, value in values(observer, "nv_inference_first_response_histogram_ms_bucket").items()
        if ("le", "500.0") in labels and ("replica", "0") in labels and ("model", "tiny") in labels
    )
    assert count == 2


def test_triton_counts_rows_and_batches_of_predictions_and_requests_of_what_generates() -> None:
    assert of_tiny(told(ended(), ended()), "nv_inference_count") == 2
    batched = told(step(batch_rows=5, step_s=0.1), step(batch_rows=3, step_s=0.1), ended())
    assert of_tiny(batched, "nv_inference_count") == 8
    assert of_tiny(batched, "nv_inference_exec_count") == 2
    assert of_tiny(told(step(step_sequences=2, step_tokens=9)), "nv_inference_exec_count") == 1


def test_triton_adds_up_replicas_and_names_versions_as_kserve_does() -> None:
    observer = told(
        *(ended(replica=replica) for replica in (0, 1, 1)), ended(model="tiny@3"), models={"tiny": 2, "tiny@3": 1}
    )
    observer.configure(
        {"tiny": 2, "tiny@3": 1}, access_log=False, aliases=["triton"], versions={"tiny": "4", "tiny@3": "3"}
    )
    found = values(observer, "nv_inference_request_success")
    assert found == {
        frozenset({"model": "tiny", "version": "4"}.items()): 3,
        frozenset({"model": "tiny", "version": "3"}.items()): 1,
    }


def test_triton_gauges_are_of_now() -> None:
    observer = told(step(num_waiting=3))
    assert of_tiny(observer, "nv_inference_pending_request_count") == 3
    observer.emit(step(num_waiting=1))
    samples.cache_clear()
    assert of_tiny(observer, "nv_inference_pending_request_count") == 1


def test_the_instrumentator_counts_by_class_of_status() -> None:
    served = [
        HttpServed(request_id="h", method="POST", route="/v1/completions", status=status, duration_s=0.1)
        for status in (200, 404, 429)
    ]
    found = values(told(*served), "http_requests_total")
    route = {"handler": "/v1/completions", "method": "POST"}
    assert found == {
        frozenset({**route, "status": "2xx"}.items()): 1,
        frozenset({**route, "status": "4xx"}.items()): 2,
    }


@pytest.mark.parametrize("alias", DERIVED, ids=lambda alias: f"{alias.name}-{dict(alias.constants)}")
def test_a_rule_is_an_expression_over_the_table(alias: Derived) -> None:
    assert list(problems(alias.rule)) == []


def test_the_page_of_docs_tells_every_rule() -> None:
    text = (Path(__file__).resolve().parent.parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w:]+)` \| \w+ \| .* \| `(.*)` \|$", text, re.MULTILINE))
    assert {alias.name for alias in ALIASES} == rows.keys()
