"""The arithmetic of the claims about batches and pages: against a plain twin, the real scheduler and the real traces."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import pytest
from bench.claims import continuous, paged
from bench.claims.batching import (
    arrivals as arrivals_at,
)
from bench.claims.batching import (
    continuous_steps,
    continuous_waits,
    in_use,
    log_normal,
    static_steps,
    static_waits,
    times,
    times_fewer,
    variation,
)
from bench.claims.continuous import BATCH, SPREADS, reached
from bench.claims.paged import CAPACITY, LONGEST, NAIVE, PAGED, RESERVED, SIZED, arrivals, at_once
from bench.claims.static import padded
from bench.claims.traffic import LEVELS, TRAFFIC, at, requests
from bench.prefix_replay import Cost, replay
from bench.report import Figure
from hypothesis import given, settings
from hypothesis import strategies as st

ANSWERS = st.lists(st.integers(1, 9), min_size=1, max_size=30)


@settings(max_examples=50)
@given(ANSWERS, st.integers(1, 6))
def test_continuous_steps_are_those_that_the_scheduler_takes(answers: list[int], batch: int) -> None:
    burst = arrivals([(4, answer) for answer in answers])
    found = replay(
        burst,
        num_blocks=batch * 2,
        block_size=16,
        cost=Cost(1.0, 0.0, 0.0),
        prefix_caching=False,
        max_num_seqs=batch,
    )
    assert found.ended_at == continuous_steps(answers, batch)


@given(ANSWERS, st.integers(1, 6))
def test_static_steps_are_counted_row_by_row(answers: list[int], batch: int) -> None:
    waiting, steps = list(answers), 0
    while waiting:
        left, waiting = waiting[:batch], waiting[batch:]
        while any(count > 0 for count in left):  # no sequence leaves before the last
            left, steps = [count - 1 for count in left], steps + 1
    assert static_steps(answers, batch) == steps
    assert continuous_steps(answers, batch) <= steps
    assert 0 < in_use(answers, batch, steps) <= 1


def test_a_batch_that_waits_for_its_longest_takes_more_steps() -> None:
    assert continuous_steps([2, 8, 2, 8], 2) == 2 + 2 + 8  # one place sees 2, 2 and 8, the other 8
    assert static_steps([2, 8, 2, 8], 2) == 16
    assert times_fewer([5] * 64, 8) == 1.0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=25),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_waits_are_those_of_a_server_step_by_step(requests: list[tuple[int, int]], batch: int, per_row: int) -> None:
    answers = [answer for answer, _ in requests]
    come = [float(time) for time in itertools.accumulate(gap for _, gap in requests)]
    waiting, running, now, waited = list(range(len(answers))), dict[int, int](), 0.0, 0.0
    while waiting or running:
        if not running:
            now = max(now, come[waiting[0]])
        while waiting and come[waiting[0]] <= now and len(running) < batch:
            number = waiting.pop(0)
            running[number] = answers[number]
        now += 2.0 + per_row * len(running)
        running = {number: left - 1 for number, left in running.items()}
        for number in [number for number, left in running.items() if not left]:
            waited += now - come[number]
            del running[number]
    assert continuous_waits(answers, come, batch, 2.0, per_row) == pytest.approx(waited / len(answers))


def test_a_static_batch_waits_until_it_is_full_and_the_one_before_is_done() -> None:
    # From 5 to 5 + 3 * (1 + 2 * 10); the second is full at 6, and begins when the first is done. The last is alone.
    ends = [68.0, 68.0, 68.0 + 2 * 21, 68.0 + 2 * 21, 200.0 + 11]
    come = [0.0, 5.0, 6.0, 6.0, 200.0]
    expected = sum(end - at for end, at in zip(ends, come, strict=True)) / 5
    assert static_waits([1, 3, 2, 2, 1], come, 2, 1.0, 10.0) == pytest.approx(expected)


def test_requests_come_at_the_rate_that_was_asked_for() -> None:
    assert arrivals_at(10_000, 4.0, 1)[-1] == pytest.approx(2500, rel=0.05)


def test_time_is_of_steps_and_of_rows() -> None:
    found = times([2, 8, 2], 2, per_step=1.0, per_row=10.0)
    assert found.static == 8 + 2 + 10 * (8 + 8 + 2)
    assert found.dropped == 8 + 2 + 10 * (2 + 8 + 2)
    assert found.continuous == 8 + 10 * (2 + 8 + 2)


def test_padding_computes_the_longest_of_both_for_every_request() -> None:
    assert padded([(3, 9), (7, 2)]) == [(7, 9), (7, 9)]


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.5])
def test_lengths_have_the_variation_that_was_asked_for(cv: float) -> None:
    lengths = log_normal(cv, 20_000, 200.0, 1)
    assert variation(lengths) == pytest.approx(cv, rel=0.08)
    assert sum(lengths) / len(lengths) == pytest.approx(200, rel=0.05)


def test_three_times_are_reached_between_two_measured_spreads() -> None:
    curve = [1.0] * len(SPREADS)
    assert reached(curve) is None
    curve[-2:] = [2.0, 4.0]
    assert reached(curve) == (SPREADS[-2] + SPREADS[-1]) / 2


def test_lengths_between_quantiles_lie_on_a_straight_line() -> None:
    quantiles = [10.0 * i for i in range(len(LEVELS))]
    assert [at(quantiles, level) for level in LEVELS] == quantiles
    assert at(quantiles, 0.45) == pytest.approx((at(quantiles, 0.4) + at(quantiles, 0.5)) / 2)


def test_traffic_is_scaled_to_a_small_model() -> None:
    for name in TRAFFIC:
        asked = requests(name, 4000, 16.0, 1 << 20, 1)
        assert sum(answer for _, answer in asked) / len(asked) == pytest.approx(16, rel=0.2)
        short = requests(name, 500, 16.0, 128, 1)
        assert all(1 <= prompt <= 96 and 1 <= answer <= 32 for prompt, answer in short)


def test_quantiles_are_those_of_the_traces(shared_data: Path) -> None:
    traces = shared_data / "traces"
    azure = (
        list(csv.DictReader((traces / f"azure-llm-2023/{f}.csv").read_text().splitlines())) for f in ("code", "conv")
    )
    found = [[(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows] for rows in azure]
    lines = (traces / "aibrix-sharegpt/8min_up_and_down.jsonl").read_text().splitlines()
    ticks = [one for line in lines for one in json.loads(line)["requests"]]
    found.append([(one["Prompt Length"], one["Output Length"]) for one in ticks])
    rows = [json.loads(line) for line in (traces / "mooncake/conversation_trace.jsonl").read_text().splitlines()]
    found.append([(row["input_length"], row["output_length"]) for row in rows])
    for traffic, pairs in zip(TRAFFIC.values(), found, strict=True):
        for quantiles, lengths in zip((traffic.prompts, traffic.answers), zip(*pairs, strict=True), strict=True):
            ordered = sorted(lengths)
            for level, quantile in zip(LEVELS, quantiles, strict=True):
                near = range(max(int(level * len(ordered)) - 3, 0), min(int(level * len(ordered)) + 3, len(ordered)))
                assert min(ordered[i] for i in near) - 1 <= quantile <= max(ordered[i] for i in near) + 1


def test_pages_hold_more_requests_than_reservations() -> None:
    asked = requests(paged.LOAD, 60, paged.MEAN_ANSWER, LONGEST, 3)
    counted = at_once(asked)
    assert counted[NAIVE] == counted[RESERVED] == CAPACITY // LONGEST
    assert counted[RESERVED] < counted[SIZED] < counted[PAGED]


def test_verdicts_say_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous, "MANY", 500)
    speeds = {
        continuous.STATIC: Figure((100.0,)),
        continuous.DROPPED: Figure((200.0,)),
        continuous.CONTINUOUS: Figure((250.0,)),
    }
    claim = continuous.judge({"ShareGPT": speeds}, 10)
    held = {sentence: held for held, sentence in claim.verdicts}
    assert held["ShareGPT: 2.5 times the tokens/s on this machine"] is False
    assert len(claim.rows) == len(TRAFFIC)
    (row,) = [row for row in claim.rows if row[0] == "ShareGPT"]
    assert row[-1] == "2.50 / 1.25"
    counted = {NAIVE: 6.0, RESERVED: 6.0, SIZED: 12.0, PAGED: 18.0}
    claim = paged.judge(counted, {name: Figure((10 * value,)) for name, value in counted.items()}, 10)
    assert [held for held, _ in claim.verdicts] == [True, True, True]
    slow = {name: Figure((10.0,)) for name in counted}
    assert [held for held, _ in paged.judge(counted, slow, 10).verdicts] == [True, False, True]
    assert BATCH > 1
