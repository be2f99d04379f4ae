"""The controller in simulated time: constant loads, spikes and an end; and the simulator itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.autoscale.decide import Spec
from inferd.autoscale.picture import picture
from inferd.autoscale.simulate import Arrival, Machine, Outcome, Scaler, View, quantile, simulate


def poisson(rate: Callable[[float], float], end: float, seconds: float, seed: int = 1) -> list[Arrival]:
    found: list[Arrival] = []
    drawn, now = random.Random(seed), 0.0
    while True:
        now += drawn.expovariate(rate(now))
        if now > end:
            return found
        found.append(Arrival(now, seconds))


def fixed(count: int) -> Callable[[View], tuple[int, str]]:
    return lambda view: (count, "fixed")


def test_one_replica_is_a_queue_in_order_of_arrival() -> None:
    outcome = simulate([Arrival(0.0, 2.0), Arrival(0.5, 1.0), Arrival(9.0, 1.0)], fixed(1), Machine())
    assert outcome.waits == [0.0, 1.5, 0.0]
    assert outcome.responses == [2.0, 2.5, 1.0]
    assert outcome.changes == 0


def test_a_started_replica_serves_when_it_is_ready_and_a_leaving_one_ends_what_it_has() -> None:
    def two_then_one(view: View) -> tuple[int, str]:
        return (2 if view.now < 3.0 else 1), "by time"

    arrivals = [Arrival(0.0, 10.0), Arrival(0.1, 10.0), Arrival(4.0, 1.0)]
    outcome = simulate(arrivals, two_then_one, Machine(ready_s=1.1, begin=1))
    assert outcome.waits == pytest.approx([0.0, 1.0, 7.1]), "ready at 1.1; the first leaves at 3, and ends its request"
    assert [count for _, count, _ in outcome.decisions] == [2, 1]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 3))
def test_every_request_is_served_once_whatever_is_decided(seed: int, most: int, slots: int) -> None:
    drawn = random.Random(seed)

    def any_number(view: View) -> tuple[int, str]:
        return drawn.randint(1, most), "chance"

    arrivals = poisson(lambda at: 5.0, 20.0, 0.3, seed)
    outcome = simulate(arrivals, any_number, Machine(slots=slots, ready_s=0.4))
    assert len(outcome.waits) == len(arrivals)
    assert all(wait >= 0 for wait in outcome.waits)  # a request that was never served has no number here


@pytest.mark.parametrize(
    ("loads", "ready_s", "begin"),
    [
        ((1, 5, 9, 13, 18), 0.5, 1),
        ((3, 10, 16), 4.5, 8),
        *[
            pytest.param(range(1, 31), ready_s, begin, marks=pytest.mark.soak)
            for ready_s in (0.5, 4.5)
            for begin in (1, 8)
        ],
    ],
)
def test_under_constant_load_the_number_settles_and_never_changes_again(
    loads: Sequence[int], ready_s: float, begin: int
) -> None:
    """Loads in quarters of what a replica serves: up to eight replicas, for 15 minutes each."""
    for quarter in loads:
        rate = quarter / 4 / 0.25  # requests of 0.25 s
        arrivals = [Arrival(number / rate, 0.25) for number in range(int(900 * rate))]
        outcome = simulate(arrivals, Scaler(Spec(least=1, most=8)), Machine(ready_s=ready_s, begin=begin))
        late = [decision for decision in outcome.decisions if 300 < decision[0] <= 900]
        assert late == [], (quarter, outcome.decisions)
        numbers = [begin, *(count for at, count, _ in outcome.decisions if at <= 900)]
        turns = sum((b - a) * (c - b) < 0 for a, b, c in zip(numbers, numbers[1:], numbers[2:], strict=False))
        assert turns <= 1, (quarter, outcome.decisions)
        served = outcome.ticks[-1].ready
        assert served >= min(8, quarter / 4), (quarter, outcome.decisions)


@pytest.mark.parametrize(("load", "begin", "settled"), [(2, 1, 1), (11, 1, 1), (12, 1, 2), (23, 2, 3)])
def test_replicas_that_work_at_requests_together_are_as_many_as_their_load_needs(
    load: int, begin: int, settled: int
) -> None:
    """Requests in work, where a replica works at 16. Each has some at any time, and one more is needed from 70 % on."""
    arrivals = [Arrival(number * 3.0 / load, 3.0) for number in range(150 * load)]
    outcome = simulate(arrivals, Scaler(Spec(least=1, most=8)), Machine(slots=16, begin=begin))
    assert [count for at, count, _ in outcome.decisions if at < 450.0] == [settled] * (settled > begin)
    assert max(outcome.waits) == 0.0


def spike(seed: int = 1) -> Outcome:
    arrivals = poisson(lambda at: 16.0 if 120 <= at < 180 else 4.0, 400.0, 0.2, seed)
    return simulate(arrivals, Scaler(Spec(least=1, most=8)), Machine(ready_s=2.0), after_s=900.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_spike_is_answered_soon_and_the_replicas_leave_afterwards(seed: int) -> None:
    outcome = spike(seed)
    first = next(at for at, count, _ in outcome.decisions if at >= 120)
    assert first - 120 <= 2.0
    assert max(tick.ready for tick in outcome.ticks if tick.at < 180) >= 4
    assert outcome.ticks[-1].ready == 1
    assert quantile(outcome.responses, 0.95) < 1.5


def test_a_step_of_many_short_requests_is_answered_within_half_a_second() -> None:
    arrivals = poisson(lambda at: 160.0 if at >= 60 else 40.0, 64.0, 0.02, 1)
    outcome = simulate(arrivals, Scaler(Spec(least=1, most=8)), Machine(ready_s=2.0, begin=2))
    assert next(at for at, count, _ in outcome.decisions if at >= 60 and count > 2) <= 60.5


def test_an_empty_model_goes_to_zero_where_it_may() -> None:
    arrivals = [Arrival(float(at), 0.2) for at in range(30)]
    spec = Spec(least=0, most=4, idle_after_s=40.0)
    outcome = simulate(arrivals, Scaler(spec), Machine(), after_s=100.0)
    assert outcome.ticks[-1].desired == 0
    assert next(at for at, count, _ in outcome.decisions if count == 0) >= 29.2 + 40.0
    kept = simulate(arrivals, Scaler(Spec(least=1, most=4)), Machine(), after_s=100.0)
    assert kept.ticks[-1].desired == 1


@pytest.mark.parametrize(
    ("part", "value"), [(0.0, 1.0), (0.01, 1.0), (0.25, 1.0), (0.26, 2.0), (0.5, 2.0), (0.95, 4.0), (1.0, 4.0)]
)
def test_a_quantile_is_the_value_of_the_nearest_rank(part: float, value: float) -> None:
    assert quantile([3.0, 1.0, 4.0, 2.0], part) == value
    assert quantile([], part) == 0.0


def test_the_picture_is_whole_xml_and_shows_each_outcome() -> None:
    from xml.etree import ElementTree

    drawn = picture("a < b", [("scaled", spike()), ("again", spike(2))])
    root = ElementTree.fromstring(drawn)
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"a < b", "scaled", "again", "replicas", "requests/s"} <= set(texts)
    assert len([element for element in root.iter() if element.tag.endswith("polyline")]) == 5
