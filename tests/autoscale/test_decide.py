"""The number of replicas as a function: bounds, monotony, what holds it, and what lets it fall."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from inferd.autoscale.decide import LOW, MAX_PATIENCE, STALE_S, Decision, Past, Seen, Spec, decide, holding, needs_of

NOW = 1000.0
rates = st.floats(0, 200, allow_nan=False)
counts = st.integers(0, 40)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    least = draw(st.integers(0, 5))
    return Spec(
        least=least,
        most=draw(st.integers(max(1, least), 10)),
        queue_s=draw(st.sampled_from((0.05, 0.2, 2.0))),
        in_flight=draw(st.none() | st.floats(0.5, 10)),
        duty=draw(st.none() | st.floats(0.1, 0.9)),
        down_after_s=draw(st.sampled_from((5.0, 60.0))),
        idle_after_s=30.0 if least == 0 else None,
    )


@st.composite
def observations(draw: st.DrawFn) -> Seen:
    def known(values: st.SearchStrategy[float]) -> float | None:
        return draw(st.none() | values)

    return Seen(
        at=NOW,
        ready=draw(st.integers(0, 10)),
        starting=draw(st.integers(0, 5)),
        waiting=draw(counts),
        in_flight=draw(counts),
        oldest_wait_s=draw(st.floats(0, 10)),
        idle_s=draw(st.sampled_from((0.0, 10.0, 100.0))),
        ready_s=known(st.floats(0.1, 100)),
        rate_per_s=known(rates),
        surge_per_s=draw(rates),
        recent_per_s=draw(rates),
        rise_per_s2=draw(st.floats(0, 10)),
        served_per_s=known(st.floats(0.05, 50)),
        took_s=known(st.floats(0.01, 20)),
        load=known(st.floats(0, 80)),
        load_now=known(st.floats(0, 80)),
        rate_long=known(rates),
        load_long=known(st.floats(0, 80)),
        busy_long=known(st.floats(0, 10)),
        busy_now=known(st.floats(0, 10)),
        limit=draw(st.none() | st.integers(1, 12)),
        hold=draw(st.sampled_from(("", "a rollout"))),
    )


pasts = st.builds(
    Past,
    since=st.none() | st.floats(0, NOW),
    peaks=st.lists(st.tuples(st.floats(900, NOW), st.integers(0, 10)), max_size=3).map(tuple),
    fell_at=st.none() | st.floats(0, NOW),
    patience=st.sampled_from((1, 2, MAX_PATIENCE)),
)


@given(specs(), observations(), pasts)
def test_the_number_stays_between_its_bounds_and_grows_within_the_limit(spec: Spec, seen: Seen, past: Past) -> None:
    decision = decide(spec, seen, past, NOW)
    assert spec.least <= decision.desired <= spec.most
    current = seen.ready + seen.starting
    if decision.desired > max(current, spec.least) and current > 0:
        assert seen.limit is not None
        assert decision.desired <= seen.limit
    assert decision.reason
    assert decision.current == current


@given(specs(), observations(), pasts)
def test_it_is_zero_only_when_empty_and_idle(spec: Spec, seen: Seen, past: Past) -> None:
    decision = decide(spec, seen, past, NOW)
    if decision.desired == 0:
        assert spec.least == 0
        assert (seen.waiting, seen.in_flight) == (0, 0)
        assert decision.current == 0 or seen.idle_s >= 30.0


GROWING = ("waiting", "oldest_wait_s", "rate_per_s", "surge_per_s", "recent_per_s", "rise_per_s2", "load", "load_now")


@given(specs(), observations(), pasts, st.sampled_from((*GROWING, "rate_long", "load_long", "busy_long")), rates)
def test_more_load_never_gives_fewer_replicas(spec: Spec, seen: Seen, past: Past, field: str, more: float) -> None:
    value = getattr(seen, field)
    if value is None:
        return
    added = type(value)(more)
    larger = seen._replace(**{field: value + added})
    before = {need.name: need.replicas for need in needs_of(spec, seen)}
    after = {need.name: need.replicas for need in needs_of(spec, larger)}
    assert all(after.get(name, 0) >= count for name, count in before.items())
    if not seen.idle_s:
        assert decide(spec, larger, past, NOW).desired >= decide(spec, seen, past, NOW).desired


@given(specs(), observations(), st.integers(0, 5))
def test_a_starting_replica_changes_no_input_so_it_is_not_counted_twice(spec: Spec, seen: Seen, more: int) -> None:
    """However many start, the number that is wanted stays: each that starts is one of it."""
    larger = seen._replace(starting=seen.starting + more)
    assert needs_of(spec, seen) == needs_of(spec, larger)
    first, second = decide(spec, seen, Past(), NOW), decide(spec, larger, Past(), NOW)
    if seen.limit is not None and first.desired > first.current > 0 and larger.ready + larger.starting < first.desired:
        assert second.desired == first.desired


@given(specs(), observations(), pasts)
def test_old_observations_hold_the_number_and_forget_the_window(spec: Spec, seen: Seen, past: Past) -> None:
    decision = decide(spec, seen, past, NOW + STALE_S + 0.1)
    current = seen.ready + seen.starting
    assert decision.desired == min(max(current, spec.least), spec.most)
    assert (decision.rule, decision.past) == ("no_data", Past())


@given(specs(), observations(), pasts)
def test_fewer_only_where_one_fewer_would_hold_for_the_whole_window(spec: Spec, seen: Seen, past: Past) -> None:
    decision = decide(spec, seen, past, NOW)
    if decision.desired >= decision.current or decision.rule in ("idle", "bounds"):
        return
    assert decision.rule == "consolidation"
    assert not seen.hold
    assert seen.waiting == 0
    assert past.since is not None
    assert NOW - past.since >= spec.down_after_s * past.patience
    inside = [n for at, n in past.peaks if at >= NOW - spec.down_after_s * past.patience]
    assert all(n <= decision.desired for n in inside)
    if seen.served_per_s is not None:
        assert seen.rate_per_s is not None
        # load x N / (N - 1), of what is served
        assert seen.rate_per_s <= decision.desired * seen.served_per_s * LOW + 1e-6
    if spec.in_flight is not None:
        assert seen.load_now is not None
        assert seen.load_now <= decision.desired * spec.in_flight


@given(specs(), observations(), pasts)
def test_nothing_known_of_the_load_keeps_the_number(spec: Spec, seen: Seen, past: Past) -> None:
    blind = Seen(at=NOW, ready=seen.ready, starting=seen.starting, in_flight=1, limit=seen.limit)
    assert holding(spec, blind, ()) == seen.ready + seen.starting
    if spec.least <= seen.ready + seen.starting <= spec.most and seen.ready + seen.starting > 0:
        decision = decide(spec, blind, Past(since=0.0), NOW)
        assert decision.desired == decision.current


def test_each_input_decides_with_its_numbers_in_the_reason() -> None:
    spec = Spec(least=1, most=8, in_flight=4.0)
    base = Seen(at=NOW, ready=1, limit=8, ready_s=2.0)
    speed = base._replace(served_per_s=4.0)
    cases = {
        "stable": (speed._replace(rate_per_s=10.0), 4),
        "panic": (speed._replace(rate_per_s=1.0, surge_per_s=10.0), 4),
        "forecast": (speed._replace(rate_per_s=3.0, rise_per_s2=2.0), 3),
        "backlog": (speed._replace(waiting=16, recent_per_s=4.0), 3),
        "wait": (base._replace(oldest_wait_s=1.0), 2),
        "in_flight": (base._replace(load_now=9.0), 3),
        "duty": (speed._replace(rate_long=3.0), 2),
    }
    for name, (seen, count) in cases.items():
        decision = decide(spec, seen, Past(), NOW)
        assert (decision.rule, decision.desired) == (name, count), decision
        assert any(letter.isdigit() for letter in decision.reason), decision
    assert decide(spec._replace(most=2), cases["stable"][0], Past(), NOW).reason.endswith("scaling.max allows 2")


def test_a_backlog_counts_before_the_speed_of_a_replica_is_known() -> None:
    spec = Spec(least=1, most=8)
    seen = Seen(at=NOW, ready=1, limit=8, ready_s=5.0, waiting=7, in_flight=1, rate_per_s=0.5, took_s=1.0)
    decision = decide(spec, seen, Past(), NOW)
    assert (decision.rule, decision.desired) == ("backlog", 2), decision
    assert decide(spec, seen._replace(waiting=2), Past(), NOW).desired == 1, "it ends before another replica is ready"
    assert decide(spec, seen._replace(took_s=None), Past(), NOW).desired == 1


@given(specs(), observations(), st.floats(0.1, 1))
def test_the_bound_of_the_speed_asks_for_no_more_than_the_speed_would(spec: Spec, seen: Seen, part: float) -> None:
    """A replica serves at most what its requests in work allow. Where its speed is known, ``took_s`` changes nothing."""
    seen = seen._replace(served_per_s=None, oldest_wait_s=0.0, surge_per_s=0.0, recent_per_s=0.0, rise_per_s2=0.0)
    if not seen.took_s or not seen.ready or not seen.in_flight:
        return
    speed = part * seen.in_flight / seen.ready / seen.took_s
    guessed = max((need.replicas for need in needs_of(spec, seen) if need.name == "backlog"), default=0)
    known = seen._replace(served_per_s=speed)
    assert guessed <= max((need.replicas for need in needs_of(spec, known) if need.name == "backlog"), default=0)
    assert needs_of(spec, known) == needs_of(spec, known._replace(took_s=None))


def test_seventy_percent_duty_for_two_minutes_adds_one_replica() -> None:
    spec = Spec(least=1, most=4)
    seen = Seen(at=NOW, ready=2, limit=4, load_long=5.0)
    assert decide(spec, seen._replace(busy_long=1.3), Past(), NOW).desired == 2
    assert decide(spec, seen._replace(busy_long=1.4), Past(), NOW).desired == 3
    assert decide(spec, seen._replace(busy_long=2.0, load_long=2.0), Past(), NOW).desired == 2, "none would be idle"
    assert decide(spec._replace(duty=None), seen._replace(busy_long=2.0), Past(), NOW).desired == 2


def fallen(spec: Spec, seen: Seen, past: Past) -> tuple[Decision, float]:
    """The next decision to have fewer, and when."""
    for step in itertools.count():
        at = NOW + step
        decision = decide(spec, seen._replace(at=at), past, at)
        past = decision.past
        if decision.desired < decision.current:
            return decision, at
        assert step < 10_000
    raise AssertionError


def test_a_replica_that_was_needed_again_soon_stays_for_twice_as_long() -> None:
    spec = Spec(least=1, most=4, down_after_s=60.0)
    quiet = Seen(at=NOW, ready=2, limit=4, served_per_s=4.0, rate_per_s=1.0)
    first, at = fallen(spec, quiet, Past())
    assert at - NOW == 60.0
    busy = quiet._replace(ready=1, at=at + 10, rate_per_s=8.0)
    again = decide(spec, busy, first.past, at + 10)
    assert (again.desired, again.past.patience) == (3, 2)
    late = decide(spec, busy._replace(at=at + 400), first.past, at + 400)
    assert late.past.patience == 1
    # Without a need for a long time, the next ones leave sooner again.
    patient = first.past._replace(patience=4)
    assert decide(spec, busy._replace(at=at + 959), patient, at + 959).past.patience == 8
    assert decide(spec, busy._replace(at=at + 960), patient, at + 960).past.patience == 2


def test_the_last_replica_stays_while_something_holds_it() -> None:
    spec = Spec(least=0, most=4, idle_after_s=30.0)
    idle = Seen(at=NOW, ready=1, idle_s=30.0)
    assert (decide(spec, idle, Past(), NOW).desired, decide(spec, idle, Past(), NOW).rule) == (0, "idle")
    held = decide(spec, idle._replace(hold="a rollout"), Past(), NOW)
    assert (held.desired, held.rule, held.reason) == (1, "hold", "held at 1: a rollout")


def test_no_replica_leaves_while_the_last_seconds_need_it() -> None:
    spec = Spec(least=1, most=8, duty=None)
    seen = Seen(at=NOW, ready=4, rate_per_s=1.0, surge_per_s=6.0, served_per_s=4.0)
    assert holding(spec, seen, needs_of(spec, seen)) == 3, "6 of 8.4, as two would work at 3/4"
    by_load = spec._replace(in_flight=4.0)
    seen = Seen(at=NOW, ready=4, load=11.0, load_now=1.0)
    assert holding(by_load, seen, ()) == 4, "the mean of a minute counts too"


def test_a_number_that_is_the_least_says_so() -> None:
    spec = Spec(least=1, most=4)
    quiet = Seen(at=NOW, ready=1, limit=4, load_now=0.0, busy_now=0.0)
    assert decide(spec, quiet, Past(), NOW).reason == "scaling.min allows no fewer"
    from_zero = spec._replace(least=0, idle_after_s=30.0)
    assert decide(from_zero, quiet, Past(), NOW).reason == "the last one leaves after 30 s without a request"
    busy = quiet._replace(ready=2, load_now=2.0, busy_now=2.0)
    assert decide(spec, busy, Past(), NOW).reason == "fewer would not have held lately"


def test_a_start_from_zero_names_work_where_nothing_else_asks_for_a_replica() -> None:
    spec = Spec(least=0, most=3, queue_s=0.2, in_flight=None, duty=None, down_after_s=5.0, idle_after_s=30.0)
    seen = Seen(at=NOW, ready=0, waiting=2)
    assert (decide(spec, seen, Past(), NOW).desired, decide(spec, seen, Past(), NOW).rule) == (1, "work")
    always = spec._replace(least=1, idle_after_s=None)
    assert (decide(always, seen, Past(), NOW).desired, decide(always, seen, Past(), NOW).rule) == (1, "least")


def test_the_load_alone_tells_how_few_replicas_hold() -> None:
    spec = Spec(least=1, most=8, queue_s=0.2, in_flight=4.0, duty=None, down_after_s=5.0, idle_after_s=None)
    assert holding(spec, Seen(at=NOW, ready=6, load=3.0, load_now=5.0), ()) == 2
    assert holding(spec._replace(in_flight=None), Seen(at=NOW, ready=6, load=3.0, load_now=5.0), ()) == 6
