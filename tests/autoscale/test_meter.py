"""What is measured of a model's counts, against the same numbers from all samples."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.autoscale.decide import Seen
from inferd.autoscale.meter import (
    LONG_S,
    LOOK_S,
    SHORT_S,
    SOUND_ENDS,
    SPEED_S,
    STABLE_S,
    Meter,
    Sample,
    pause_s,
)

BLANK = Seen(at=0.0, ready=1)


def samples(rows: list[tuple[int, int, int]]) -> list[Sample]:
    """A sample each quarter of a second, from arrivals, ends (of those there are) and work."""
    found, accepted, ended = [], 0, 0
    for step, (arrived, finished, busy) in enumerate(rows):
        accepted += arrived
        ended = min(accepted, ended + finished)
        live = accepted - ended
        found.append(Sample(step * 0.25, accepted, ended, max(0, live - 2), min(live, 2), min(busy, live), 2))
    return found


rows = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2)), min_size=2, max_size=600)


def mean(taken: list[Sample], seconds: float) -> float:
    """The mean load of the last seconds, each sample until the next one."""
    first = max((s.at for s in taken if s.at <= taken[-1].at - seconds), default=taken[0].at)
    inside = [one for one in taken[:-1] if one.at >= first]
    return sum(one.waiting + one.in_flight for one in inside) / len(inside)


@given(rows)
def test_rates_and_means_are_those_of_all_samples(given_rows: list[tuple[int, int, int]]) -> None:
    meter, taken = Meter(), samples(given_rows)
    for sample in taken:
        meter.add(sample)
    seen = meter.measured(BLANK)
    last = taken[-1]
    assert seen.load_now == pytest.approx(mean(taken, SHORT_S))
    if last.at >= 10:
        first = max((s for s in taken if s.at <= last.at - STABLE_S), key=lambda s: s.at, default=taken[0])
        assert seen.rate_per_s == pytest.approx((last.accepted - first.accepted) / (last.at - first.at))
        assert seen.load == pytest.approx(mean(taken, STABLE_S))
        assert seen.surge_per_s <= (last.accepted - taken[max(0, len(taken) - 13)].accepted) / SHORT_S
    else:
        assert (seen.rate_per_s, seen.load) == (None, None)
    assert (seen.load_long is not None) == (last.at >= LONG_S)


def test_the_speed_of_a_replica_is_that_while_requests_wait() -> None:
    meter = Meter()
    for step in range(40):  # two replicas end four requests each second, and arrivals are no part of it
        meter.add(Sample(step * 0.25, 1000, step, 5, 2, 2, 2))
    assert meter.served_per_s == pytest.approx(2.0)
    for step in range(40, 400):  # no request waits: the ends are the arrivals'
        meter.add(Sample(step * 0.25, 1000 + step // 8, 40 + step // 8, 0, 1, 1, 2))
    assert meter.served_per_s == pytest.approx(2.0)
    meter.forget_speed()
    assert meter.served_per_s is None


@given(st.integers(1, 32), st.integers(1, 90), st.integers(0, 4), st.integers(1, 6))
def test_the_first_ends_of_requests_that_began_together_are_no_speed(
    together: int, seconds: int, spread: int, ready: int
) -> None:
    """Replicas work at so many each, each for so many seconds. They begin within some seconds, and others wait."""
    meter, num = Meter(), together * ready
    starts = sorted(min(spread, seconds - 1) * one / num for one in range(num))
    for step in range(10 * 3 * seconds):
        at = step * 0.1
        ended = sum(max(0, math.floor((at - start) / seconds + 1e-9)) for start in starts)
        meter.add(Sample(at, 10_000, ended, 100, num, ready, ready))
        speed = meter.served_per_s
        if speed is not None:
            assert 0.5 <= speed * seconds / together <= 2.1, "what is said first is not far off"
    assert meter.served_per_s is not None or num * 2 < SOUND_ENDS


def test_the_seconds_of_a_request_are_those_without_waiting_ones() -> None:
    meter = Meter()
    for step in range(41):  # one ends each second, and another is in work for half of each second
        meter.add(Sample(step * 0.25, 100, step // 4, 0, 1 + step % 4 // 2, 1, 1))
    assert meter.took_s == pytest.approx(1.5 * 10 / (10 + 1))
    for step in range(41, 400):  # requests wait: theirs are no seconds of one that finds a free replica
        meter.add(Sample(step * 0.25, 1000, step // 4, 9, 1, 1, 1))
    assert meter.took_s == pytest.approx(1.5 * 10 / (10 + 1))
    meter.forget_speed()
    assert meter.took_s is None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 3)), min_size=2, max_size=300))
def test_the_speed_is_that_of_the_shortest_time_that_says_enough(looks: list[tuple[int, bool, int]]) -> None:
    meter, ended, spans = Meter(), 0, list[tuple[float, int]]()
    taken = list[Sample]()
    for step, (finished, waits, ready) in enumerate(looks):
        ended += finished
        taken.append(Sample(step * 1.0, 10_000, ended, 5 * waits, 2, min(ready, 2), ready))
        meter.add(taken[-1])
    for before, after in itertools.pairwise(taken):
        if before.waiting and after.waiting and before.ready and after.ready:
            spans.append(((after.at - before.at) * before.ready, after.ended - before.ended))
    enough = [
        last
        for last in (spans[begin:] for begin in range(len(spans)))
        if sum(span[0] for span in last) >= SPEED_S and sum(span[1] for span in last) >= SOUND_ENDS
    ]
    kept = min(enough, key=len, default=spans)
    work_s, ends = sum(span[0] for span in kept), sum(span[1] for span in kept)
    assert meter.served_per_s == (pytest.approx(ends / work_s) if ends >= SOUND_ENDS else None)


def surge(per_look: int, moment: int) -> float:
    """What the last seconds surely had, after a minute of so many arrivals in each tenth, and a moment with more."""
    meter, accepted = Meter(), 0
    for step in range(600):
        accepted += per_look
        meter.add(Sample(step * 0.1, accepted, accepted, 0, 1, 1, 1))
    for step in range(600, 603):
        accepted += moment
        meter.add(Sample(step * 0.1, accepted, accepted, 0, 1, 1, 1))
    return meter.measured(BLANK).surge_per_s


@given(st.integers(0, 20), st.integers(0, 100))
def test_a_moment_with_more_arrivals_never_makes_a_lower_rate(per_look: int, moment: int) -> None:
    assert surge(per_look, moment + 1) >= surge(per_look, moment)


def test_a_moment_counts_in_full_where_chance_does_not_explain_it() -> None:
    assert surge(1, 10) >= 90.0, "ten times the rate"
    assert surge(10, 12) < 100.0, "a fifth more is chance"
    assert surge(0, 2) < 2.0, "six requests together are no rate"


def test_looks_are_spread_over_most_phases_of_a_period() -> None:
    at, phases = 0.0, set()
    for number in range(2000):
        pause = pause_s(number)
        assert 0.75 * LOOK_S <= pause <= 1.25 * LOOK_S
        at += pause
        phases.add(int(at % LOOK_S / LOOK_S * 10))
    assert len(phases) >= 8
    assert at / 2000 == pytest.approx(LOOK_S, rel=0.01)


def test_a_gap_begins_the_windows_anew() -> None:
    meter = Meter()
    for step in range(600):
        meter.add(Sample(step * 0.25, step, step, 0, 1, 1, 1))
    assert meter.measured(BLANK).rate_per_s is not None
    meter.add(Sample(200.0, 9000, 9000, 0, 1, 1, 1))
    seen = meter.measured(BLANK)
    assert (seen.rate_per_s, seen.surge_per_s, seen.load_long) == (None, 0.0, None)


def test_other_replicas_begin_the_two_minutes_anew() -> None:
    meter = Meter()
    for step in range(600):
        meter.add(Sample(step * 0.25, step, step, 0, 1, 1, 1))
    assert meter.measured(BLANK).busy_long == pytest.approx(1.0)
    meter.add(Sample(150.0, 600, 600, 0, 1, 1, 2))
    assert meter.measured(BLANK).busy_long is None


def test_waits_in_workers_count_from_the_first_sample_with_them() -> None:
    meter = Meter()
    for step in range(8):
        meter.add(Sample(step * 0.25, 9, 0, 3 if step > 3 else 0, 1, 1, 1))
    assert meter.measured(BLANK).oldest_wait_s == pytest.approx(0.75)
