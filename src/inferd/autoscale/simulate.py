"""Replays arrivals against a controller of replicas, in simulated time. Pure: the same arguments give the same result.

A replica works at ``slots`` requests at a time, each for its own seconds, which the others do not change. Requests wait in one queue, in order of
arrival. A started replica serves after ``ready_s`` seconds. One that leaves takes no more requests and ends those it
has; a starting one leaves at once. This is the queue of a model in inferd, without refusals, priorities and failures.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from inferd.autoscale.decide import Decision, Past, Seen, Spec, decide
from inferd.autoscale.meter import Meter, Sample, pause_s


class Arrival(NamedTuple):
    """A request: when it comes, and the seconds that it takes a replica."""

    at: float
    seconds: float


class Machine(NamedTuple):
    """What serves: requests that a replica works at together, seconds until it is ready, and how many there are at
    first."""

    slots: int = 1
    ready_s: float = 2.0
    begin: int = 1
    limit: int = 64


class View(NamedTuple):
    """What a controller sees at one time. The counts are since the beginning."""

    now: float
    accepted: int
    ended: int
    waiting: int
    in_flight: int
    busy: float  # replicas with a request, each by the part of its slots that is taken
    ready: int
    starting: int
    oldest_wait_s: float
    idle_s: float
    slots: int
    ready_s: float
    limit: int
    work_s: float  # slot-seconds of work that were done


class Tick(NamedTuple):
    """A row of the timeline."""

    at: float
    desired: int
    ready: int
    waiting: int
    accepted: int


class Outcome(NamedTuple):
    """What happened. ``waits`` and ``responses`` are in order of arrival, in seconds."""

    waits: Sequence[float]
    responses: Sequence[float]
    arrivals: Sequence[float]
    ticks: Sequence[Tick]
    decisions: Sequence[tuple[float, int, str]]  # time, number, reason
    replica_s: float

    @property
    def changes(self) -> int:
        """How often the number was changed."""
        return len(self.decisions)


Controller = Callable[[View], tuple[int, str]]
"""The number of replicas from now on, those that start included, and the reason."""


class _Replica:
    __slots__ = ("in_flight", "is_leaving", "ready_at", "started_at", "stopped_at")

    def __init__(self, started_at: float, ready_at: float) -> None:
        self.started_at = started_at
        self.ready_at = ready_at
        self.in_flight = 0
        self.is_leaving = False
        self.stopped_at: float | None = None


class _World:
    """The queue and the replicas."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.replicas = [_Replica(0.0, 0.0) for _ in range(machine.begin)]
        self.gone: list[_Replica] = []
        self.queue: deque[int] = deque()
        self.ends: list[tuple[float, int, _Replica]] = []
        self.readies: list[float] = []
        self.arrivals: list[Arrival] = []
        self.begun: list[float] = []  # of each request, in order of arrival
        self.accepted = 0
        self.ended = 0
        self.last_end = 0.0
        self.done_s = 0.0

    def arrive(self, arrival: Arrival) -> None:
        self.arrivals.append(arrival)
        self.begun.append(math.nan)
        self.queue.append(self.accepted)
        self.accepted += 1
        self.dispatch(arrival.at)

    def dispatch(self, now: float) -> None:
        """Give waiting requests to the ready replicas with the least work."""
        while self.queue:
            able = [
                one
                for one in self.replicas
                if one.ready_at <= now and not one.is_leaving and one.in_flight < self.machine.slots
            ]
            if not able:
                return
            chosen = min(able, key=lambda one: one.in_flight)
            number = self.queue.popleft()
            chosen.in_flight += 1
            self.begun[number] = now
            heapq.heappush(self.ends, (now + self.arrivals[number].seconds, number, chosen))

    def end(self) -> None:
        """The next request ends."""
        at, number, replica = heapq.heappop(self.ends)
        replica.in_flight -= 1
        self.ended += 1
        self.last_end = at
        self.done_s += self.arrivals[number].seconds
        if replica.is_leaving and not replica.in_flight:
            self._stop(replica, at)
        self.dispatch(at)

    def _stop(self, replica: _Replica, now: float) -> None:
        replica.stopped_at = now
        self.replicas.remove(replica)
        self.gone.append(replica)

    def set_number(self, count: int, now: float) -> None:
        """Start replicas, or have some leave: first those that start, then those with the least work."""
        staying = [one for one in self.replicas if not one.is_leaving]
        for _ in range(count - len(staying)):
            ready_at = now + self.machine.ready_s
            self.replicas.append(_Replica(now, ready_at))
            heapq.heappush(self.readies, ready_at)
        staying.sort(key=lambda one: (one.ready_at <= now, one.in_flight))
        for one in staying[: max(0, len(staying) - count)]:
            one.is_leaving = True
            if not one.in_flight:
                self._stop(one, now)

    def view(self, now: float) -> View:
        """What a controller sees now."""
        staying = [one for one in self.replicas if not one.is_leaving]
        ready = [one for one in staying if one.ready_at <= now]
        in_flight = sum(one.in_flight for one in self.replicas)
        running_s = sum(now - self.begun[number] for _, number, _ in self.ends)
        return View(
            now=now,
            accepted=self.accepted,
            ended=self.ended,
            waiting=len(self.queue),
            in_flight=in_flight,
            busy=sum(one.in_flight for one in ready) / self.machine.slots,
            ready=len(ready),
            starting=len(staying) - len(ready),
            oldest_wait_s=now - self.arrivals[self.queue[0]].at if self.queue else 0.0,
            idle_s=0.0 if self.queue or in_flight else now - self.last_end,
            slots=self.machine.slots,
            ready_s=self.machine.ready_s,
            limit=self.machine.limit,
            work_s=self.done_s + running_s,
        )


def simulate(
    arrivals: Sequence[Arrival],
    controller: Controller,
    machine: Machine,
    *,
    after_s: float = 0.0,
    pause: Callable[[int], float] = pause_s,
) -> Outcome:
    """Replay arrivals, in order of time, until ``after_s`` seconds after all have ended. ``pause``: the seconds before
    each look of the controller but the first, by its number."""
    world = _World(machine)
    ticks: list[Tick] = []
    decisions: list[tuple[float, int, str]] = []
    wanted, until, next_arrival, now = machine.begin, 0.0, 0, 0.0
    for step in itertools.count():
        if step:
            now += pause(step)
        _run_until(world, arrivals, next_arrival, now)
        next_arrival = world.accepted
        world.dispatch(now)
        view = world.view(now)
        count, reason = controller(view)
        if count != view.ready + view.starting:
            world.set_number(count, now)
            world.dispatch(now)
        if count != wanted:
            wanted = count
            decisions.append((now, count, reason))
        ticks.append(Tick(now, count, view.ready, view.waiting, view.accepted))
        if next_arrival < len(arrivals) or world.queue or world.ends:
            until = now + after_s
        elif now >= until:
            break
    replica_s = sum(
        (now if one.stopped_at is None else one.stopped_at) - one.started_at for one in (*world.replicas, *world.gone)
    )
    waits = [begun - arrival.at for begun, arrival in zip(world.begun, world.arrivals, strict=True)]
    responses = [wait + arrival.seconds for wait, arrival in zip(waits, world.arrivals, strict=True)]
    return Outcome(waits, responses, [arrival.at for arrival in world.arrivals], ticks, decisions, replica_s)


def _run_until(world: _World, arrivals: Sequence[Arrival], index: int, now: float) -> None:
    """Everything that happens until a time, in its order: first ends, then new replicas, then arrivals."""
    while True:
        arrives = arrivals[index].at if index < len(arrivals) else math.inf
        ends = world.ends[0][0] if world.ends else math.inf
        ready = world.readies[0] if world.readies else math.inf
        if min(arrives, ends, ready) > now:
            return
        if ends <= min(arrives, ready):
            world.end()
        elif ready <= arrives:
            world.dispatch(heapq.heappop(world.readies))
        else:
            world.arrive(arrivals[index])
            index += 1


class Scaler:
    """inferd's controller, as the simulator calls it."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._meter = Meter()
        self._past = Past()

    def __call__(self, view: View) -> tuple[int, str]:
        decision = self.decided(view)
        return decision.desired, f"{decision.rule}: {decision.reason}"

    def decided(self, view: View) -> Decision:
        """The whole decision."""
        self._meter.add(
            Sample(view.now, view.accepted, view.ended, view.waiting, view.in_flight, view.busy, view.ready)
        )
        seen = Seen(
            at=view.now,
            ready=view.ready,
            starting=view.starting,
            waiting=view.waiting,
            in_flight=view.in_flight,
            oldest_wait_s=view.oldest_wait_s,
            idle_s=view.idle_s,
            ready_s=view.ready_s,
            limit=view.limit,
            limited_by="the machine",
        )
        decision = decide(self._spec, self._meter.measured(seen), self._past, view.now)
        self._past = decision.past
        return decision


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which this part of the values lies, by the nearest rank; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(part * len(ordered)) - 1))]
