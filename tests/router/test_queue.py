"""The queue's laws: order, bounds, and that whoever left is never handed out."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferd.router.queue import RequestQueue, Ticket
from inferd.router.stream import Stream
from inferd.types import GenerateRequest, TextPrompt

BOUND = 5


def ticket(number: int, priority: int = 0, expires_at: float = 1e9, deadline_s: float | None = None) -> Ticket:
    request = GenerateRequest(
        id=str(number), model="m", prompt=TextPrompt(text=""), priority=priority, deadline_s=deadline_s
    )
    return Ticket(request, Stream(request.id, lambda: None), number, expires_at)


class QueueMachine(RuleBasedStateMachine):
    """Against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue(BOUND)
        self.waiting: list[Ticket] = []
        self.out: list[Ticket] = []
        self.now = 0.0
        self.made = 0

    @rule(priority=st.integers(-2, 2), patience=st.floats(0.1, 10), deadline=st.none() | st.floats(0.1, 10))
    def arrive(self, priority: int, patience: float, deadline: float | None) -> None:
        assert self.queue.is_full == (len(self.waiting) >= BOUND)
        if self.queue.is_full:
            return
        new = ticket(self.made, priority, self.now + patience, self.now + deadline if deadline else None)
        self.made += 1
        self.queue.push(new)
        self.waiting.append(new)

    @rule(with_suspects=st.booleans())
    def take(self, with_suspects: bool) -> None:
        eligible = [t for t in self.waiting if with_suspects or not t.is_suspect]
        expected = min(eligible, key=lambda t: (t.request.priority, t.number), default=None)
        got = self.queue.pop(with_suspects=with_suspects)
        assert got is expected
        if got is not None:
            self.waiting.remove(got)
            self.out.append(got)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        back = data.draw(st.sampled_from(self.out))
        self.out.remove(back)
        back.kills += 1
        self.queue.push(back)
        self.waiting.append(back)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        leaving = data.draw(st.sampled_from(self.waiting))
        self.queue.remove(leaving)
        self.queue.remove(leaving)
        self.waiting.remove(leaving)

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        expected = [t for t in self.waiting if min(t.expires_at, t.deadline_at) <= self.now]
        expired = self.queue.pop_expired(self.now)
        assert sorted(expired) == sorted(expected)
        self.waiting = [t for t in self.waiting if t not in expected]
        expiry = self.queue.next_expiry
        assert expiry is None or expiry > self.now

    @invariant()
    def the_count_is_right(self) -> None:
        assert len(self.queue) == len(self.waiting)


TestQueueMachine = QueueMachine.TestCase


def test_clients_that_come_and_leave_do_not_make_a_standing_queue_grow() -> None:
    queue = RequestQueue(BOUND)
    for number in range(10_000):
        visitor = ticket(number)
        queue.push(visitor)
        queue.remove(visitor)
    assert len(queue._fresh) + len(queue._expiries) < 200


def test_clearing_gives_everybody_back_in_order() -> None:
    queue = RequestQueue(BOUND)
    for number, priority in enumerate((0, 1, -1)):
        queue.push(ticket(number, priority))
    assert [t.number for t in queue.clear()] == [2, 0, 1]
    assert len(queue) == 0
