"""What one event of each kind changes on the metrics page, and what it leaves as it was."""

from __future__ import annotations

import math

import pytest
from tests.observe.test_observer import an_observer, ended, samples, step

from inferd.events import (
    BatchEnded,
    BreakerChanged,
    CacheLooked,
    ClientTurnedAway,
    ConfigReloaded,
    Event,
    GatewaysCompared,
    HandedOver,
    HintsExchanged,
    HttpServed,
    JobsCounted,
    LinesAnswered,
    LoadProgress,
    ModelUnloaded,
    QueueChanged,
    ReplicaChanged,
    RequestRefused,
    Retried,
    StateChanged,
    StoredCounted,
    StoredDropped,
)
from inferd.observe import Observer
from inferd.types import StepParts, Timings, Usage

# Of these the labels are not known beforehand, or not every model has them.
_MADE_WHEN_FIRST_TOLD = (
    "http_",
    "replica_load_seconds",
    "adapters_info",
    "cache_config_info",
    "config_digest_info",
    "pipeline_step",
    "prediction_stage",
    "response_cache_bytes",
)
_OF_EVERY_SERIES = ("model", "replica")


def page(observer: Observer) -> dict[str, float]:
    """Our own names, by the labels' values that are no model or replica. Buckets and quantiles follow from the rest."""
    found: dict[str, float] = {}
    for (name, labels), value in samples(observer).items():
        own = dict(labels)
        if name.startswith("inferd_memory_"):  # what the system reports, whatever the server does
            continue
        if name.startswith("inferd_") and not name.endswith(("_bucket", "_created")) and "quantile" not in own:
            words = [own[label] for label in sorted(own) if label not in _OF_EVERY_SERIES]
            found[" ".join((name.removeprefix("inferd_").removesuffix("_total"), *words))] = value
    return found


def told(*events: Event) -> dict[str, float]:
    """What the last event changes."""
    observer = an_observer()
    for event in events[:-1]:
        observer.emit(event)
    before = page(observer)
    observer.emit(events[-1])
    after = page(observer)
    new = {name for name in after.keys() - before.keys() if not name.startswith(_MADE_WHEN_FIRST_TOLD)}
    assert new == set(), "a rate is right from the first event on"
    observer.close()
    assert not any(math.isnan(value) for value in after.values())
    return {name: value for name, value in after.items() if value != before.get(name, 0.0)}


def histogram(count: float = 1, **sums: float) -> dict[str, float]:
    """Distributions, each with its sum, and so many values. A sum of 0 is as it was."""
    parts = {
        f"{name}_{part}": value for name, total in sums.items() for part, value in (("sum", total), ("count", count))
    }
    return {name: value for name, value in parts.items() if value}


def latency(**sums: float) -> dict[str, float]:
    return {
        f"latency_seconds_{part} {stage}": value
        for stage, total in sums.items()
        for part, value in (("sum", total), ("count", 1))
    }


DONE = {
    "requests done": 1,
    "finished stop": 1,
    "prompt_tokens": 10,
    "generation_tokens": 5,
    "prompt_cached_tokens": 4,
    **histogram(
        time_to_first_token_seconds=0.5,
        request_latency_seconds=1.5,
        request_queue_time_seconds=0.25,
        request_prefill_time_seconds=0.25,
        request_inference_time_seconds=1.25,
        request_decode_time_seconds=1.0,
        request_prompt_tokens=10,
        request_generation_tokens=5,
        request_prefill_kv_computed_tokens=6,
        request_params_n=1,
        request_params_max_tokens=7,
        request_preemptions=3,
        request_max_num_generation_tokens=5,
        request_time_per_output_token_seconds=0.25,
    ),
    **histogram(4, inter_token_latency_seconds=1.0),
    **latency(first_token=0.5, total=1.5, queue=0.25, inference=1.25, per_output_token=0.25),
    "latency_seconds_sum inter_token": 1.0,
    "latency_seconds_count inter_token": 4,
}
OF_SINGLE_ANSWERS = (
    "request_time_per_output_token_seconds",
    "request_max_num_generation_tokens",
    "latency_seconds_sum per_output_token",
    "latency_seconds_count per_output_token",
)
OF_FIRST_TOKENS = {
    **histogram(time_to_first_token_seconds=0.5),
    **histogram(4, inter_token_latency_seconds=1.0),
    **latency(first_token=0.5),
    "latency_seconds_sum inter_token": 1.0,
    "latency_seconds_count inter_token": 4,
    "prompt_tokens": 10,
    "generation_tokens": 5,
    "prompt_cached_tokens": 4,
}
LOADED = ReplicaChanged(
    model="tiny",
    replica=0,
    state="ready",
    load_s={"weights": 0.5, "warm": 0.25},
    kv_blocks=100,
    block_size=16,
    rss_bytes=5_000,
    max_model_len=256,
)


TOLD: dict[str, tuple[tuple[Event, ...], dict[str, float]]] = {
    "done": ((ended(max_tokens=7, num_preemptions=3),), DONE),
    "two answers": (
        (ended(n=2, max_tokens=7, num_preemptions=3, finish_reasons=("stop", "length")),),
        {name: value for name, value in DONE.items() if not name.startswith(OF_SINGLE_ANSWERS)}
        | {"finished length": 1, "request_params_n_sum": 2},
    ),
    "failed": (
        (ended(outcome="failed", finish_reasons=(), error_kind="internal"),),
        OF_FIRST_TOKENS | {"requests failed": 1, "finished error": 1, "errors internal": 1},
    ),
    "cancelled": (
        (ended(outcome="cancelled", finish_reasons=("stop", "cancelled"), n=4),),
        OF_FIRST_TOKENS | {"requests cancelled": 1, "finished stop": 1, "finished abort": 3},
    ),
    "refused": (
        (
            ended(
                outcome="refused",
                finish_reasons=(),
                error_kind="overloaded",
                usage=Usage(),
                timings=Timings(),
                inter_token_s=(),
            ),
        ),
        {"requests refused": 1, "errors overloaded": 1},
    ),
    "pipeline": (
        (ended(timings=Timings(steps_s={"cut": 0.5, "ask": 0.25}), usage=Usage(), inter_token_s=()),),
        {
            "requests done": 1,
            "finished stop": 1,
            "pipeline_step_seconds_sum cut": 0.5,
            "pipeline_step_seconds_count cut": 1,
            "pipeline_step_seconds_sum ask": 0.25,
            "pipeline_step_seconds_count ask": 1,
            **histogram(
                request_prompt_tokens=0,
                request_generation_tokens=0,
                request_prefill_kv_computed_tokens=0,
                request_params_n=1,
                request_preemptions=0,
                request_max_num_generation_tokens=0,
            ),
        },
    ),
    "step": (
        (
            step(
                num_running=3,
                num_waiting=2,
                blocks_total=10,
                blocks_used=5,
                blocks_cached=3,
                step_tokens=9,
                step_sequences=2,
                step_s=0.5,
                num_preempted=1,
                prefix_query_tokens=20,
                prefix_hit_tokens=8,
                tokenizer_cache_queries=7,
                tokenizer_cache_hits=6,
                tokenize_s=0.25,
                num_drafts=4,
                drafted_tokens=12,
                accepted_tokens=11,
            ),
        ),
        {
            "running": 3,
            "waiting": 2,
            "replica_waiting": 2,
            "waiting_by_reason capacity": 2,
            "kv_usage_ratio": 0.5,
            "kv_blocks used": 5,
            "kv_blocks cached": 3,
            "kv_blocks free": 2,
            **histogram(step_tokens=9, step_sequences=2, step_seconds=0.5),
            "preemptions": 1,
            "prefix_cache_queries": 20,
            "prefix_cache_hits": 8,
            "tokenizer_cache_queries": 7,
            "tokenizer_cache_hits": 6,
            "tokenize_seconds": 0.25,
            "speculation_drafts": 4,
            "speculation_drafted_tokens": 12,
            "speculation_accepted_tokens": 11,
        },
    ),
    "the parts of a step": (
        (step(step_sequences=1, parts=StepParts(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)),),
        {
            "step_tokens_count": 1,
            "step_sequences_count": 1,
            "step_sequences_sum": 1,
            "step_seconds_count": 1,
            "step_part_seconds schedule": 1,
            "step_part_seconds speculate": 2,
            "step_part_seconds masks": 3,
            "step_part_seconds batch": 4,
            "step_part_seconds forward": 5,
            "step_part_seconds logits": 6,
            "step_part_seconds sample": 7,
            "step_part_seconds text": 8,
            "step_part_seconds send": 9,
        },
    ),
    "batch": (
        (step(batch_rows=4, padded_rows=2, step_s=0.5, num_running=3, num_waiting=2, tokenize_s=0.25),),
        {
            "running": 3,
            "waiting": 2,
            "replica_waiting": 2,
            "waiting_by_reason capacity": 2,
            **histogram(batch_rows=4, batch_seconds=0.5),
            "padded_rows": 2,
            "tokenize_seconds": 0.25,
        },
    ),
    "second batch": (
        (step(batch_rows=4, step_s=0.5, tokenize_s=0.25), step(batch_rows=2, step_s=0.25, tokenize_s=0.375)),
        {**histogram(2, batch_rows=6, batch_seconds=0.75), "tokenize_seconds": 0.375},
    ),
    "prediction": (
        (step(batch_rows=4), ended(timings=Timings(0.125, 0.25, 0.5, 1.0, 2.0), usage=Usage(), inter_token_s=())),
        {
            "requests done": 1,
            "finished stop": 1,
            "prediction_stage_seconds_sum decode": 0.125,
            "prediction_stage_seconds_count decode": 1,
            "prediction_stage_seconds_sum batch_wait": 0.25,
            "prediction_stage_seconds_count batch_wait": 1,
            "prediction_stage_seconds_sum compute": 0.5,
            "prediction_stage_seconds_count compute": 1,
            "prediction_stage_seconds_sum encode": 1.0,
            "prediction_stage_seconds_count encode": 1,
            **histogram(
                time_to_first_token_seconds=1.0,
                request_latency_seconds=2.0,
                request_queue_time_seconds=0.5,
                request_prefill_time_seconds=0.5,
                request_inference_time_seconds=1.5,
                request_decode_time_seconds=1.0,
                request_prompt_tokens=0,
                request_generation_tokens=0,
                request_prefill_kv_computed_tokens=0,
                request_params_n=1,
                request_preemptions=0,
                request_max_num_generation_tokens=0,
            ),
            **latency(first_token=1.0, total=2.0, queue=0.5, inference=1.5),
        },
    ),
    "audit": ((step(audited_rows=5),), {"audited_rows": 5}),
    "audit with a finding": (
        (step(audited_rows=5, not_batched="rows differ"),),
        {"audited_rows": 5, "audit_differences": 1},
    ),
    "queue": (
        (
            QueueChanged(
                model="tiny",
                waiting=10,
                in_flight=5,
                waiting_by_class=(1, 2, 3, 4),
                waiting_tokens=6,
                waiting_bytes=7,
            ),
        ),
        {
            "queue_waiting": 10,
            "in_flight": 5,
            "waiting": 10,
            "waiting_by_reason capacity": 10,
            "queue_waiting_by_class critical": 1,
            "queue_waiting_by_class interactive": 2,
            "queue_waiting_by_class normal": 3,
            "queue_waiting_by_class batch": 4,
            "queue_tokens": 6,
            "queue_bytes": 7,
        },
    ),
    "refused at the door": ((RequestRefused(model="tiny", reason="queue_full"),), {"refused queue_full": 1}),
    "loaded": (
        (LOADED,),
        {
            "replica_state ready": 1,
            "replica_load_seconds weights": 0.5,
            "replica_load_seconds warm": 0.25,
            "replica_resident_memory_bytes": 5_000,
            "model_max_tokens": 256,
            "cache_config_info 16 100": 1,
        },
    ),
    "memory of a replica": (
        (LOADED, ReplicaChanged(model="tiny", replica=0, state="ready", rss_bytes=6_000)),
        {"replica_resident_memory_bytes": 6_000},
    ),
    "died": (
        (LOADED, ReplicaChanged(model="tiny", replica=0, state="died", restarts=2)),
        {
            "replica_state ready": 0,
            "replica_state died": 1,
            "replica_restarts": 2,
            "replica_faults died": 1,
            "replica_resident_memory_bytes": 0,
        },
    ),
    "breaker": (
        (BreakerChanged(model="tiny", replica=0, state="open"),),
        {"breaker_state closed": 0, "breaker_state open": 1, "breaker_changes open": 1},
    ),
    "hedge": ((Retried(model="tiny", kind="hedge", granted=True),), {"retries hedge granted": 1}),
    "retry": ((Retried(model="tiny", kind="retry", granted=False),), {"retries retry refused": 1}),
    "handed over": (
        (HandedOver(model="tiny", replica=0, seconds=0.2, num_blocks=3, num_bytes=12),),
        {
            "hand_overs whole": 1,
            "hand_over_blocks": 3,
            "hand_over_bytes": 12,
            "hand_over_seconds_sum": 0.2,
            "hand_over_seconds_count": 1,
        },
    ),
    "handed over in part": (
        (HandedOver(model="tiny", replica=0, seconds=0.2, num_blocks=1, num_bytes=4, failure="2 of 3 are missing"),),
        {
            "hand_overs partial": 1,
            "hand_over_blocks": 1,
            "hand_over_bytes": 4,
            "hand_over_seconds_sum": 0.2,
            "hand_over_seconds_count": 1,
        },
    ),
    "hit": ((CacheLooked(model="tiny", result="hit"),), {"response_cache hit": 1}),
    "store": (
        (CacheLooked(model="tiny", result="store", bytes=9),),
        {"response_cache store": 1, "response_cache_bytes store": 9},
    ),
    "unloaded": ((ModelUnloaded(model="tiny", reason="idle", freed_bytes=3),), {"model_unloads idle": 1}),
    "reloaded": ((ConfigReloaded(accepted=True, is_whole=True),), {"config_reloads accepted": 1}),
    "reloaded in part": (
        (ConfigReloaded(accepted=True, is_whole=False),),
        {"config_reloads accepted": 1, "config_last_reload_successful": 0},
    ),
    "not reloaded": (
        (ConfigReloaded(accepted=False, is_whole=False),),
        {"config_reloads refused": 1, "config_last_reload_successful": 0},
    ),
    "database away": ((StateChanged(available=False),), {"state_available": 0, "state_outages": 1}),
    "database back": ((StateChanged(available=False), StateChanged(available=True)), {"state_available": 1}),
    "gateways compared": (
        (
            GatewaysCompared(digest="ab", num_gateways=1, num_differing=0),
            GatewaysCompared(digest="cd", num_gateways=3, num_differing=2),
        ),
        {"config_digest_info cd": 1, "gateways": 3, "gateways_differing": 2},
    ),
    "hints exchanged": (
        (HintsExchanged(counts={"sent": 3, "used": 1}), HintsExchanged(counts={"sent": 2, "stale": 4})),
        {"hints sent": 5, "hints stale": 4},
    ),
    "stored": (
        (StoredCounted(num_bytes=900, num_responses=3, num_conversations=2, num_tenants=2, most_used=0.25),),
        {
            "stored_bytes": 900,
            "stored_entries response": 3,
            "stored_entries conversation": 2,
            "stored_tenants": 2,
            "stored_most_used_ratio": 0.25,
        },
    ),
    "beyond the bytes of a tenant": ((StoredDropped(reason="bytes", count=2),), {"stored_dropped bytes": 2}),
    "too old": ((StoredDropped(reason="age", count=5),), {"stored_dropped age": 5}),
    "files and batches": (
        (JobsCounted(num_files=3, num_bytes=700, by_status={"validating": 1, "in_progress": 2}),),
        {
            "files": 3,
            "files_bytes": 700,
            "batches validating": 1,
            "batches in_progress": 2,
        },
    ),
    "requests of a batch": (
        (LinesAnswered(num_done=5, num_failed=2),),
        {"batch_requests done": 5, "batch_requests failed": 2},
    ),
    "the end of a batch": ((BatchEnded(status="expired"),), {"batches_ended expired": 1}),
    "turned away": ((ClientTurnedAway(),), {"http_connections_refused": 1}),
    "loading": ((LoadProgress(model="tiny", replica=0, phase="weights", done=1, total=2),), {}),
    "served": (
        (
            HttpServed(
                request_id="r",
                method="POST",
                route="/v1/completions",
                status=404,
                duration_s=0.5,
                request_bytes=3,
                response_bytes=4,
            ),
        ),
        {
            "http_requests POST /v1/completions 404": 1,
            "http_request_duration_seconds_sum POST /v1/completions": 0.5,
            "http_request_duration_seconds_count POST /v1/completions": 1,
            "http_request_size_bytes_sum /v1/completions": 3,
            "http_request_size_bytes_count /v1/completions": 1,
            "http_response_size_bytes_sum /v1/completions": 4,
            "http_response_size_bytes_count /v1/completions": 1,
        },
    ),
}


@pytest.mark.parametrize("what", TOLD)
def test_an_event_changes_what_it_is_about_and_nothing_else(what: str) -> None:
    events, expected = TOLD[what]
    assert told(*events) == pytest.approx(expected)


def test_a_models_tally_counts_what_its_events_told() -> None:
    observer = an_observer()
    observer.emit(step(step_sequences=2, step_tokens=9, prefix_query_tokens=20, prefix_hit_tokens=8))
    observer.emit(step(batch_rows=4, step_s=0.5))
    for outcome, error in (("done", None), ("failed", "internal")):
        observer.emit(ended(outcome=outcome, error_kind=error))
    for result in ("hit", "miss"):
        observer.emit(CacheLooked(model="tiny", result=result))
    tally = observer.tally_of("tiny")
    observer.close()
    assert (tally.success.count, tally.fail.count) == (1, 1)
    assert tally.execution_count == 2
    assert tally.inference_count == 4 + 1
    assert list(tally.batches) == [4]
    assert (tally.cache_hit.count, tally.cache_miss.count) == (1, 1)
    assert observer.tally_of("another").success.count == 0
