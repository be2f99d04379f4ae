"""Events become the right numbers, under every name, and nothing an event holds can hurt the sink."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from inferd.errors import InferdError
from inferd.events import Event, HttpServed, QueueChanged, ReplicaChanged, RequestEnded, RequestRefused, StepDone
from inferd.observe import Observer
from inferd.observe import metrics as m
from inferd.types import AdapterUse, StepStats, Timings, Usage

Labels = frozenset[tuple[str, str]]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def an_observer(
    models: dict[str, int] | None = None, clock: Callable[[], float] | None = None, stream: io.StringIO | None = None
) -> Observer:
    return Observer(
        models=models or {"tiny": 1},
        aliases=("vllm", "triton", "fastapi"),
        stream=stream or io.StringIO(),
        now=clock or Clock(),
        wall=lambda: 0.0,
    )


def samples(observer: Observer) -> dict[tuple[str, Labels], float]:
    text = observer.render_metrics().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def read(observer: Observer, name: str, **labels: str) -> float:
    return samples(observer)[name, frozenset(labels.items())]


def ended(**changes: Any) -> RequestEnded:
    values: dict[str, Any] = {
        "model": "tiny",
        "replica": 0,
        "request_id": "r",
        "tenant": "",
        "outcome": "done",
        "finish_reasons": ("stop",),
        "usage": Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=4),
        "timings": Timings(dispatched=0.1, tokenized=0.2, scheduled=0.25, first_token=0.5, finished=1.5),
        "inter_token_s": (0.25, 0.25, 0.25, 0.25),
    }
    return RequestEnded(**{**values, **changes})


def step(**stats: Any) -> StepDone:
    return StepDone(model="tiny", replica=0, stats=StepStats(**stats))


VLLM = {"model_name": "tiny", "engine": "0"}
OURS = {"model": "tiny", "replica": "0"}


def test_a_done_request_is_counted_once_in_every_measure() -> None:
    observer = an_observer()
    observer.emit(ended())
    assert read(observer, "inferd_requests_total", **OURS, outcome="done") == 1
    assert read(observer, "vllm:request_success_total", **VLLM, finished_reason="stop") == 1
    assert read(observer, "vllm:prompt_tokens_total", **VLLM) == 10
    assert read(observer, "vllm:generation_tokens_total", **VLLM) == 5
    assert read(observer, "vllm:prompt_tokens_cached_total", **VLLM) == 4
    assert read(observer, "vllm:time_to_first_token_seconds_sum", **VLLM) == 0.5
    assert read(observer, "vllm:time_to_first_token_seconds_bucket", **VLLM, le="0.25") == 0
    assert read(observer, "vllm:time_to_first_token_seconds_bucket", **VLLM, le="0.5") == 1
    assert read(observer, "vllm:inter_token_latency_seconds_count", **VLLM) == 4
    assert read(observer, "vllm:e2e_request_latency_seconds_sum", **VLLM) == 1.5
    assert read(observer, "vllm:request_queue_time_seconds_sum", **VLLM) == 0.25
    assert read(observer, "vllm:request_inference_time_seconds_sum", **VLLM) == 1.25
    assert read(observer, "vllm:request_prefill_time_seconds_sum", **VLLM) == 0.25
    assert read(observer, "vllm:request_decode_time_seconds_sum", **VLLM) == 1.0
    assert read(observer, "vllm:request_time_per_output_token_seconds_sum", **VLLM) == 0.25
    assert read(observer, "vllm:request_prefill_kv_computed_tokens_sum", **VLLM) == 6


def test_the_durations_of_a_request_that_failed_are_not_among_those_of_the_done() -> None:
    observer = an_observer()
    observer.emit(ended(outcome="failed", finish_reasons=(), error_kind="worker_died"))
    assert read(observer, "inferd_errors_total", model="tiny", kind="worker_died") == 1
    assert read(observer, "vllm:request_success_total", **VLLM, finished_reason="error") == 1
    assert read(observer, "vllm:e2e_request_latency_seconds_count", **VLLM) == 0
    assert read(observer, "vllm:time_to_first_token_seconds_count", **VLLM) == 1  # its first token did come


def test_a_cancelled_request_counts_every_answer_that_was_cut_off() -> None:
    observer = an_observer()
    observer.emit(ended(outcome="cancelled", finish_reasons=("stop", "cancelled"), n=3))
    assert read(observer, "inferd_finished_total", **OURS, finished_reason="stop") == 1
    assert read(observer, "inferd_finished_total", **OURS, finished_reason="abort") == 2


def test_every_series_of_a_model_exists_before_first_use() -> None:
    """The series after a life of every kind of event are those from before it, HTTP and load aside."""
    observer = an_observer({"tiny": 2})
    before = samples(observer).keys()
    for replica in (0, 1):
        for state in m.STATES:
            observer.emit(ReplicaChanged(model="tiny", replica=replica, state=state))  # type: ignore[arg-type]
        observer.emit(StepDone(model="tiny", replica=replica, stats=StepStats(step_sequences=1, step_tokens=3)))
        for outcome in m.OUTCOMES:
            observer.emit(ended(replica=replica, outcome=outcome, error_kind="internal"))
    observer.emit(
        ended(replica=None, outcome="refused", finish_reasons=(), usage=Usage(), timings=Timings(), inter_token_s=())
    )
    observer.emit(QueueChanged(model="tiny", waiting=1, in_flight=1))
    for reason in m.REFUSALS:
        observer.emit(RequestRefused(model="tiny", reason=reason))
    tokens = {"inferd_prompt_tokens_total", "inferd_generation_tokens_total", "inferd_prompt_cached_tokens_total"}
    tokens |= {"vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:prompt_tokens_cached_total"}
    new = {(name, labels) for name, labels in samples(observer).keys() - before if name not in tokens}
    assert new == set()


def test_counters_go_on_when_a_worker_begins_again() -> None:
    observer = an_observer()
    observer.emit(step(tokenizer_cache_queries=10, tokenizer_cache_hits=4, tokenize_s=1.5))
    observer.emit(ReplicaChanged(model="tiny", replica=0, state="died", restarts=0))
    observer.emit(ReplicaChanged(model="tiny", replica=0, state="starting", restarts=1))
    observer.emit(step(tokenizer_cache_queries=12, tokenizer_cache_hits=1, tokenize_s=0.5))
    assert read(observer, "inferd_tokenizer_cache_queries_total", **OURS) == 22
    assert read(observer, "inferd_tokenizer_cache_hits_total", **OURS) == 5
    assert read(observer, "inferd_tokenize_seconds_total", **OURS) == 2.0
    assert read(observer, "inferd_replica_restarts_total", **OURS) == 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.integers(0, 3)), max_size=12))
def test_counters_never_go_back(moves: list[tuple[bool, int, int]]) -> None:
    observer = an_observer()
    seen: dict[str, float] = {}
    for has_died, queries, restarts in moves:
        if has_died:
            observer.emit(ReplicaChanged(model="tiny", replica=0, state="died", restarts=restarts))
        observer.emit(step(tokenizer_cache_queries=queries, num_preempted=1))
        lines = re.findall(
            r"^(inferd\w+_(?:total|count|bucket)\{.*\}) (\S+)$", observer.render_metrics().decode(), re.MULTILINE
        )
        now = {series: float(value) for series, value in lines}
        assert all(now[series] >= value for series, value in seen.items())
        seen = now


def test_a_dead_replica_runs_and_holds_nothing() -> None:
    observer = an_observer()
    observer.emit(step(num_running=3, num_waiting=2, blocks_total=10, blocks_used=5))
    assert read(observer, "vllm:kv_cache_usage_perc", **VLLM) == 0.5
    observer.emit(ReplicaChanged(model="tiny", replica=0, state="died"))
    assert read(observer, "vllm:num_requests_running", **VLLM) == 0
    assert read(observer, "vllm:num_requests_waiting", **VLLM) == 0
    assert read(observer, "vllm:kv_cache_usage_perc", **VLLM) == 0
    assert read(observer, "inferd_replica_faults_total", **OURS, fault="died") == 1


def test_waiting_is_the_engines_and_the_queues_and_adds_up() -> None:
    observer = an_observer({"tiny": 2})
    observer.emit(QueueChanged(model="tiny", waiting=7, in_flight=3))
    observer.emit(step(num_waiting=2))
    observer.emit(StepDone(model="tiny", replica=1, stats=StepStats(num_waiting=1)))
    waiting = [value for (name, _), value in samples(observer).items() if name == "vllm:num_requests_waiting"]
    assert sum(waiting) == 10
    assert read(observer, "inferd_queue_waiting", model="tiny") == 7


def test_blocks_add_up_to_the_total() -> None:
    observer = an_observer()
    observer.emit(step(blocks_total=10, blocks_used=5, blocks_cached=3))
    states = {state: read(observer, "inferd_kv_blocks", **OURS, state=state) for state in m.BLOCK_STATES}
    assert states == {"used": 5, "cached": 3, "free": 2}


def test_a_turn_that_computed_nothing_is_no_step() -> None:
    observer = an_observer()
    observer.emit(step(num_running=0))
    observer.emit(step(step_sequences=2, step_tokens=9, step_s=0.02))
    assert read(observer, "vllm:iteration_tokens_total_count", **VLLM) == 1
    assert read(observer, "inferd_step_sequences_bucket", **OURS, le="2.0") == 1


def test_quantiles_are_of_the_last_minute_and_none_when_it_was_quiet() -> None:
    clock = Clock()
    observer = an_observer(clock=clock)
    for i in range(1, 101):
        observer.emit(ended(timings=Timings(scheduled=0.0, first_token=i / 100, finished=i / 50)))
    for share, exact in ((0.5, 1.0), (0.95, 1.9), (0.99, 1.98)):
        found = read(observer, "inferd_latency_seconds", model="tiny", stage="total", quantile=f"{share:g}")
        assert found == pytest.approx(exact, rel=0.02)
    clock.now += 61
    assert math.isnan(read(observer, "inferd_latency_seconds", model="tiny", stage="total", quantile="0.5"))
    assert read(observer, "inferd_latency_seconds_count", model="tiny", stage="total") == 100


def test_a_loaded_replica_describes_itself_anew_each_time() -> None:
    observer = an_observer()
    for blocks in (100, 200):
        observer.emit(ReplicaChanged(model="tiny", replica=0, state="starting"))
        observer.emit(
            ReplicaChanged(
                model="tiny",
                replica=0,
                state="ready",
                load_s={"weights": 0.5},
                kv_blocks=blocks,
                block_size=16,
                rss_bytes=5_000,
                max_model_len=256,
            )
        )
    found = samples(observer)
    info = [dict(labels)["num_gpu_blocks"] for name, labels in found if name == "vllm:cache_config_info"]
    assert info == ["200"]
    assert read(observer, "inferd_replica_load_seconds", **OURS, phase="weights") == 0.5
    assert read(observer, "inferd_replica_resident_memory_bytes", **OURS) == 5_000
    assert read(observer, "inferd_replica_state", **OURS, state="ready") == 1
    assert read(observer, "inferd_replica_state", **OURS, state="starting") == 0


def test_the_adapters_of_a_replicas_sequences_are_one_series_that_changes() -> None:
    observer = Observer(models={"tiny": 1}, aliases=("vllm",), stream=io.StringIO(), wall=lambda: 1234.0)

    def told(name: str, *uses: AdapterUse) -> list[dict[str, str]]:
        for use in uses:
            observer.emit(StepDone(model="tiny", replica=0, stats=StepStats(step_sequences=1, adapters=use)))
        assert {value for (found, _), value in samples(observer).items() if found == name} <= {1234.0}
        return [dict(labels) for found, labels in samples(observer) if found == name]

    vllm = "vllm:lora_requests_info"
    assert told(vllm) == told(vllm, AdapterUse()) == []
    whole = {"model_name": "tiny", "engine": "0", "max_lora": "3"}
    assert told(vllm, AdapterUse(3, ("a", "b"), ("c",))) == [
        {**whole, "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    ]
    assert told(vllm, AdapterUse(3)) == [{**whole, "running_lora_adapters": "", "waiting_lora_adapters": ""}]
    assert [one["max_adapters"] for one in told("inferd_adapters_info")] == ["3"]
    observer.emit(ReplicaChanged(model="tiny", replica=0, state="died"))
    assert told(vllm) == []


def test_labels_are_a_closed_set_whatever_clients_send() -> None:
    observer = an_observer()
    for i in range(1000):
        observer.emit(ended(model=f"made-up-{i}", error_kind=f"kind-{i}"))
        observer.emit(RequestRefused(model=f"made-up-{i}", reason="unavailable"))
        observer.emit(
            HttpServed(request_id="r", method=f"M{i}", route=f"/raw/{i}", status=404, duration_s=0.1, model=f"m{i}")
        )
    assert len(samples(observer)) < 15_000
    assert read(observer, "inferd_errors_total", model="other", kind=InferdError.kind) == 1000


def test_http_requests_count_by_exact_status_and_by_class() -> None:
    observer = an_observer()
    for status in (200, 200, 404, 499):
        observer.emit(HttpServed(request_id="r", method="POST", route="/v1/completions", status=status, duration_s=0.1))
    route = {"route": "/v1/completions", "method": "POST"}
    assert read(observer, "inferd_http_requests_total", **route, status="404") == 1
    assert read(observer, "http_requests_total", handler="/v1/completions", method="POST", status="4xx") == 2
    assert read(observer, "http_request_duration_seconds_count", handler="/v1/completions", method="POST") == 4


def test_a_defect_in_observing_is_counted_and_named_and_goes_no_further() -> None:
    stream = io.StringIO()
    observer = an_observer(stream=stream)
    observer.emit(ended(usage=None))
    observer.emit(ended())
    assert read(observer, "inferd_observer_failures_total") == 1
    assert read(observer, "inferd_request_latency_seconds_count", **OURS) == 1
    observer.close()
    assert json.loads(stream.getvalue())["of"] == "RequestEnded"


def test_a_replica_is_logged_when_it_changes_and_not_when_it_only_reports() -> None:
    stream = io.StringIO()
    observer = an_observer(stream=stream)
    events: list[Event] = [
        ReplicaChanged(model="tiny", replica=0, state="ready", rss_bytes=1),
        ReplicaChanged(model="tiny", replica=0, state="ready", rss_bytes=2),
        ReplicaChanged(model="tiny", replica=0, state="died", reason="killed by signal 9"),
    ]
    for event in events:
        observer.emit(event)
    observer.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["state"], line["level"]) for line in lines] == [("ready", "info"), ("died", "error")]
    assert lines[1]["reason"] == "killed by signal 9"


def test_a_scrape_names_models_and_no_tenant() -> None:
    """Requests of all tenants are counted together: which of them sent what is in the ledger alone."""
    observer = an_observer({"tiny": 1, "other": 1})
    for number, tenant in enumerate(("secret-tenant-a", "secret-tenant-b")):
        observer.emit(ended(tenant=tenant, request_id=f"r{number}"))
    text = observer.render_metrics().decode()
    assert "secret-tenant" not in text
    labels = {label for _, names in samples(observer) for label, _ in names}
    assert not labels & {"tenant", "key", "key_id", "user"}
    assert {"tiny", "other"} <= {value for _, names in samples(observer) for _, value in names}
    assert read(observer, "inferd_requests_total", model="tiny", replica="0", outcome="done") == 2


def test_a_model_that_is_added_is_on_the_page_as_if_it_had_been_there_from_the_beginning() -> None:
    def page(observer: Observer) -> list[str]:
        lines = observer.render_metrics().decode().splitlines()
        observer.close()
        return sorted(line for line in lines if 'model="new"' in line)

    later = an_observer({"tiny": 1})
    later.configure({"tiny": 1, "new": 2}, access_log=False, aliases=("vllm", "triton", "fastapi"))
    found = page(later)
    assert found
    assert found == page(an_observer({"new": 2}))
