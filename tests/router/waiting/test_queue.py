"""The queue's laws: order, bounds, no class starves, and a cancelled request is never handed out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.router.tickets import ticket

from inferd.config import QueueConfig
from inferd.errors import Overloaded
from inferd.router.ticket import Ticket
from inferd.router.waiting.queue import RequestQueue
from inferd.types import CLASSES, class_of

PLENTY = QueueConfig(aging_every=1000)
TENANTS = ("", "a", "b", "c")


def rank(waiting: Ticket) -> int:
    return CLASSES.index(class_of(waiting.request.priority))


class QueueMachine(RuleBasedStateMachine):
    """Compared with a plain list, which shows the waiting requests and the allowed results of each pop."""

    config = QueueConfig(max_requests=6, max_tokens=100, max_bytes=1000, max_share_per_tenant=0.5, aging_every=3)

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue(self.config)
        self.waiting: list[Ticket] = []
        self.out: list[Ticket] = []
        self.came_back: set[Ticket] = set()
        self.now = 0.0
        self.made = 0

    def taken(self, tenant: str | None = None) -> tuple[int, int, int]:
        requests = [t.request for t in self.waiting if tenant in (None, t.request.tenant)]
        return len(requests), sum(r.num_tokens for r in requests), sum(r.num_bytes for r in requests)

    @rule(
        priority=st.integers(-4, 4),
        tenant=st.sampled_from(TENANTS),
        tokens=st.integers(0, 60),
        num_bytes=st.integers(0, 600),
        weight=st.sampled_from((0.5, 1.0, 4.0)),
        patience=st.floats(0.1, 10),
        deadline=st.none() | st.floats(0.1, 10),
        first_byte=st.none() | st.floats(0.1, 10),
        make_room=st.booleans(),
    )
    def arrive(
        self,
        priority: int,
        tenant: str,
        tokens: int,
        num_bytes: int,
        weight: float,
        patience: float,
        deadline: float | None,
        first_byte: float | None,
        make_room: bool,
    ) -> None:
        new = ticket(
            self.made,
            priority,
            tenant=tenant,
            tokens=tokens,
            num_bytes=num_bytes,
            weight=weight,
            expires_at=self.now + patience,
            deadline_s=self.now + deadline if deadline else None,
            first_byte_s=self.now + first_byte if first_byte else None,
        )
        if make_room:
            for displaced in self.queue.make_room(new.request):
                assert rank(displaced) > rank(new)
                assert not displaced.is_waiting
                self.waiting.remove(displaced)
                self.came_back.discard(displaced)
        total, own = self.taken(), self.taken(tenant)
        bounds = (self.config.max_requests, self.config.max_tokens, self.config.max_bytes)
        more = (1, tokens, num_bytes)
        is_full = any(used + m > bound for used, m, bound in zip(total, more, bounds, strict=True))
        has_share = 0 < own[0] < total[0]
        exceeds = has_share and any(used + m > 0.5 * bound for used, m, bound in zip(own, more, bounds, strict=True))
        if is_full or exceeds:
            with pytest.raises(Overloaded) as refused:
                self.queue.check(new.request)
            assert refused.value.code == ("queue_full" if is_full else "tenant_queue_full")
            return
        self.queue.check(new.request)
        self.made += 1
        self.queue.push(new)
        self.waiting.append(new)

    @rule(with_suspects=st.booleans(), refused=st.sets(st.sampled_from(TENANTS), max_size=2))
    def take(self, with_suspects: bool, refused: set[str]) -> None:
        able = [t for t in self.waiting if t.request.tenant not in refused and (with_suspects or not t.worker_deaths)]
        got = self.queue.pop(accepts=lambda t: t.request.tenant not in refused, with_suspects=with_suspects)
        if got is None:
            assert not able
            return
        assert got in able
        assert not got.is_waiting
        same_class = [t for t in able if rank(t) == rank(got)]
        back = [t for t in same_class if t in self.came_back]
        if back:
            assert got is min(back, key=lambda t: t.number)
        else:
            assert got is min((t for t in same_class if t.request.tenant == got.request.tenant), key=lambda t: t.number)
        self.waiting.remove(got)
        self.came_back.discard(got)
        self.out.append(got)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), died=st.booleans(), patience=st.floats(0.1, 10))
    def come_back(self, data: st.DataObject, died: bool, patience: float) -> None:
        back = data.draw(st.sampled_from(self.out))
        self.out.remove(back)
        back.worker_deaths += died
        back.expires_at = self.now + patience
        self.queue.push(back)
        self.waiting.append(back)
        self.came_back.add(back)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        leaving = data.draw(st.sampled_from(self.waiting))
        self.queue.remove(leaving)
        self.queue.remove(leaving)
        self.waiting.remove(leaving)
        self.came_back.discard(leaving)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), tokens=st.integers(0, 100))
    def end(self, data: st.DataObject, tokens: int) -> None:
        ended = data.draw(st.sampled_from(self.out))
        self.out.remove(ended)
        self.queue.settle(ended, tokens)

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        expected = [t for t in self.waiting if min(t.expires_at, t.due_at) <= self.now]
        expired = self.queue.pop_expired(self.now)
        assert sorted(expired, key=id) == sorted(expected, key=id)
        self.waiting = [t for t in self.waiting if t not in expected]
        self.came_back.difference_update(expected)
        expiry = self.queue.next_expiry
        assert expiry is None or expiry > self.now

    @invariant()
    def the_books_are_right(self) -> None:
        assert (len(self.queue), self.queue.num_tokens, self.queue.num_bytes) == self.taken()
        assert list(self.queue.by_class) == [sum(rank(t) == i for t in self.waiting) for i in range(4)]
        counts = [sum(t.request.tenant == tenant for t in self.waiting) for tenant in TENANTS]
        place = self.queue.place_of(ticket(0, priority=0).request)
        assert place.ahead == len(self.waiting)
        assert place.ahead_of_class == sum(rank(t) <= 2 for t in self.waiting)
        assert place.ahead_of_tenant == max(counts)
        assert not self.waiting or counts[TENANTS.index(place.tenant)] == max(counts)
        fresh = [t.request for t in self.waiting if t not in self.came_back]
        assert len(fresh) <= self.config.max_requests
        assert sum(r.num_tokens for r in fresh) <= self.config.max_tokens
        assert sum(r.num_bytes for r in fresh) <= self.config.max_bytes

    def teardown(self) -> None:
        assert sorted(self.queue.clear(), key=id) == sorted(self.waiting, key=id)
        assert self.queue.pop() is None


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(-3, 3), max_size=30))
def test_a_better_class_goes_first_and_inside_it_the_earlier_request(priorities: list[int]) -> None:
    queue = RequestQueue(PLENTY)
    for number, priority in enumerate(priorities):
        queue.push(ticket(number, priority))
    order = []
    while (popped := queue.pop()) is not None:
        order.append((rank(popped), popped.number))
    assert order == sorted(order)
    assert len(order) == len(priorities)


@given(
    aging_every=st.integers(2, 6),
    arrivals=st.lists(st.sets(st.integers(-2, 1)), min_size=30, max_size=120),
    victim=st.integers(-1, 1),
)
def test_the_head_of_a_class_waits_for_a_bounded_number_of_dispatches(
    aging_every: int, arrivals: list[set[int]], victim: int
) -> None:
    """Whatever else arrives before each dispatch, in whatever rhythm."""
    queue = RequestQueue(QueueConfig(max_requests=10_000, aging_every=aging_every))
    head = ticket(0, victim)
    queue.push(head)
    number = 1
    for waited, arriving in enumerate(arrivals, start=1):
        for priority in sorted(arriving):
            queue.push(ticket(number, priority, tenant=str(number)))
            number += 1
        popped = queue.pop()
        if popped is head or (popped is not None and rank(popped) == rank(head)):
            return
        assert waited < 4 * aging_every


def test_a_flood_of_better_work_leaves_every_sixteenth_dispatch_to_batch() -> None:
    queue = RequestQueue(QueueConfig(max_requests=10_000, aging_every=16))
    for number in range(100):
        queue.push(ticket(number, 1))
    taken = []
    for number in range(100, 900):
        queue.push(ticket(number, -1))
        popped = queue.pop()
        assert popped is not None
        taken.append(popped.request.priority)
    assert taken.count(1) == 800 // 16
    assert [place for place, priority in enumerate(taken, start=1) if priority == 1] == list(range(16, 801, 16))


def test_batch_work_does_not_hold_up_interactive_work() -> None:
    """Five times as much batch work as can be done: an interactive request waits for two dispatches at most."""
    queue = RequestQueue(QueueConfig(max_requests=10_000))
    number = 0
    for _ in range(200):
        for _ in range(5):
            queue.push(ticket(number, 1))
            number += 1
        light = ticket(number, -1)
        queue.push(light)
        number += 1
        assert light in (queue.pop(), queue.pop())


def test_what_no_replica_can_run_does_not_hold_up_others() -> None:
    queue = RequestQueue(PLENTY)
    for number in range(200):
        queue.push(ticket(number, tenant=f"eu-{number % 50}", region="eu"))
    last = ticket(200, tenant="us", region="us")
    queue.push(last)
    asked = []

    def accepts(waiting: Ticket) -> bool:
        asked.append(waiting)
        return waiting.request.region == "us"

    assert queue.pop(accepts=accepts) is last
    assert queue.pop(accepts=accepts) is None
    assert [popped.number for popped in (queue.pop(), queue.pop()) if popped is not None] == [0, 1]
    assert len(asked) <= 2 * 201


def test_a_tenants_requests_are_searched_no_further_than_the_documented_bound() -> None:
    queue = RequestQueue(PLENTY)
    for number in range(100):
        queue.push(ticket(number))
    asked = []

    def accepts(waiting: Ticket) -> bool:
        asked.append(waiting.number)
        return waiting.number > 7

    assert queue.pop(accepts=accepts) is None
    assert asked == list(range(8))
    queue.remove_if(lambda waiting: waiting.number == 3)
    popped = queue.pop(accepts=accepts)
    assert popped is not None
    assert popped.number == 8


def test_all_that_meet_a_condition_can_be_taken_out_at_once() -> None:
    queue = RequestQueue(PLENTY)
    for number in range(40):
        queue.push(ticket(number, number % 3 - 1, tenant=str(number % 5)))
    odd = queue.remove_if(lambda waiting: waiting.number % 2 == 1)
    assert [taken.number for taken in odd] == list(range(1, 40, 2))
    assert len(queue) == 20


def test_an_urgent_request_takes_the_place_of_the_youngest_batch_work() -> None:
    queue = RequestQueue(QueueConfig(max_requests=4))
    waiting = [ticket(number, priority) for number, priority in enumerate((1, 1, 0, -2))]
    for each in waiting:
        queue.push(each)
    urgent = ticket(4, -1)
    assert queue.make_room(urgent.request) == [waiting[1]]
    queue.check(urgent.request)
    queue.push(urgent)
    assert queue.make_room(ticket(5, 1).request) == []
    with pytest.raises(Overloaded, match="4 requests wait already"):
        queue.check(ticket(5, 1).request)


def test_a_ticket_that_came_back_expires_by_its_new_patience_alone() -> None:
    queue = RequestQueue(PLENTY)
    again = ticket(0, expires_at=10)
    queue.push(again)
    assert queue.pop() is again
    again.expires_at = 20
    queue.push(again)
    assert queue.pop_expired(15) == []
    assert queue.pop_expired(20) == [again]


def test_clients_that_come_and_leave_do_not_make_a_standing_queue_grow() -> None:
    queue = RequestQueue(PLENTY)
    queue.push(ticket(0, tenant="stays"))
    for number in range(1, 10_000):
        visitor = ticket(number, tenant=("stays", f"t{number}")[number % 2])
        queue.push(visitor)
        queue.remove(visitor)
    line = queue._classes[2]
    assert len(queue._expiries) < 200
    assert len(line._heap) < 1000
    assert len(line._flows) < 500
    assert sum(len(flow.entries) for flow in line._flows.values()) < 200


def test_other_bounds_count_from_the_moment_they_are_set() -> None:
    queue = RequestQueue(QueueConfig(max_requests=0))
    with pytest.raises(Overloaded):
        queue.check(ticket(0).request)
    queue.configure(QueueConfig(max_requests=1))
    queue.check(ticket(0).request)


def test_clearing_returns_every_request_in_order() -> None:
    queue = RequestQueue(PLENTY)
    for number, priority in enumerate((0, 1, -1)):
        queue.push(ticket(number, priority))
    assert [t.number for t in queue.clear()] == [2, 0, 1]
    assert len(queue) == 0


def test_a_request_that_never_ran_earns_its_tenant_nothing() -> None:
    queue = RequestQueue(PLENTY)
    for number in range(20):
        queue.push(ticket(number, tenant="waits", tokens=10))
        queue.push(ticket(100 + number, tenant="leaves", tokens=10))
    for number in range(200, 220):
        expired = ticket(number, tenant="leaves", tokens=1000)
        queue.push(expired)
        queue.remove(expired)
        queue.settle(expired, 0)
    taken = [popped.request.tenant for popped in (queue.pop() for _ in range(20)) if popped is not None]
    assert taken.count("leaves") == 10
