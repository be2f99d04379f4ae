"""Slow replicas are set aside: some of them, for a time, and never more than half."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from inferd.config import RoutingConfig
from inferd.router.choosing.outlier import Outliers

CONFIG = RoutingConfig(eject_factor=3.0, eject_s=10.0)


def work(outliers: Outliers, seconds: dict[int, float], start: float, duration: float) -> float:
    """Every replica that is not set aside answers ten times a second. Returns when it is over."""
    for step in range(int(duration * 10)):
        now = start + step / 10
        for replica, latency in seconds.items():
            if replica not in outliers.ejected(now):
                outliers.note(replica, latency, now)
    return start + duration


def test_the_slow_one_of_three_is_set_aside_within_a_second() -> None:
    outliers = Outliers(CONFIG)
    now = work(outliers, {0: 0.1, 1: 0.12, 2: 1.0}, 0.0, 1.0)
    assert outliers.ejected(now) == {2}


def test_it_comes_back_and_is_judged_by_how_it_is_now() -> None:
    outliers = Outliers(CONFIG)
    work(outliers, {0: 0.1, 1: 0.1, 2: 1.0}, 0.0, 1.0)
    assert outliers.ejected(9.0) == {2}
    assert outliers.ejected(11.0) == frozenset()
    work(outliers, {0: 0.1, 1: 0.1, 2: 0.1}, 11.0, 20.0)
    assert outliers.ejected(31.0) == frozenset()


def test_one_that_stays_slow_is_set_aside_for_longer_each_time() -> None:
    outliers = Outliers(CONFIG)
    terms = []
    since = None
    for step in range(4000):
        now = step / 10
        for replica, latency in ((0, 0.1), (1, 0.1), (2, 1.0)):
            if replica not in outliers.ejected(now):
                outliers.note(replica, latency, now)
        is_out = 2 in outliers.ejected(now)
        if is_out and since is None:
            since = now
        elif not is_out and since is not None:
            terms.append(now - since)
            since = None
    assert terms == pytest.approx([10, 20, 40, 80, 160], abs=0.3)


@pytest.mark.parametrize(("good_s", "term_s"), [(5.0, 20.0), (15.0, 20.0), (25.0, 10.0)])
def test_one_that_is_slow_again_soon_is_set_aside_for_longer(good_s: float, term_s: float) -> None:
    """Soon: within two of its terms after the last one."""
    outliers = Outliers(CONFIG)
    for _ in range(10):
        for replica, latency in ((0, 0.1), (1, 0.1), (2, 1.0)):
            outliers.note(replica, latency, 0.0)
    for step in range(10):
        for replica, latency in ((0, 0.1), (1, 0.1), (2, 30.0)):
            outliers.note(replica, latency, 10.0 + good_s + step / 100)
    assert outliers.next_return(10.1 + good_s) == pytest.approx(10.0 + good_s + term_s, abs=0.1)


def test_when_replicas_leave_those_come_back_that_were_nearly_due() -> None:
    outliers = Outliers(CONFIG)
    now = work(outliers, {0: 0.1, 1: 0.1, 2: 0.1, 3: 1.0}, 0.0, 2.0)
    now = work(outliers, {0: 0.1, 1: 0.1, 2: 1.0}, now, 4.0)
    assert outliers.ejected(now) == {2, 3}
    outliers.forget(0)
    assert outliers.ejected(now) == {2}, "one of three, and the other one was set aside before it"


def test_one_slow_answer_ejects_no_replica() -> None:
    outliers = Outliers(CONFIG)
    now = work(outliers, {0: 0.1, 1: 0.1}, 0.0, 3.0)
    outliers.note(1, 60.0, now)
    assert outliers.ejected(now) == frozenset()


def test_few_samples_decide_nothing() -> None:
    outliers = Outliers(CONFIG)
    work(outliers, {0: 0.1, 1: 0.1}, 0.0, 5.0)
    for _ in range(4):
        outliers.note(2, 9.0, 5.0)
    assert outliers.ejected(5.0) == frozenset()


def test_a_single_replica_is_never_ejected() -> None:
    outliers = Outliers(CONFIG)
    assert outliers.ejected(work(outliers, {0: 9.0}, 0.0, 5.0)) == frozenset()


def test_when_all_are_slow_none_is() -> None:
    outliers = Outliers(CONFIG)
    now = work(outliers, {0: 0.1, 1: 0.1, 2: 0.1}, 0.0, 10.0)
    work(outliers, {0: 5.0, 1: 5.0, 2: 5.0}, now, 60.0)
    assert len(outliers.ejected(now + 60)) <= 1


def test_noise_of_a_millisecond_is_no_slowness() -> None:
    outliers = Outliers(CONFIG)
    assert outliers.ejected(work(outliers, {0: 0.001, 1: 0.005}, 0.0, 5.0)) == frozenset()


def test_a_factor_of_zero_switches_it_off() -> None:
    outliers = Outliers(RoutingConfig(eject_factor=0))
    assert outliers.ejected(work(outliers, {0: 0.1, 1: 0.1, 2: 9.0}, 0.0, 5.0)) == frozenset()


class OutlierMachine(RuleBasedStateMachine):
    """For any latencies and any removed replicas: at most half are ejected, and none for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.outliers = Outliers(CONFIG)
        self.now = 0.0
        self.known: set[int] = set()

    @rule(replica=st.integers(0, 5), seconds=st.sampled_from((0.01, 0.1, 1.0, 30.0)), times=st.integers(1, 20))
    def answer(self, replica: int, seconds: float, times: int) -> None:
        for _ in range(times):
            self.outliers.note(replica, seconds, self.now)
        self.known.add(replica)

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(replica=st.integers(0, 5))
    def leave(self, replica: int) -> None:
        self.outliers.forget(replica)
        self.known.discard(replica)

    @invariant()
    def at_most_half_are_out(self) -> None:
        ejected = self.outliers.ejected(self.now)
        assert ejected <= self.known
        assert 2 * len(ejected) <= len(self.known)

    @invariant()
    def nobody_is_out_for_ever(self) -> None:
        assert self.outliers.ejected(self.now + 32 * CONFIG.eject_s) == frozenset()


TestOutlierMachine = OutlierMachine.TestCase
TestOutlierMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_one_that_is_slower_than_every_patience_is_set_aside_all_the_same() -> None:
    outliers = Outliers(CONFIG)
    for step in range(20):
        now = step / 10
        outliers.note(0, 0.1, now)
        outliers.note(1, 0.12, now)
        if 2 not in outliers.ejected(now):
            outliers.note_at_least(2, 0.5, now)
    assert outliers.ejected(2.0) == {2}


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 0.29)), max_size=60))
def test_a_patience_that_is_no_longer_than_answers_take_says_nothing(waits: list[tuple[int, float]]) -> None:
    with_them, without = Outliers(CONFIG), Outliers(CONFIG)
    for step in range(60):
        now = step / 10
        for replica in range(3):
            for outliers in (with_them, without):
                outliers.note(replica, 0.1, now)
        if step < len(waits):
            with_them.note_at_least(*waits[step], now)
    for replica in range(3):
        assert with_them._history[replica].typical(6.0) == without._history[replica].typical(6.0)
    assert not with_them.ejected(6.0)


def test_a_replica_alone_is_not_judged_by_what_was_given_up() -> None:
    outliers = Outliers(CONFIG)
    for step in range(100):
        outliers.note_at_least(0, 60.0, step / 10)
    assert not outliers.ejected(10.0)
