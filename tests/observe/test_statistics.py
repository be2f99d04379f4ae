"""What each model has done, in counts and nanoseconds."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from inferd.events import CacheLooked, RequestEnded, StepDone
from inferd.observe import Observer
from inferd.observe.statistics import Statistics
from inferd.types import StepStats, Timings, Usage

DONE = Timings(dispatched=0.1, tokenized=0.2, scheduled=0.5, first_token=0.7, finished=0.75)


def ended(outcome: str = "done", timings: Timings = DONE, **more: object) -> RequestEnded:
    fields = {"model": "m", "replica": 0, "request_id": "r", "tenant": "", "outcome": outcome, "timings": timings}
    return RequestEnded(**{**fields, **more})  # type: ignore[arg-type]


def test_a_request_s_time_is_shared_out_among_its_stages() -> None:
    statistics = Statistics()
    statistics.ended("m", [ended(), ended()], wall=12.5)
    tally = statistics.of("m")
    assert (tally.success.count, tally.success.ns) == (2, 1_500_000_000)
    assert (tally.compute_input.count, tally.compute_input.ns) == (2, 200_000_000)
    assert (tally.queue.count, tally.queue.ns) == (2, 800_000_000)
    assert (tally.compute_infer.count, tally.compute_infer.ns) == (2, 400_000_000)
    assert (tally.compute_output.count, tally.compute_output.ns) == (2, 100_000_000)
    assert tally.last_inference_ms == 12_500


def test_what_failed_is_counted_apart() -> None:
    statistics = Statistics()
    statistics.ended(
        "m", [ended("failed"), ended("cancelled", Timings(finished=0.5)), ended("refused", Timings())], 1.0
    )
    tally = statistics.of("m")
    assert (tally.fail.count, tally.fail.ns) == (3, 1_250_000_000)
    assert (tally.success.count, tally.queue.count) == (0, 0)


def test_of_a_text_every_token_was_computed() -> None:
    statistics = Statistics()
    statistics.ended("m", [ended(usage=Usage(3, 5))], 1.0)
    tally = statistics.of("m")
    assert (tally.inference_count, tally.compute_infer.ns, tally.compute_output.ns) == (1, 250_000_000, 0)


def test_batches_are_counted_by_their_rows_and_restarted_workers_begin_again() -> None:
    statistics = Statistics()

    def step(rows: int, decoded_s: float, replica: int = 0) -> None:
        stats = StepStats(step_sequences=1, batch_rows=rows, step_s=0.5, tokenize_s=decoded_s)
        statistics.stepped(StepDone(model="m", replica=replica, stats=stats))

    step(4, 0.25)
    step(4, 0.75)
    step(1, 0.125)  # another worker in its place
    step(1, 3.0, replica=1)
    statistics.stepped(StepDone(model="m", replica=0, stats=StepStats(tokenize_s=9.0)))  # nothing was computed
    tally = statistics.of("m")
    assert (tally.inference_count, tally.execution_count) == (10, 4)
    batches = {rows: (batch.compute_infer.count, batch.compute_input.ns) for rows, batch in tally.batches.items()}
    assert batches == {4: (2, 750_000_000), 1: (2, 3_125_000_000)}


def test_the_cache_s_hits_and_misses_are_counted_and_its_stores_are_not() -> None:
    statistics = Statistics()
    for result in ("hit", "hit", "miss", "store", "error"):
        statistics.looked(CacheLooked(model="m", result=result))
    assert (statistics.of("m").cache_hit.count, statistics.of("m").cache_miss.count) == (2, 1)


@given(st.lists(st.sampled_from(["done", "failed", "cancelled", "refused"])))
def test_every_request_is_counted_once(outcomes: list[str]) -> None:
    statistics = Statistics()
    for outcome in outcomes:
        statistics.ended("m", [ended(outcome)], 1.0)
    tally = statistics.of("m")
    assert tally.success.count + tally.fail.count == len(outcomes)
    assert tally.success.count == outcomes.count("done") == tally.compute_infer.count


def test_the_observer_tallies_each_model_and_drops_the_tally_of_a_removed_one() -> None:
    observer = Observer(models=("m", "n"), stream=io.StringIO())
    try:
        for model in ("m", "n", "m"):
            observer.emit(ended(model=model))
        assert observer.tally_of("m").success.count == 2
        observer.configure({"n": 1}, access_log=False)
        assert observer.tally_of("m").success.count == 0
        assert observer.tally_of("n").success.count == 1
    finally:
        observer.close()
