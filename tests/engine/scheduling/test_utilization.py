"""How full steps are, and that a replica is utilized by the part of the load that it could have, however busy it is."""

from __future__ import annotations

import random

import pytest
from tests.engine.scheduling.test_accounting import Clockwork
from tests.engine.scheduling.test_scheduler import make_scheduler, make_sequence, run

from inferd.engine.scheduling.scheduler import Step


def utilization(clockwork: Clockwork, step: Step) -> float:
    """As the engine tells it with the step."""
    return clockwork.ledger.utilization(step, step.fullness)


class Load:
    """Poisson arrivals of random lengths at a replica. ``busy`` and ``used``: seconds with requests, and those in which
    full steps would have done the same work, of the second half."""

    def __init__(self, rate: float | None, *, prefill_s: float, decode_s: float, prompt: int, answer: int) -> None:
        """``rate``: None: requests always wait. A step takes 10 ms more than its tokens."""
        self.clockwork = clockwork = Clockwork(num_blocks=100_000, max_num_batched_tokens=128, max_num_seqs=16)
        clockwork.fixed_s, clockwork.prefill_s, clockwork.decode_s = 0.01, prefill_s, decode_s
        clockwork.noise = random.Random(1)
        self.drawn = random.Random(2)
        self.lengths = (prompt, answer)
        self.rate = rate
        self.num_added = 0
        self.busy = self.used = 0.0
        self.span_s = 0.0

    def serve(self, seconds: float) -> Load:
        clockwork, drawn = self.clockwork, self.drawn
        began, next_at = clockwork.now, clockwork.now
        while clockwork.now < began + seconds:
            if self.rate is not None and not clockwork.open:
                clockwork.now = max(clockwork.now, next_at)
            while next_at <= clockwork.now if self.rate is not None else len(clockwork.open) < 24:
                prompt, answer = (max(2, int(drawn.expovariate(1 / length))) for length in self.lengths)
                clockwork.add(prompt, answer)
                self.num_added += 1
                next_at += drawn.expovariate(self.rate or 1.0)
            at = clockwork.now
            step = clockwork.step()
            if at > began + seconds / 2:
                self.busy += clockwork.now - at
                self.used += (clockwork.now - at) * utilization(clockwork, step)
        self.span_s = clockwork.now - began
        return self

    @property
    def per_s(self) -> float:
        """Requests that ended in a second."""
        return (self.num_added - len(self.clockwork.open)) / self.span_s


@pytest.mark.parametrize(
    ("prefill_s", "decode_s", "prompt", "answer"),
    [
        pytest.param(0.0001, 0.00005, 20, 60, id="a decode costs little"),
        pytest.param(0.0005, 0.004, 20, 60, id="a decode costs half of a step"),
        pytest.param(0.0005, 0.0005, 400, 10, id="prompts take most of the time"),
    ],
)
@pytest.mark.parametrize("part", [0.2, 0.6])
def test_a_replica_is_utilized_by_its_part_of_the_rate_that_it_serves_when_full(
    prefill_s: float, decode_s: float, prompt: int, answer: int, part: float
) -> None:
    costs = {"prefill_s": prefill_s, "decode_s": decode_s}
    most = Load(None, prompt=prompt, answer=answer, **costs).serve(20.0).per_s
    load = Load(part * most, prompt=prompt, answer=answer, **costs).serve(60.0)
    used = 2.0 * load.used / load.span_s
    assert used == pytest.approx(load.per_s / most, abs=0.08)
    assert used <= 2.0 * load.busy / load.span_s + 1e-9


def test_a_full_replica_is_utilized_as_a_whole_and_one_whose_costs_are_not_known_too() -> None:
    load = Load(None, prefill_s=0.0001, decode_s=0.00005, prompt=20, answer=60).serve(10.0)
    assert load.used == pytest.approx(load.busy, rel=0.01)
    fresh = Clockwork(max_num_seqs=8)
    fresh.add(4, 2)
    step = fresh.step()
    assert step.fullness < 0.2
    assert utilization(fresh, step) == 1.0


def test_a_step_is_as_full_as_its_sequences_tokens_or_blocks_whichever_is_fullest() -> None:
    scheduler = make_scheduler(num_blocks=16, max_num_seqs=8, max_num_batched_tokens=32)
    scheduler.add(make_sequence("a", [1] * 8))
    assert run(scheduler).fullness == pytest.approx(8 / 32), "tokens of the prompt"
    assert run(scheduler).fullness == pytest.approx(3 / 16), "blocks of the answer"
    for number in range(3):
        scheduler.add(make_sequence(f"b{number}", [10 + number]))
    run(scheduler)
    assert run(scheduler).fullness == pytest.approx(4 / 8), "sequences"


def test_a_step_is_full_where_a_sequence_waits_or_a_prompt_does_not_fit_as_a_whole() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=16)
    scheduler.add(make_sequence("long", list(range(20))))
    assert [run(scheduler).fullness, run(scheduler).fullness] == [1.0, pytest.approx(1 / 2)]
    for number in range(2):
        scheduler.add(make_sequence(f"next{number}", [number]))
    assert run(scheduler).fullness == 1.0
    few = make_scheduler(num_blocks=8, max_num_seqs=8, max_num_batched_tokens=64)
    few.add(make_sequence("first", list(range(16))))
    assert run(few).fullness < 1.0
    few.add(make_sequence("second", list(range(100, 124))))
    assert run(few).fullness == 1.0, "no blocks are left for it"


def test_batch_work_fills_no_step_and_utilizes_no_replica() -> None:
    clockwork = Clockwork(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=16)
    clockwork.fixed_s, clockwork.prefill_s, clockwork.decode_s = 0.01, 0.001, 0.001
    for number in range(9):
        clockwork.add(4 + number, 9, priority=1)
    for _ in range(20):
        step = clockwork.step()
        assert (step.fullness, utilization(clockwork, step)) == (0.0, 0.0), "some run, and some wait"
    clockwork.add(4, 9)
    beside = clockwork.step()
    assert beside.fullness == pytest.approx(1 / 4), "one of four sequences, or 4 of 16 tokens"
    assert 0.0 < utilization(clockwork, beside) < 1.0
    for _ in range(4):
        clockwork.add(4, 9)
    assert clockwork.step().fullness == 1.0, "one of another class waits, or took the last place"
