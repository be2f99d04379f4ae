"""The breaker as a state machine: it shuts out what fails, probes it, and never flaps."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferd.config import BreakerConfig
from inferd.router.choosing.breaker import Breaker

CONFIG = BreakerConfig(failures=3, window_s=10, cooldown_s=5, probes=2, successes=2)


class BreakerMachine(RuleBasedStateMachine):
    """Requests are begun when the breaker allows them, and end in any way at any time, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(CONFIG)
        self.now = 100.0
        self.in_flight: list[tuple[float, str]] = []
        self.changes: list[float] = []
        self.failures: list[float] = []
        self.state = "closed"

    def seen(self) -> None:
        """Note a change, and that it is one of those that exist."""
        if self.breaker.state != self.state:
            assert (self.state, self.breaker.state) in {
                ("closed", "open"),
                ("open", "half_open"),
                ("half_open", "open"),
                ("half_open", "closed"),
            }
            self.state = self.breaker.state
            self.changes.append(self.now)

    @rule(seconds=st.sampled_from((0.1, 0.5, 1.0, 4.9, 5.0, 11.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.breaker.allows(self.now))
    @rule()
    def begin(self) -> None:
        if self.state != "closed":
            young = [at for at, state in self.in_flight if state != "closed" and self.now - at < CONFIG.cooldown_s]
            assert len(young) < CONFIG.probes
            assert self.now - self.failures[-1] >= CONFIG.cooldown_s
        self.breaker.begin(self.now)
        self.in_flight.append((self.now, self.state))
        self.now += 0.001

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), succeeds=st.booleans())
    def end(self, data: st.DataObject, succeeds: bool) -> None:
        ending = data.draw(st.sampled_from(self.in_flight))
        self.in_flight.remove(ending)
        begun_at, begun_in = ending
        before = self.breaker.state
        if succeeds:
            self.breaker.success(self.now, begun_at)
            assert self.breaker.state == before or before != "closed"
        else:
            self.breaker.failure(self.now, begun_at)
            if before == "closed" or begun_in != "closed":
                self.failures.append(self.now)
            if before != "closed" and begun_in != "closed":
                assert not self.breaker.allows(self.now)
                assert self.breaker.allows(self.now + CONFIG.cooldown_s)
        self.seen()

    @invariant()
    def it_changes_at_most_once_per_cooldown(self) -> None:
        gaps = [later - earlier for earlier, later in pairwise(self.changes)]
        assert all(gap >= CONFIG.cooldown_s for gap in gaps)

    @invariant()
    def it_never_stays_shut_without_a_failure(self) -> None:
        assert self.breaker.allows(self.now + CONFIG.cooldown_s)

    @invariant()
    def closed_means_that_everything_passes(self) -> None:
        assert self.state != "closed" or self.breaker.allows(self.now)


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def broken(now: float = 0.0, config: BreakerConfig = CONFIG) -> Breaker:
    breaker = Breaker(config)
    for _ in range(config.failures):
        breaker.begin(now)
        breaker.failure(now, now)
    return breaker


def state_of(breaker: Breaker) -> str:
    return breaker.state


def probe(breaker: Breaker, now: float, *, succeeds: bool) -> str:
    assert breaker.allows(now)
    breaker.begin(now)
    (breaker.success if succeeds else breaker.failure)(now, now)
    return breaker.state


def test_failures_within_the_window_open_it_at_once() -> None:
    breaker = Breaker(CONFIG)
    for now in (0.0, 6.0, 11.0):
        breaker.failure(now)
    assert state_of(breaker) == "closed"
    breaker.failure(15.0)
    assert state_of(breaker) == "open"
    assert not breaker.allows(15.0)
    assert not breaker.allows(19.9)
    assert breaker.reopens_at == 20.0
    assert breaker.allows(20.0)


def test_a_replica_that_stays_down_is_asked_once_per_cooldown_and_stays_open() -> None:
    breaker = broken()
    for now in (5.0, 10.0, 15.0):
        assert probe(breaker, now, succeeds=False) == "open"
        assert not breaker.allows(now + 4.9)


def test_probes_that_succeed_close_it_when_a_cooldown_has_passed() -> None:
    breaker = broken()
    assert probe(breaker, 5.0, succeeds=True) == "half_open"
    assert probe(breaker, 5.1, succeeds=True) == "half_open"
    assert probe(breaker, 10.1, succeeds=True) == "closed"
    assert breaker.reopens_at is None


def test_one_success_is_enough_where_one_is_asked_for() -> None:
    breaker = broken(config=BreakerConfig(failures=1, cooldown_s=5, successes=1))
    assert probe(breaker, 5.0, succeeds=True) == "closed"


def test_a_failed_probe_shuts_a_half_open_one_for_another_cooldown() -> None:
    breaker = broken()
    probe(breaker, 5.0, succeeds=True)
    probe(breaker, 5.1, succeeds=False)
    assert not breaker.allows(10.0)
    assert probe(breaker, 10.1, succeeds=False) == "open"


def test_successes_count_in_a_row() -> None:
    breaker = broken()
    probe(breaker, 5.0, succeeds=True)
    probe(breaker, 5.1, succeeds=False)
    assert probe(breaker, 10.2, succeeds=True) == "half_open"
    assert probe(breaker, 10.3, succeeds=True) == "closed"


def test_probes_are_limited_in_number() -> None:
    breaker = broken()
    for _ in range(CONFIG.probes):
        assert breaker.allows(5.0)
        breaker.begin(5.0)
    assert not breaker.allows(5.0)
    breaker.success(6.0, 5.0)
    assert breaker.allows(6.0)


def test_a_half_open_breaker_lets_no_more_than_its_probes_through() -> None:
    breaker = broken()
    assert probe(breaker, 5.0, succeeds=True) == "half_open"
    for _ in range(CONFIG.probes):
        assert breaker.allows(6.0)
        breaker.begin(6.0)
    assert state_of(breaker) == "half_open"
    assert not breaker.allows(6.0)


def test_a_probe_that_is_never_heard_of_does_not_shut_it_for_ever() -> None:
    breaker = broken()
    for _ in range(CONFIG.probes):
        breaker.begin(5.0)
    assert not breaker.allows(9.9)
    assert breaker.allows(10.0)


def test_answers_to_requests_from_before_it_opened_say_nothing() -> None:
    breaker = broken(now=1.0)
    breaker.begin(6.0)
    breaker.success(6.1, 0.5)
    breaker.success(6.1, 0.5)
    assert state_of(breaker) == "open"
    breaker.failure(6.1, 0.5)
    breaker.success(6.2, 6.0)
    assert state_of(breaker) == "half_open"


def test_flapping_every_tenth_of_a_second_changes_it_once_per_cooldown() -> None:
    breaker = Breaker(CONFIG)
    changes = []
    state = breaker.state
    for step in range(10_000):
        now = step / 10
        if breaker.allows(now):
            breaker.begin(now)
            (breaker.success if step % 7 < 3 else breaker.failure)(now, now)
        if breaker.state != state:
            state = breaker.state
            changes.append(now)
    assert len(changes) > 10
    assert all(later - earlier >= CONFIG.cooldown_s for earlier, later in pairwise(changes))


def test_switched_off_it_never_opens() -> None:
    assert broken(config=BreakerConfig(enabled=False, failures=1)).state == "closed"


def test_it_is_looked_at_again_when_a_probe_that_was_given_up_no_longer_keeps_others_out() -> None:
    breaker = broken()
    assert breaker.next_probe_at == breaker.reopens_at == 5.0
    breaker.begin(5.0)
    assert breaker.next_probe_at == 5.0  # there is room for one more
    breaker.begin(6.0)
    assert not breaker.allows(6.0)
    assert breaker.next_probe_at == 10.0
    assert breaker.allows(10.0)
    assert state_of(breaker) == "open"
