"""The stages that a healthy server at rest does not have, as a collector receives them from a real server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tests.experiments.client import JSON
from tests.experiments.upstream import Upstream, failing, well
from tests.observe.traces.collector import Collector, attributes, collecting
from tests.observe.traces.test_traces_served import parts
from tests.tiers import THOROUGH
from tests.why.injections import late_failure
from tests.why.lab import Lab, at_once, lab, text_of

LATE_S = 0.2
"""What ``late_failure`` waits before it fails."""

REMOTE: JSON = {"probe": False}
NO_BREAKER: JSON = {"breaker": {"enabled": False}, "retry": {"budget": 1.0}}
SMALL: JSON = {"source": "demo", "threads": 1, "max_model_len": 700}


@dataclass
class Site:
    """A server, and the collector of its traces."""

    lab: Lab
    collector: Collector

    def trace(self, name: str, request_id: str) -> tuple[Span, dict[str, Span]]:
        """The trace of one request: its root and the spans below."""
        until = time.monotonic() + 10
        while time.monotonic() < until:
            spans = self.collector.spans
            for root in spans:
                if root.name == name and attributes(root).get("gen_ai.request.id") == request_id:
                    return parts([span for span in spans if span.trace_id == root.trace_id])
            time.sleep(0.02)
        raise AssertionError(f"no span {name!r} of the request {request_id}")

    def attempted(self, model: str) -> tuple[Span, dict[str, Span]]:
        """The trace of the first request to a model that took more than one attempt."""
        for _ in range(60):
            request_id = self.lab.ask("hello", 4, model=model, name=model)
            root, below = self.trace(f"text_completion {model}", request_id)
            if attributes(root)["inferd.attempts"] != 1:
                return root, below
        raise AssertionError("every request was sent to the replica that works")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with collecting() as collector, Upstream(well) as good, Upstream(late_failure) as bad, Upstream(failing) as broken:
        models = {
            "cold": {**SMALL, "load": "on_demand"},
            "far": {"source": bad.source, "remote": REMOTE, "remotes": [{"url": good.url, **REMOTE}], **NO_BREAKER},
            "mixed": {**SMALL, "remotes": [{"url": bad.url, **REMOTE}], **NO_BREAKER},
            "down": {"source": broken.source, "remote": REMOTE, **NO_BREAKER},
            "tight": {**SMALL, "kv_cache": {"num_blocks": 48}, "scheduler": {"prefix_caching": False}},
            "steps": {
                "source": "pipeline",
                "pipeline": {
                    "inputs": {"photo": "FP32 [-1, 64]"},
                    "models": {"digits": {"source": "demo-digits"}},
                    "outputs": {"scores": "read.probabilities"},
                    "steps": [
                        {"name": "scaled", "op": "normalize", "inputs": {"input": "photo"}, "options": {"std": 2}},
                        {"name": "read", "model": "digits"},
                    ],
                },
            },
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
            with lab(models) as running:
                yield Site(running, collector)


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


@THOROUGH
def test_a_request_that_waits_for_its_model_has_a_span_of_the_load(site: Site) -> None:
    root, below = site.trace("text_completion cold", site.lab.ask(model="cold", name="cold"))
    loads, _ = parts(site.collector.await_spans("load cold"))
    assert root.status.code == Status.STATUS_CODE_UNSET
    assert seconds(below["load_wait"]) == pytest.approx(seconds(loads), rel=0.3, abs=0.2)
    assert below["load_wait"].end_time_unix_nano <= below["prefill"].start_time_unix_nano
    _, below = site.trace("text_completion cold", site.lab.ask(model="cold", name="warm"))
    assert "load_wait" not in below


def test_an_attempt_that_a_local_replica_repeats_has_a_span(site: Site) -> None:
    root, below = site.attempted("mixed")
    told = attributes(root)
    assert root.status.code == Status.STATUS_CODE_UNSET
    assert told["inferd.is_remote"] is False
    assert isinstance(told["inferd.lost_s"], float)
    assert told["inferd.lost_s"] >= LATE_S
    assert seconds(below["lost_attempts"]) == pytest.approx(told["inferd.lost_s"], abs=1e-3)
    order = [below[name].start_time_unix_nano for name in ("lost_attempts", "tokenize", "prefill", "decode")]
    assert order == sorted(order)


def test_an_attempt_that_another_server_repeats_has_a_span(site: Site) -> None:
    root, below = site.attempted("far")
    told = attributes(root)
    assert root.status.code == Status.STATUS_CODE_UNSET
    assert told["inferd.is_remote"] is True
    assert seconds(below["lost_attempts"]) >= LATE_S
    assert below["lost_attempts"].end_time_unix_nano <= below["remote"].start_time_unix_nano
    assert not below.keys() & {"tokenize", "prefill", "decode"}


def test_a_preempted_request_has_a_span_within_its_decode(site: Site) -> None:
    ids = at_once(6, lambda n: site.lab.ask(text_of(10, n), 500, model="tight", name="crowd"))
    traces = [site.trace("text_completion tight", one) for one in ids]
    preempted = [(root, below) for root, below in traces if attributes(root).get("inferd.num_preemptions")]
    assert preempted, "the cache of keys and values was large enough for all"
    shown = [below for _, below in preempted if "preempted" in below]
    assert shown
    for below in shown:
        assert below["preempted"].parent_span_id == below["decode"].span_id
    calm = [below for root, below in traces if not attributes(root).get("inferd.num_preemptions")]
    assert all("preempted" not in below for below in calm)


def test_the_steps_of_a_pipeline_have_spans_one_after_the_other(site: Site) -> None:
    body = {"inputs": [{"name": "photo", "shape": [1, 64], "datatype": "FP32", "data": [1.0] * 64}]}
    answer = site.lab.server.client.post("/v2/models/steps/infer", body, headers={"x-request-id": "piped"})
    assert answer.status == 200, answer
    _, below = site.trace("predict steps", "piped")
    first, second = below["scaled"], below["read"]
    assert first.parent_span_id == second.parent_span_id == below["compute"].span_id
    assert first.end_time_unix_nano <= second.start_time_unix_nano


def test_a_request_that_no_server_answered_is_an_error(site: Site) -> None:
    answer = site.lab.server.client.post(
        "/v1/completions", {"model": "down", "prompt": "a", "max_tokens": 2}, headers={"x-request-id": "down"}
    )
    assert answer.status >= 500
    root, _ = site.trace("text_completion down", "down")
    told = attributes(root)
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert told["http.response.status_code"] == answer.status
    assert root.status.message == told["error.type"] != ""


def test_a_stream_whose_worker_dies_is_an_error_though_its_status_was_200(site: Site) -> None:
    options = {"max_tokens": 600, "n": 8, "ignore_eos": True, "headers": {"x-request-id": "cut"}}
    with site.lab.server.client.stream("Once", model="tight", **options) as answer:
        assert next(answer.events())["choices"]
        for pid in site.lab.server.worker_pids():
            os.kill(pid, signal.SIGKILL)
        for _ in answer.events():
            pass
        assert answer.error is not None
    root, _ = site.trace("text_completion tight", "cut")
    told = attributes(root)
    assert told["http.response.status_code"] == 200
    assert (told["inferd.outcome"], root.status.code) == ("failed", Status.STATUS_CODE_ERROR)
    assert told["error.type"] == root.status.message != ""
