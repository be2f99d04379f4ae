"""The laws of batching, for any requests at any times."""

from __future__ import annotations

import random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.predict.simulated import Simulation, percentile

from inferd.predict.batcher import Batcher, Limits
from inferd.predict.estimate import BatchCost
from inferd.predict.runtime import Item
from inferd.types import CLASSES

few = settings(max_examples=100, deadline=None)

limits = st.builds(
    Limits,
    mode=st.sampled_from(["dynamic", "dynamic", "static", "off"]),
    max_rows=st.integers(1, 12),
    max_size=st.sampled_from([0, 0, 20]),
    max_delay_s=st.sampled_from([0.0, 0.002, 0.02]),
    preferred=st.sampled_from([(), (4,), (2, 6)]),
    latency_budget_s=st.sampled_from([None, 0.01]),
    aging_every=st.integers(2, 6),
)
asked = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 5),
        "size": st.integers(1, 9),
        "bucket": st.sampled_from([None, "a"]),
        "priority": st.integers(-3, 2),
        "lives_s": st.sampled_from([None, None, 0.001, 0.05]),
        "may_wait": st.sampled_from([True, True, True, False]),
    }
)
# A request arrives, the clock moves on, or a request is cancelled.
events = st.lists(st.one_of(asked, asked, st.sampled_from([0.0, 0.0001, 0.003, 0.03]), st.integers(0, 30)), max_size=60)


class Model:
    """A batcher under events, and what has become of every item."""

    def __init__(self, limits: Limits, seconds: float) -> None:
        self.batcher = Batcher(limits)
        self.seconds = seconds
        self.now = 1.0
        self.free_at = 1.0
        self.added: dict[str, tuple[float, Item]] = {}
        self.batches: list[list[Item]] = []
        self.gone: list[str] = []

    def play(self, events: list[dict[str, object] | float | int]) -> None:
        for event in events:
            if isinstance(event, dict):
                self.add(dict(event))
            elif isinstance(event, float):
                self.move_to(self.now + event)
            elif (item := self.batcher.remove(str(event))) is not None:
                self.gone.append(item.request_id)
            self.look()

    def add(self, fields: dict[str, object]) -> None:
        lives_s = fields.pop("lives_s")
        name = str(len(self.added))
        item = Item(request_id=name, inputs={}, **fields)  # type: ignore[arg-type]
        if isinstance(lives_s, float):
            item.expires_at = self.now + lives_s
        self.added[name] = (self.now, item)
        self.batcher.add(item, self.now)

    def move_to(self, then: float) -> None:
        """As the worker's loop does: it looks whenever the batcher said it should."""
        while (due := self.batcher.due(max(self.now, self.free_at))) is not None and due <= then:
            self.now = max(self.now, due, self.free_at)
            self.look()
        self.now = then

    def look(self) -> None:
        if self.now < self.free_at:
            return
        while (due := self.batcher.due(self.now)) is not None and due <= self.now:
            expired = [item.request_id for item in self.batcher.expire(self.now)]
            self.gone += expired
            self.check_windows()
            batch = self.batcher.next_batch(self.now)
            assert batch or expired, "due, and nothing has expired or is ready"
            if batch:
                self.batches.append(batch)
                self.batcher.cost.observe(sum(item.rows for item in batch), self.seconds)
                self.free_at = self.now + self.seconds
                return
        self.check_windows()

    def check_windows(self) -> None:
        """While the model is free, no request waits beyond its window."""
        limits = self.batcher.limits
        if limits.mode == "static":
            return
        due = self.batcher.due(self.now)
        for name in self.waiting:
            added_at, item = self.added[name]
            assert due is not None
            assert due <= max(self.now, added_at + limits.max_delay_s) + 1e-9
            if item.expires_at is not None:
                assert due <= max(self.now, item.expires_at) + 1e-9

    @property
    def waiting(self) -> list[str]:
        taken = {item.request_id for batch in self.batches for item in batch}
        return [name for name in self.added if name not in taken and name not in self.gone]


@few
@given(limits, events, st.sampled_from([0.0, 0.001, 0.01]))
def test_every_request_leaves_the_batcher_once(
    limits: Limits, events: list[dict[str, object] | float | int], seconds: float
) -> None:
    model = Model(limits, seconds)
    model.play(events)
    taken = [item.request_id for batch in model.batches for item in batch]
    assert len(set(taken + model.gone)) == len(taken) + len(model.gone)
    assert len(model.batcher) == len(model.waiting) == len(model.added) - len(taken) - len(model.gone)
    model.move_to(model.now + 10.0)
    if limits.mode != "static":
        assert not model.waiting


@few
@given(limits, events, st.sampled_from([0.0, 0.001, 0.01]))
def test_no_batch_exceeds_its_limits(
    limits: Limits, events: list[dict[str, object] | float | int], seconds: float
) -> None:
    model = Model(limits, seconds)
    model.play(events)
    for batch in model.batches:
        assert len({item.bucket for item in batch}) == 1
        if len(batch) > 1:
            assert limits.mode != "off"
            assert sum(item.rows for item in batch) <= limits.max_rows
            assert not limits.max_size or sum(item.size for item in batch) <= limits.max_size


@few
@given(limits, events, st.sampled_from([0.0, 0.001, 0.01]))
def test_requests_of_one_class_and_bucket_run_in_order_of_arrival(
    limits: Limits, events: list[dict[str, object] | float | int], seconds: float
) -> None:
    model = Model(limits, seconds)
    model.play(events)
    seen: dict[tuple[object, int], int] = {}
    for batch in model.batches:
        for item in batch:
            key = (item.bucket, min(max(item.priority, -2), 1))
            assert seen.get(key, -1) < int(item.request_id)
            seen[key] = int(item.request_id)


@pytest.mark.parametrize("mode", ["dynamic", "static", "off"])
def test_expired_requests_alone_are_taken_out_at_once(mode: Literal["dynamic", "static", "off"]) -> None:
    batcher = Batcher(Limits(mode=mode, max_rows=2, max_delay_s=0.0))
    for name, expires_at in (("late", 1.5), ("stays", None), ("later", 2.5)):
        batcher.add(Item(request_id=name, inputs={}, expires_at=expires_at), 1.0)
    assert batcher.expire(1.4) == []
    assert [item.request_id for item in batcher.expire(1.5)] == ["late"]
    assert "late" not in batcher
    taken = [item.request_id for _ in range(2) for item in batcher.next_batch(1.5)]
    assert taken == ["stays", "later"]


@few
@given(limits, events)
def test_nothing_that_has_expired_is_taken(limits: Limits, events: list[dict[str, object] | float | int]) -> None:
    model = Model(limits, 0.01)
    taken_at: list[tuple[float, Item]] = []
    next_batch = model.batcher.next_batch

    def noted(now: float) -> list[Item]:
        batch = next_batch(now)
        taken_at.extend((now, item) for item in batch)
        return batch

    model.batcher.next_batch = noted  # type: ignore[method-assign]
    model.play(events)
    assert all(item.expires_at is None or item.expires_at > now for now, item in taken_at)


@few
@given(
    fixed=st.floats(1e-6, 0.1),
    per_row=st.floats(1e-7, 0.01),
    pauses=st.lists(st.sampled_from([0.0, 1e-5, 1e-3, 0.05]), min_size=5, max_size=30),
    known=st.booleans(),
)
def test_a_lone_client_is_never_held_back(fixed: float, per_row: float, pauses: list[float], known: bool) -> None:
    cost = BatchCost()
    if known:
        for rows in (1, 2, 4, 8, 16):
            cost.observe(rows, fixed + per_row * rows)
    batcher = Batcher(Limits(max_rows=16, max_delay_s=0.02), cost)
    simulation = Simulation(batcher, lambda rows: fixed + per_row * rows)
    left = iter(pauses)
    simulation.arrive(0.0)
    simulation.run(1e9, again=lambda now: [now + pause for pause in [next(left, None)] if pause is not None])
    assert len(simulation.latencies) == len(pauses) + 1
    assert max(simulation.held_s) == 0.0


def test_a_class_that_is_always_outranked_has_its_turn() -> None:
    batcher = Batcher(Limits(max_rows=1, aging_every=4, max_delay_s=0.0))
    batcher.add(Item(request_id="patient", inputs={}, priority=1), 0.0)
    batcher.add(Item(request_id="other bucket", inputs={}, priority=1, bucket="b"), 0.0)
    taken = []
    for turn in range(12):
        batcher.add(Item(request_id=f"critical {turn}", inputs={}, priority=-2), float(turn))
        taken += [item.request_id for item in batcher.next_batch(float(turn))]
    assert taken.index("patient") == 3
    assert taken.index("other bucket") == 7


@few
@given(st.lists(st.integers(-2, 1), min_size=2, max_size=20), st.integers(1, 4))
def test_the_best_class_goes_first_and_others_ride_along(priorities: list[int], max_rows: int) -> None:
    batcher = Batcher(Limits(max_rows=max_rows, max_delay_s=0.0, aging_every=1000))
    for place, priority in enumerate(priorities):
        batcher.add(Item(request_id=str(place), inputs={}, priority=priority), 0.0)
    taken: list[int] = []
    while len(batcher):
        taken += [item.priority for item in batcher.next_batch(0.0)]
    assert taken == sorted(priorities)
    assert len(CLASSES) == 4


def test_a_request_that_may_not_wait_is_computed_at_once_with_those_that_wait() -> None:
    batcher = _expecting_company()
    batcher.add(Item(request_id="one", inputs={}), 1.0)
    assert batcher.due(1.0) > 1.0  # type: ignore[operator]
    batcher.add(Item(request_id="two", inputs={}, may_wait=False), 1.0)
    assert batcher.due(1.0) == 1.0
    assert [item.request_id for item in batcher.next_batch(1.0)] == ["one", "two"]


def test_it_waits_while_another_request_is_expected_and_no_longer_than_three_gaps() -> None:
    batcher = _expecting_company()
    batcher.add(Item(request_id="one", inputs={}), 1.0)
    due = batcher.due(1.0)
    assert due is not None
    assert 1.0 < due < 1.004
    assert batcher.next_batch(1.0) == []
    assert [item.request_id for item in batcher.next_batch(1.02)] == ["one"]


def test_a_model_that_takes_half_of_the_latency_budget_makes_no_request_wait() -> None:
    batcher = _expecting_company(latency_budget_s=0.04)
    batcher.add(Item(request_id="one", inputs={}), 1.0)
    assert batcher.due(1.0) == 1.0


@few
@given(
    fixed=st.floats(0.0, 0.02),
    per_row=st.floats(1e-5, 0.01),
    budget=st.floats(0.001, 0.2),
    rows=st.lists(st.integers(1, 3), min_size=1, max_size=40),
)
def test_a_batch_takes_half_of_the_latency_budget_or_is_half_fixed_time(
    fixed: float, per_row: float, budget: float, rows: list[int]
) -> None:
    cost = BatchCost()
    for size in (1, 2, 4, 8):
        cost.observe(size, fixed + per_row * size)
    batcher = Batcher(Limits(max_rows=64, max_delay_s=0.0, latency_budget_s=budget), cost)
    for place, count in enumerate(rows):
        batcher.add(Item(request_id=str(place), inputs={}, rows=count), 1.0)
    while len(batcher):
        batch = batcher.next_batch(1.0)
        own = per_row * sum(item.rows for item in batch)
        assert len(batch) == 1 or fixed + own <= budget / 2 * 1.001 or own <= fixed * 1.001
    assert not batcher.next_batch(1.0)


def test_a_request_that_would_expire_meanwhile_is_not_held_back() -> None:
    batcher = _expecting_company()
    batcher.add(Item(request_id="one", inputs={}, expires_at=1.02), 1.0)
    assert batcher.due(1.0) == 1.0


def _expecting_company(latency_budget_s: float | None = None) -> Batcher:
    """One that knows of a request every millisecond, and of batches for which that is worth waiting."""
    cost = BatchCost()
    for rows in (1, 4, 8):
        cost.observe(rows, 0.02 + 0.0001 * rows)
    batcher = Batcher(Limits(max_rows=8, max_delay_s=0.02, latency_budget_s=latency_budget_s), cost)
    for place in range(300):
        batcher.add(Item(request_id=f"earlier {place}", inputs={}, may_wait=False), 0.7 + place / 1000)
        batcher.next_batch(0.7 + place / 1000)
    return batcher


def test_a_preferred_size_goes_at_once_and_the_rest_waits_for_the_next_batch() -> None:
    cost = BatchCost()
    batcher = Batcher(Limits(max_rows=16, max_delay_s=0.02, preferred=(4, 8, 99)), cost)
    for place in range(11):
        batcher.add(Item(request_id=str(place), inputs={}), 1.0)
    assert len(batcher.next_batch(1.0)) == 8
    assert len(batcher.next_batch(1.0)) == 3


@pytest.mark.parametrize(("waiting", "taken"), [(3, 3), (4, 4), (7, 4), (8, 8), (9, 8), (98, 8)])
def test_a_batch_has_the_largest_preferred_size_that_is_reached(waiting: int, taken: int) -> None:
    batcher = Batcher(Limits(max_rows=16, max_delay_s=0.0, preferred=(4, 8, 99)), BatchCost())
    for place in range(waiting):
        batcher.add(Item(request_id=str(place), inputs={}), 1.0)
    assert len(batcher.next_batch(1.0)) == taken


def test_the_static_mode_waits_for_a_full_batch_however_long() -> None:
    batcher = Batcher(Limits(mode="static", max_rows=3))
    for place in range(2):
        batcher.add(Item(request_id=str(place), inputs={}), 0.0)
    assert batcher.due(1e6) is None
    batcher.add(Item(request_id="2", inputs={}), 1e6)
    assert len(batcher.next_batch(1e6)) == 3


def test_an_item_larger_than_every_limit_is_computed_alone() -> None:
    batcher = Batcher(Limits(max_rows=4, max_size=10, max_delay_s=0.0))
    batcher.add(Item(request_id="small", inputs={}, rows=1, size=1), 0.0)
    batcher.add(Item(request_id="large", inputs={}, rows=9, size=90), 0.0)
    assert [[item.request_id for item in batcher.next_batch(0.0)] for _ in range(2)] == [["small"], ["large"]]


# -- the micro-example: throughput and the tail --------------------------------------------------


def cost_s(rows: int) -> float:
    """Four times the rows in 1.6 times the time, so 2.5 times the throughput."""
    return 0.016 + 0.0005 * rows


def saturated(limits: Limits) -> float:
    """Requests per second with more clients than fit into two batches."""
    simulation = Simulation(Batcher(limits), cost_s)
    for _ in range(128):
        simulation.arrive(0.0)
    return simulation.run(8.0, again=lambda now: [now]).throughput


def lightly_loaded(limits: Limits, rate: float = 75.0) -> float:
    """The p99 latency of requests that come at random, ``rate`` per second."""
    simulation = Simulation(Batcher(limits), cost_s)
    rng = random.Random(1)
    at = 0.0
    for _ in range(3000):
        at += rng.expovariate(rate)
        simulation.arrive(at)
    simulation.run(at + 1.0)
    return percentile(simulation.latencies, 0.99)


def test_a_window_keeps_the_throughput_of_large_batches_and_loses_their_tail() -> None:
    small, large = Limits(mode="static", max_rows=8), Limits(mode="static", max_rows=32)
    window = Limits(max_rows=32, max_delay_s=0.02)
    assert saturated(large) / saturated(small) == pytest.approx(2.5, rel=0.02)
    assert saturated(window) / saturated(small) == pytest.approx(2.5, rel=0.02)
    assert lightly_loaded(large) - lightly_loaded(small) > 0.3
    assert lightly_loaded(window) < 0.1


@pytest.mark.parametrize("rate", [20.0, 75.0, 200.0, 600.0])
def test_waiting_costs_no_request_more_than_the_window(rate: float) -> None:
    at_once = lightly_loaded(Limits(max_rows=32, max_delay_s=0.0), rate)
    assert lightly_loaded(Limits(max_rows=32, max_delay_s=0.01), rate) <= at_once + 0.01
