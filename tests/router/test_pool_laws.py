"""Every request ends exactly once, under any order of arrivals, cancellations, answers, deaths, refusals, retries,
hedges, continuations, loads, unloads, replacements and other configurations.

Pool, fleet and local replicas are real; the supervisors below them and the remote servers are fakes that do
what the machine says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.router.tickets import ticket_of
from tests.router.virtual_loop import VirtualLoop

from inferd import clock
from inferd.config import BreakerConfig, ModelConfig, QueueConfig, RemoteConfig, RetryConfig
from inferd.errors import InferdError, InvalidRequest, Overloaded, Unavailable, UpstreamFailed
from inferd.events import Event, RequestEnded
from inferd.router.merging import MergedOutput
from inferd.router.pool import MAX_WORKER_DEATHS, Pool
from inferd.router.replicas import replica as replica_module
from inferd.router.replicas.machines import Machines
from inferd.router.replicas.member import Member
from inferd.router.replicas.replica import LocalReplica, ReplicaOwner
from inferd.router.stream import Stream, open_stream
from inferd.router.ticket import Ticket
from inferd.types import (
    Continuation,
    Delta,
    End,
    Failure,
    GenerateRequest,
    ModelInfo,
    Output,
    PromptReport,
    Relay,
    Relayed,
    RelayHead,
    SamplingParams,
    TextPrompt,
    class_of,
)
from inferd.worker.messages import Cancel, Submit
from inferd.worker.supervisor import Owner, Patience

INFO = ModelInfo(
    name="m",
    source="",
    architecture="",
    dtype="",
    max_model_len=1,
    vocab_size=1,
    num_parameters=0,
    num_blocks=1,
    block_size=1,
    max_num_seqs=1,
)
CONFIG = ModelConfig(
    source="x",
    replicas=2,
    resume_streams=True,
    drain_s=0.0,
    queue=QueueConfig(max_requests=4, timeout_s=1000),
    retry=RetryConfig(max_attempts=3, budget=1.0),
    breaker=BreakerConfig(failures=2, cooldown_s=1e-3),
    remotes=(RemoteConfig(url="http://there/v1"),),
)
REQUESTS = st.tuples(
    st.integers(-1, 1),  # priority
    st.integers(1, 2),  # n
    st.sampled_from([False] * 4 + [True]),  # the last one's id again
    st.booleans(),  # relayed
    st.sampled_from([True] * 4 + [False]),  # idempotent
    st.booleans(),  # streamed
)


class FakeSupervisor:
    """A worker that the machine moves by hand. It holds requests and knows which it was told to cancel."""

    made: list[FakeSupervisor] = []

    def __init__(
        self, model: str, replica: int, config: ModelConfig, owner: Owner, emit: object, *_: object, **__: Any
    ) -> None:
        self.owner = owner
        self.state = "starting"
        self.was_ready = False
        self.is_writable = True
        self.is_unplaced = False
        self.pid = None
        self.reason = ""
        self.rss_bytes = 100
        self.holds: dict[str, int] = {}
        self.resumed: dict[str, Continuation] = {}
        self.cancelled: set[str] = set()
        self.made.append(self)

    def send(self, message: object) -> None:
        if self.state != "ready":
            return
        if isinstance(message, Submit):
            assert message.request.id not in self.holds, "submitted twice to one worker"
            self.holds[message.request.id] = 0
            self.cancelled.discard(message.request.id)
            if isinstance(message.request, GenerateRequest) and message.request.resumes is not None:
                self.resumed[message.request.id] = message.request.resumes
        elif isinstance(message, Cancel):
            self.cancelled.add(message.request_id)

    def start(self) -> None: ...
    def measure_rss(self) -> int:
        return self.rss_bytes

    async def stop(self) -> None:
        was, self.state = self.state, "stopped"
        self.holds.clear()
        if was == "ready":
            self.owner.worker_lost("stopped", is_machine_lost=False)


class FakeRemote:
    """A remote server that the machine moves by hand, in the shape of a RemoteReplica."""

    made: list[FakeRemote] = []
    kind = "remote"
    info = failure = None
    name, region, reason, weight, is_fallback = "there", "", "", 1.0, False

    def __init__(self, model: str, index: int, config: RemoteConfig, owner: ReplicaOwner, emit: object) -> None:
        self.owner = owner
        self.index = index
        self.state = "starting"
        self.is_ready = self.was_ready = False
        self.holds: dict[str, Ticket] = {}
        self.begun: set[str] = set()
        self.cancelled: set[str] = set()
        self.made.append(self)

    @property
    def outstanding(self) -> int:
        return len(self.holds)

    num_in_flight = load = outstanding

    @property
    def num_but_batch_work(self) -> int:
        return sum(ticket.request.priority < 1 for ticket in self.holds.values())

    @property
    def can_take(self) -> bool:
        return self.is_ready and len(self.holds) < 2

    def runs(self, ticket: Ticket) -> bool:
        return ticket.relay is not None

    def accepts(self, ticket: Ticket) -> bool:
        return self.runs(ticket)

    def start(self) -> None: ...
    def probe(self) -> None: ...
    def pause(self, request_id: str) -> None: ...
    def resume(self, request_id: str) -> None: ...
    def prompt_computed(self, request_id: str) -> None: ...

    def reached(self) -> None:
        self.is_ready = self.was_ready = True
        self.state = "ready"
        self.owner.replica_ready(self)  # type: ignore[arg-type]

    def lost(self) -> None:
        self.is_ready = False
        self.state = "unreachable"
        self.owner.replica_unreachable(self)  # type: ignore[arg-type]

    async def stop(self) -> None:
        self.state, self.is_ready = "stopped", False

    def dispatch(self, ticket: Ticket) -> None:
        assert self.can_take
        assert ticket.request.id not in self.holds, "submitted twice to one server"
        assert id(self) not in map(id, ticket.failed_replicas), "tried again where it failed"
        self.holds[ticket.request.id] = ticket
        self.begun.discard(ticket.request.id)
        self.cancelled.discard(ticket.request.id)

    def cancel(self, request_id: str) -> None:
        if request_id in self.holds:
            self.cancelled.add(request_id)

    def ticket(self, request_id: str) -> Ticket | None:
        return self.holds.get(request_id)

    def release(self, ticket: Ticket) -> None:
        del self.holds[ticket.request.id]

    def release_all(self) -> list[Ticket]:
        tickets = list(self.holds.values())
        self.holds.clear()
        return tickets

    def say(self, request_id: str, what: str) -> None:
        ticket = self.holds.get(request_id)
        if ticket is None:
            return  # a timer was faster
        is_first = request_id not in self.begun
        if request_id in self.cancelled:
            self.owner.replica_relayed(self, ticket, Relayed(request_id, end=End("cancelled")))  # type: ignore[arg-type]
        elif what == "refuse" and is_first:
            error = UpstreamFailed("It failed.")
            self.owner.replica_refused(self, ticket, error, counts=True, retry=True)  # type: ignore[arg-type]
        else:
            self.begun.add(request_id)
            end = {"data": None, "end": End("done"), "refuse": End("failed", failure=Failure("upstream_failed", ""))}[
                what
            ]
            head = RelayHead(200, b"text/plain") if is_first else None
            self.owner.replica_relayed(self, ticket, Relayed(request_id, head, b"x", end))  # type: ignore[arg-type]


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.ended: list[RequestEnded] = []
        self.streams: dict[str, Stream] = {}
        self.changes: list[asyncio.Task[Any]] = []
        self.num_made = 0
        self.is_aborted = False
        FakeSupervisor.made, FakeRemote.made = [], []
        self.patches = contextlib.ExitStack()
        self.patches.enter_context(mock.patch.object(clock, "now", self.runner.get_loop().time))
        self.patches.enter_context(mock.patch.object(replica_module, "Supervisor", FakeSupervisor))

        def make() -> Pool:
            pool = Pool(
                "m",
                CONFIG,
                self._emit,
                machines=Machines(()),
                patience=Patience(),
                demand=self._demanded,
                may_surge=lambda pool, member: True,
                on_idle=lambda pool: None,
                make_remote=FakeRemote,  # type: ignore[arg-type]
            )
            pool.placement._random.seed(0)
            pool.start()
            return pool

        self.pool = self._do(make)

    def _emit(self, event: Event) -> None:
        if isinstance(event, RequestEnded):
            self.ended.append(event)

    def _demanded(self, pool: Pool) -> None:
        if not any(not task.done() and task.get_name() == "demand" for task in self.changes):
            self._begin(pool.fleet.load(), "demand")

    def _begin(self, change: Coroutine[Any, Any, Any], name: str = "change") -> None:
        """Something that changes the replicas and takes its time."""

        async def run() -> None:
            with contextlib.suppress(InferdError):
                await change

        self.changes.append(asyncio.get_running_loop().create_task(run(), name=name))

    def _do(self, action: Any, *arguments: Any) -> Any:
        """Run something inside the event loop, and let what it scheduled happen."""

        async def run() -> Any:
            result = action(*arguments)
            for _ in range(5):
                await asyncio.sleep(0)
            return result

        return self.runner.run(run())

    # -- requests ---------------------------------------------------------------------------

    @initialize(are_ready=st.sampled_from([True, True, False]), hedge_after_s=st.sampled_from([None, None, 1e-6]))
    def come_up(self, are_ready: bool, hedge_after_s: float | None) -> None:
        retry = msgspec.structs.replace(CONFIG.retry, hedge_after_s=hedge_after_s)
        self.config = self.pool.config = msgspec.structs.replace(CONFIG, retry=retry)
        if are_ready:
            for supervisor in FakeSupervisor.made:
                self._make_ready(supervisor)
            for remote in FakeRemote.made:
                self._do(remote.reached)

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def submit(self, requests: list[tuple[int, int, bool, bool, bool, bool]]) -> None:
        for request in requests:
            self._submit(*request)

    def _submit(
        self, priority: int, n: int, again: bool, is_relayed: bool, idempotent: bool, is_streamed: bool
    ) -> None:
        name = f"r{self.num_made - 1 if again and self.num_made else self.num_made}"
        request = GenerateRequest(
            id=name,
            model="m",
            prompt=TextPrompt(text=""),
            sampling=SamplingParams(n=n),
            num_bytes=4096 * (self.num_made % 3),
            priority=priority,
            idempotent=idempotent,
            stream=is_streamed,
        )
        relay = Relay(path="/completions", body=b"{}") if is_relayed else None
        is_live = name in self.streams and self.streams[name].request.end is None
        try:
            stream = self._do(open_stream, self.pool, request, relay)
        except InvalidRequest:
            assert is_live or name in self.pool._retries.abandoned
        except Overloaded:
            assert len(self.pool._queue) >= 2
        except Unavailable:
            pass
        else:
            assert not is_live
            assert not self.is_aborted
            if name in self.streams:  # an old name that is free again counts as another request
                self.ended = [event for event in self.ended if event.request_id != name]
            self.num_made += name not in self.streams
            self.streams[name] = stream

    @rule(data=st.data(), leaves=st.booleans())
    def read(self, data: st.DataObject, leaves: bool) -> None:
        """A reader leaves; or time passes, and hedges and second tries are due."""
        if leaves and self.streams:
            self._do(self.streams[data.draw(st.sampled_from(sorted(self.streams)))].close)
        else:
            self.runner.run(asyncio.sleep(0.01))

    # -- workers ----------------------------------------------------------------------------

    @rule(data=st.data(), what=st.sampled_from(["answer"] * 6 + ["ready"] * 2 + ["die", "fail"]))
    def work(self, data: st.DataObject, what: str) -> None:
        state = {"answer": "ready", "ready": "starting", "die": "ready", "fail": "starting"}[what]
        there = [made for made in FakeSupervisor.made if made.state == state and (what != "answer" or made.holds)]
        if not there:
            return
        supervisor = data.draw(st.sampled_from(there))
        if what == "answer":
            self._answer(supervisor, data)
        elif what == "ready":
            self._make_ready(supervisor)
        elif what == "die":
            supervisor.state = "starting"
            supervisor.holds.clear()
            supervisor.cancelled.clear()
            with_machine = data.draw(st.booleans())
            self._do(lambda: supervisor.owner.worker_lost("killed", is_machine_lost=with_machine))
        elif not supervisor.was_ready:
            supervisor.state = "failed"
            self._do(supervisor.owner.worker_failed, Failure("model_load", "no such folder"))

    def _make_ready(self, supervisor: FakeSupervisor) -> None:
        supervisor.state, supervisor.was_ready = "ready", True
        self._do(supervisor.owner.worker_ready, INFO)

    def _answer(self, supervisor: FakeSupervisor, data: st.DataObject) -> None:
        """Some outputs and some ends; also some of unknown requests."""
        outputs = []
        for name in sorted(supervisor.holds):
            kind = data.draw(st.sampled_from(["nothing", "token", "token", "end", "fail"]))
            if kind == "token":
                prompt = PromptReport(1, seed=7) if supervisor.holds[name] == 0 else None
                outputs.append(Output(name, (Delta(0, "x", (1,)),), prompt))
                supervisor.holds[name] += 1
            elif kind != "nothing":
                del supervisor.holds[name]
                end = End("done") if kind == "end" else End("failed", failure=Failure("internal", "It broke."))
                outputs.append(Output(name, (), None, End("cancelled") if name in supervisor.cancelled else end))
        if data.draw(st.booleans()):
            outputs.append(Output("nobody's", (), None, End("done")))
        self._do(supervisor.owner.worker_outputs, outputs, None)

    # -- remote servers ---------------------------------------------------------------------

    @rule(data=st.data(), what=st.sampled_from(["relay"] * 6 + ["come"] * 2 + ["go"]))
    def serve(self, data: st.DataObject, what: str) -> None:
        there = [made for made in FakeRemote.made if made.state != "stopped" and (what != "relay" or made.holds)]
        if not there:
            return
        remote = data.draw(st.sampled_from(there))
        if what == "go":
            self._do(remote.lost)
        elif what == "come":
            self._do(remote.reached)
        else:
            for name in sorted(remote.holds):
                said = data.draw(st.sampled_from(["nothing", "data", "end", "refuse"]))
                if said != "nothing" and name in remote.holds:
                    self._do(remote.say, name, said)

    # -- changes ----------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(["nothing"] * 4 + ["load", "unload", "replace", "configure", "abort"]),
        replicas=st.integers(1, 3),
        dtype=st.sampled_from(["auto", "float32"]),
        num_remotes=st.integers(0, 2),
        is_over=st.sampled_from([False] * 9 + [True]),
    )
    def change(self, what: str, replicas: int, dtype: str, num_remotes: int, is_over: bool) -> None:
        fleet = self.pool.fleet
        if what == "unload":
            self._do(lambda: self._begin(fleet.unload("idle", 0.0, is_idle=lambda: self.pool.is_idle)))
        elif what == "load":
            self._do(lambda: self._begin(fleet.load()))
        elif what == "replace":
            self._do(lambda: self._begin(fleet.replace_all()))
        elif what == "configure":
            remotes = tuple(RemoteConfig(url=f"http://{number}/v1") for number in range(num_remotes))
            config = msgspec.structs.replace(self.config, replicas=replicas, dtype=dtype, remotes=remotes)
            self._do(lambda: self._begin(self.pool.configure(config)))
        elif what == "abort" and is_over and not self.is_aborted:
            self.is_aborted = True
            self._do(self.pool.abort)

    # -- what holds always ------------------------------------------------------------------

    @property
    def members(self) -> list[Member]:
        return list(self.pool.fleet.members)

    @invariant()
    def nobody_is_lost_and_nobody_ends_twice(self) -> None:
        ended = [event.request_id for event in self.ended]
        assert len(ended) == len(set(ended))
        over = {name for name, stream in self.streams.items() if (stream.request.end is not None)}
        assert over == set(ended)
        pool = self.pool
        for name in over:
            end = self.streams[name].request.end
            assert end is not None
            met, began = end.routing, end.timings.dispatched
            assert met is not None
            assert (met.attempts > 0) == (began is not None)
            assert min(met.load_s, met.restart_s, met.lost_s) >= 0.0
            if began is not None:
                assert met.load_s + met.restart_s <= began + 1e-6
        live = set(self.streams) - over
        waiting = {ticket.request.id for ticket in pool._live.tickets.values() if ticket.is_waiting}
        running = {ticket.request.id for ticket in pool._live.tickets.values() if ticket.runner is not None}
        backing_off = set(pool._retries.backing_off)
        assert live == set(pool._live.tickets) == waiting | running | backing_off
        assert len(live) == len(waiting) + len(running) + len(backing_off), "in two places at once"
        assert len(pool._queue) == len(waiting)
        assert pool.idle.is_set() == (not live)

    @invariant()
    def replicas_keep_within_their_capacity_and_books(self) -> None:
        for member in self.members:
            replica = member.replica
            if isinstance(replica, LocalReplica):
                held = [t.request for t in self.pool._live.tickets.values() if replica.ticket(t.request.id) is not None]
                by_class = Counter(class_of(request.priority) for request in held)
                assert all(count <= replica.capacity for count in by_class.values())
                assert replica.num_in_flight <= 4 * max(replica.capacity, 0)
                assert replica.is_ready or not replica.num_in_flight
                # Also of attempts that lost a race: the worker has them until it tells their end.
                assert replica._prompt_work._tokens.keys() <= replica._in_flight.keys()
                assert replica.load >= replica.outstanding
                assert replica.num_in_flight or replica.load == 0
                held_all = [ticket.request for ticket in replica._in_flight.values()]
                assert replica.num_but_batch_work == sum(request.priority < 1 for request in held_all)
            assert (replica.outstanding == 0) == (replica.num_in_flight == 0)

    @invariant()
    def batch_work_is_no_part_of_the_demand(self) -> None:
        demand, tickets = self.pool.demand, self.pool._live.tickets.values()
        others = [ticket for ticket in tickets if ticket.request.priority < 1]
        assert demand.deferred == len(tickets) - len(others)
        assert demand.accepted - demand.ended == len(others)
        assert demand.waiting >= sum(ticket.is_waiting for ticket in others)
        assert demand.waiting + demand.in_flight >= len(others)
        if not others and not self.pool._retries.abandoned:
            assert (demand.waiting, demand.in_flight) == (0, 0)

    @invariant()
    def who_is_in_flight_is_where_it_says(self) -> None:
        for ticket in self.pool._live.tickets.values():
            for replica in (ticket.runner, ticket.hedge_replica):
                if replica is not None:
                    assert replica.ticket(ticket.request.id) is ticket

    @invariant()
    def who_lost_a_race_is_forgotten_when_the_replica_is_done(self) -> None:
        working = {
            name
            for member in self.members
            for name in self.pool._retries.abandoned
            if member.replica.ticket(name) is not None
        }
        assert self.pool._retries.abandoned == working

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        if self.pool._dispatcher.suspect is None and not self.is_aborted:
            able = [member for member in self.members if member.can_take and member.kind == "local"]
            waiting = [
                t
                for t in self.pool._live.tickets.values()
                if t.is_waiting and t.request.id not in self.pool._retries.abandoned
            ]
            assert not [t for t in waiting for member in able if member.replica.accepts(t)]

    @invariant()
    def poison_is_given_up(self) -> None:
        for event in self.ended:
            assert event.outcome in ("done", "cancelled", "failed", "refused")
        for ticket in self.pool._live.tickets.values():
            assert ticket.worker_deaths < MAX_WORKER_DEATHS

    @invariant()
    def what_is_sent_whole_is_shown_to_nobody_before_its_end(self) -> None:
        for stream in self.streams.values():
            if ticket_of(stream).is_whole and stream.request.end is None:
                for waiting in stream._waiting:
                    output = waiting.output() if isinstance(waiting, MergedOutput) else waiting
                    assert not isinstance(output, Output) or not output.deltas

    @invariant()
    def who_goes_on_knows_everything_that_was_said(self) -> None:
        for supervisor in FakeSupervisor.made:
            for name, so_far in supervisor.resumed.items():
                assert so_far.token_ids
                assert so_far.seed == 7
                assert set(so_far.token_ids) == {1}, name

    def teardown(self) -> None:
        """At the end everything ends, each stream with exactly one last item."""

        async def finish() -> None:
            await self.pool.stop()
            await asyncio.gather(*self.changes)
            for stream in self.streams.values():
                with contextlib.suppress(StopAsyncIteration):
                    items = [item async for item in stream]
                    assert [item.end is not None for item in items].count(True) == 1
                    assert items[-1].end is not None

        try:
            self.runner.run(finish())
            self.nobody_is_lost_and_nobody_ends_twice()
            assert all((stream.request.end is not None) for stream in self.streams.values())
        finally:
            self.patches.close()
            self.runner.close()


PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)  # explaining takes minutes here
PoolMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, phases=PHASES, report_multiple_bugs=False
)
TestPoolMachine = PoolMachine.TestCase


@contextlib.contextmanager
def ready_pool() -> Iterator[PoolMachine]:
    """A pool whose two workers and remote server are ready, moved by hand."""
    machine = PoolMachine()
    try:
        machine.come_up(True, None)
        yield machine
    finally:
        machine.teardown()


def test_the_end_of_all_requests_is_told_to_the_workers_that_hold_them() -> None:
    with ready_pool() as machine:
        for _ in range(3):
            machine._submit(0, 1, False, False, True, False)
        machine._do(machine.pool.cancel_all)
        assert sum(len(worker.holds) for worker in FakeSupervisor.made) > 0
        assert all(worker.cancelled == set(worker.holds) for worker in FakeSupervisor.made)


def test_a_worker_that_dies_without_a_request_counts_no_failure() -> None:
    with ready_pool() as machine:
        worker = FakeSupervisor.made[0]

        def die() -> None:
            worker.state = "starting"
            worker.holds.clear()
            worker.owner.worker_lost("killed", is_machine_lost=False)

        for _ in range(2 * CONFIG.breaker.failures):
            machine._do(die)
            machine._make_ready(worker)
        assert {member.breaker_state for member in machine.members} == {"closed"}
        for _ in range(CONFIG.breaker.failures):
            while not worker.holds:
                machine._submit(0, 1, False, False, False, False)
            machine._do(die)
            machine._make_ready(worker)
        assert sorted(member.breaker_state for member in machine.members) == ["closed", "closed", "open"]


def test_requests_of_a_worker_that_died_run_again_one_after_the_other_beside_others() -> None:
    with ready_pool() as machine:
        while not (full := [worker for worker in FakeSupervisor.made if len(worker.holds) == 2]):
            machine._submit(0, 1, False, False, True, False)
        (died,) = full
        suspects = set(died.holds)
        died.state = "starting"
        died.holds.clear()
        machine._do(lambda: died.owner.worker_lost("killed", is_machine_lost=False))
        for num_left in (2, 1, 0):
            machine._submit(0, 1, False, False, True, False)
            held = [name for worker in FakeSupervisor.made for name in worker.holds]
            assert len(suspects.intersection(held)) == min(num_left, 1) < len(held)
            suspects -= set(held)
            end_all(machine)


def test_requests_that_a_worker_does_not_compute_yet_wait() -> None:
    with ready_pool() as machine:
        for _ in range(5):
            machine._submit(0, 1, False, False, True, False)
        held = [len(worker.holds) for worker in FakeSupervisor.made]
        demand = machine.pool.demand
        assert max(held) > INFO.max_num_seqs
        assert demand.in_flight == sum(min(count, INFO.max_num_seqs) for count in held)
        assert demand.in_flight + demand.waiting == 5
        assert demand.busy == sum(count > 0 for count in held)


def test_batch_work_is_no_load() -> None:
    with ready_pool() as machine:
        for _ in range(4):
            machine._submit(1, 1, False, False, True, False)
        demand = machine.pool.demand
        assert (demand.accepted, demand.waiting, demand.in_flight, demand.deferred) == (0, 0, 0, 4)
        assert demand.idle_s == 0.0
        machine._submit(0, 1, False, False, True, False)
        demand = machine.pool.demand
        assert (demand.accepted, demand.waiting + demand.in_flight, demand.deferred) == (1, 1, 4)
        end_all(machine)
        demand = machine.pool.demand
        assert (demand.accepted - demand.ended, demand.deferred) == (0, 0)


def end_all(machine: PoolMachine) -> None:
    """Every worker ends every request that it holds: those it was told to cancel as cancelled."""
    for worker in FakeSupervisor.made:
        ends = [(name, End("cancelled" if name in worker.cancelled else "done")) for name in sorted(worker.holds)]
        worker.holds.clear()
        machine._do(worker.owner.worker_outputs, [Output(name, (), None, end) for name, end in ends], None)


def test_a_replica_whose_breaker_closes_gets_its_share_slowly_again() -> None:
    with ready_pool() as machine:
        health, worker = machine.pool.fleet.health, FakeSupervisor.made[0]
        since = dict(health.ready_since)
        for _ in range(CONFIG.breaker.failures):
            while not worker.holds:
                machine._submit(0, 1, False, False, False, False)
            worker.state = "starting"
            worker.holds.clear()
            machine._do(lambda: worker.owner.worker_lost("killed", is_machine_lost=False))
            machine._make_ready(worker)
        (broken,) = [member for member in machine.members if member.breaker_state == "open"]
        at_return = health.ready_since[broken.index]
        for _ in range(20):
            machine.runner.run(asyncio.sleep(0.01))
            machine._submit(0, 1, False, False, True, False)
            machine._submit(0, 1, False, False, True, False)
            end_all(machine)
        assert broken.breaker_state == "closed"
        assert health.ready_since[broken.index] > at_return
        assert {index: at for index, at in since.items() if index != broken.index}.items() <= health.ready_since.items()


@pytest.mark.interpreted("replaces a method")
def test_a_request_that_its_client_gives_up_says_how_slow_its_worker_is_at_least() -> None:
    with ready_pool() as machine:
        machine._submit(0, 1, False, False, True, False)
        (name,) = machine.streams
        machine.runner.run(asyncio.sleep(0.5))
        with mock.patch.object(machine.pool.fleet.health, "waited") as waited:
            machine._do(machine.streams[name].close)
            end_all(machine)
        ((member, seconds, _),) = [call.args for call in waited.call_args_list]
        assert member.kind == "local"
        assert 0.5 <= seconds < 1.0


def test_a_model_that_was_never_ready_has_no_threads_and_no_cores() -> None:
    machine = PoolMachine()
    try:
        assert (machine.pool.demand.num_threads, machine.pool.demand.num_cores) == (0, 0)
        for worker in FakeSupervisor.made:
            worker.state, worker.was_ready = "ready", True
            machine._do(worker.owner.worker_ready, msgspec.structs.replace(INFO, num_threads=3, cores=(0, 1)))
        assert (machine.pool.demand.num_threads, machine.pool.demand.num_cores) == (3, 2)
    finally:
        machine.teardown()
