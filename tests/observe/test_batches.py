"""What batches of predictions leave in the metrics."""

from __future__ import annotations

import io

import pytest

from inferd.events import RequestEnded, StepDone
from inferd.observe import Observer
from inferd.types import StepStats, Timings


def series(observer: Observer) -> dict[str, float]:
    lines = observer.render_metrics().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def batch(rows: int, padded: int = 0, decoded_s: float = 0.0) -> StepDone:
    stats = StepStats(
        step_sequences=1, batch_rows=rows, padded_rows=padded, step_s=0.002, num_waiting=7, tokenize_s=decoded_s
    )
    return StepDone(model="m", replica=0, stats=stats)


def ended(model: str) -> RequestEnded:
    timings = Timings(dispatched=0.1, tokenized=0.2, scheduled=0.5, first_token=0.7, finished=0.75)
    return RequestEnded(model=model, replica=0, request_id="r", tenant="", outcome="done", timings=timings)


@pytest.fixture
def observer() -> Observer:
    return Observer(models=["m", "chat"], stream=io.StringIO())


def test_the_distribution_of_batch_sizes_is_told_and_what_padding_cost(observer: Observer) -> None:
    for event in (batch(1), batch(3, padded=5), batch(64, decoded_s=0.5)):
        observer.emit(event)
    found = series(observer)
    assert found['inferd_batch_rows_bucket{model="m",replica="0",le="2.0"}'] == 1
    assert found['inferd_batch_rows_bucket{model="m",replica="0",le="4.0"}'] == 2
    assert found['inferd_batch_rows_sum{model="m",replica="0"}'] == 68
    assert found['inferd_batch_seconds_count{model="m",replica="0"}'] == 3
    assert found['inferd_padded_rows_total{model="m",replica="0"}'] == 5
    assert found['inferd_replica_waiting{model="m",replica="0"}'] == 7
    assert found['inferd_tokenize_seconds_total{model="m",replica="0"}'] == 0.5
    observer.close()


def test_each_stage_of_a_prediction_is_timed_and_none_of_a_text(observer: Observer) -> None:
    observer.emit(batch(1))
    observer.emit(ended("m"))
    observer.emit(ended("chat"))
    found = series(observer)
    sums = {
        stage: found[f'inferd_prediction_stage_seconds_sum{{model="m",replica="0",stage="{stage}"}}']
        for stage in ("decode", "batch_wait", "compute", "encode")
    }
    assert sums == pytest.approx({"decode": 0.1, "batch_wait": 0.3, "compute": 0.2, "encode": 0.05})
    assert not any("stage_seconds" in name and 'model="chat"' in name for name in found)
    observer.close()


def test_audited_rows_are_counted_and_are_no_batches(observer: Observer) -> None:
    for reason in ("", "", "a row differs"):
        observer.emit(StepDone(model="m", replica=0, stats=StepStats(audited_rows=1, not_batched=reason)))
    found = series(observer)
    assert found['inferd_audited_rows_total{model="m",replica="0"}'] == 3
    assert found['inferd_audit_differences_total{model="m",replica="0"}'] == 1
    assert found.get('inferd_batch_rows_count{model="m",replica="0"}', 0) == 0
    observer.close()
