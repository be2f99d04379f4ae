"""Every request ends exactly once, under any order of arrivals, cancellations, answers and deaths.

The pool and its replicas are real; the supervisors below them are a fake that does what the machine says.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferd.config import ModelConfig, QueueConfig
from inferd.errors import InvalidRequest, Overloaded, Unavailable
from inferd.events import Event, RequestEnded
from inferd.router import replica as replica_module
from inferd.router.pool import MAX_KILLS, Pool
from inferd.router.stream import Stream
from inferd.types import Delta, End, Failure, GenerateRequest, ModelInfo, Output, SamplingParams, TextPrompt
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


class FakeSupervisor:
    """A worker that the machine moves by hand. It holds requests and knows which it was told to cancel."""

    def __init__(self, model: str, replica: int, config: ModelConfig, owner: Owner, emit: object, **_: Any) -> None:
        self.owner = owner
        self.state = "starting"
        self.was_ready = False
        self.is_writable = True
        self.pid = None
        self.holds: dict[str, int] = {}
        self.cancelled: set[str] = set()

    def send(self, message: object) -> None:
        if self.state != "ready":
            return
        if isinstance(message, Submit):
            assert message.request.id not in self.holds, "submitted twice to one worker"
            self.holds[message.request.id] = 0
        elif isinstance(message, Cancel):
            self.cancelled.add(message.request_id)

    def start(self) -> None: ...
    async def stop(self) -> None: ...


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.ended: list[RequestEnded] = []
        self.streams: dict[str, Stream] = {}
        self.runs: dict[str, int] = {}
        self.num_made = 0
        self.is_aborted = False

        def make() -> Pool:
            config = ModelConfig(source="x", replicas=2, queue=QueueConfig(max_requests=4, timeout_s=1000))
            with mock.patch.object(replica_module, "Supervisor", FakeSupervisor):
                return Pool("m", config, self._emit, command=(), patience=Patience())

        self.pool = self._do(make)
        self.supervisors: list[FakeSupervisor] = [r._supervisor for r in self.pool.replicas]

    def _emit(self, event: Event) -> None:
        if isinstance(event, RequestEnded):
            self.ended.append(event)

    def _do(self, action: Any, *arguments: Any) -> Any:
        """Run something inside the event loop, and let what it scheduled happen."""

        async def run() -> Any:
            result = action(*arguments)
            await asyncio.sleep(0)
            return result

        return self.runner.run(run())

    @rule(priority=st.integers(-1, 1), n=st.integers(1, 2), again=st.booleans())
    def submit(self, priority: int, n: int, again: bool) -> None:
        name = f"r{self.num_made - 1 if again and self.num_made else self.num_made}"
        request = GenerateRequest(
            id=name, model="m", prompt=TextPrompt(text=""), sampling=SamplingParams(n=n), priority=priority
        )
        is_live = name in self.streams and not self.streams[name].is_over
        try:
            stream = self._do(self.pool.submit, request)
        except InvalidRequest:
            assert is_live
        except Overloaded:
            assert self.pool.status.waiting >= 4
        except Unavailable:
            assert self.is_aborted or self.pool.status.state == "failed"
        else:
            assert not is_live
            if name in self.streams:  # an old name that is free again counts as another request
                self.ended = [event for event in self.ended if event.request_id != name]
            self.num_made += name not in self.streams
            self.streams[name] = stream

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self._do(self.streams[data.draw(st.sampled_from(sorted(self.streams)))].close)

    @rule(which=st.integers(0, 1))
    def become_ready(self, which: int) -> None:
        supervisor = self.supervisors[which]
        if supervisor.state not in ("ready", "failed"):
            supervisor.state, supervisor.was_ready = "ready", True
            self._do(supervisor.owner.worker_ready, INFO)

    @rule(which=st.integers(0, 1))
    def die(self, which: int) -> None:
        supervisor = self.supervisors[which]
        if supervisor.state == "ready":
            supervisor.state = "starting"
            supervisor.holds.clear()
            supervisor.cancelled.clear()
            self._do(supervisor.owner.worker_lost, "killed")

    @rule(which=st.integers(0, 1))
    def fail_to_load(self, which: int) -> None:
        supervisor = self.supervisors[which]
        if not supervisor.was_ready and supervisor.state == "starting":
            supervisor.state = "failed"
            self._do(supervisor.owner.worker_failed, Failure("model_load", "no such folder"))

    @rule(which=st.integers(0, 1), data=st.data())
    def answer(self, which: int, data: st.DataObject) -> None:
        """Some outputs and some ends; also some that nobody asked for."""
        supervisor = self.supervisors[which]
        if supervisor.state != "ready":
            return
        outputs = []
        for name in sorted(supervisor.holds):
            kind = data.draw(st.sampled_from(["nothing", "token", "end"]))
            if kind == "token":
                outputs.append(Output(name, (Delta(0, "x", (1,)),)))
            elif kind == "end":
                del supervisor.holds[name]
                outcome = "cancelled" if name in supervisor.cancelled else "done"
                outputs.append(Output(name, (), None, End(outcome)))  # type: ignore[arg-type]
        if data.draw(st.booleans()):
            outputs.append(Output("nobody's", (), None, End("done")))
        self._do(supervisor.owner.worker_outputs, outputs, None)

    @precondition(lambda self: not self.is_aborted)
    @rule(really=st.sampled_from([False] * 9 + [True]))
    def abort(self, really: bool) -> None:
        if really:
            self.is_aborted = True
            self._do(self.pool.abort)

    @invariant()
    def nobody_is_lost_and_nobody_ends_twice(self) -> None:
        ended = [event.request_id for event in self.ended]
        assert len(ended) == len(set(ended))
        over = {name for name, stream in self.streams.items() if stream.is_over}
        assert over == set(ended)
        status = self.pool.status
        assert len(self.streams) - len(over) == status.waiting + status.in_flight
        assert self.pool.idle.is_set() == (len(over) == len(self.streams))

    @invariant()
    def replicas_keep_within_their_capacity_and_books(self) -> None:
        for replica in self.pool.replicas:
            assert replica.num_in_flight <= max(replica.capacity, 0)
            assert (replica.outstanding == 0) == (replica.num_in_flight == 0)
            assert replica.is_ready or not replica.num_in_flight

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        has_room = any(replica.can_take for replica in self.pool.replicas)
        if has_room and self.pool._suspect is None:
            assert self.pool.status.waiting == 0

    @invariant()
    def poison_is_given_up(self) -> None:
        for event in self.ended:
            assert event.outcome in ("done", "cancelled", "failed")
        for ticket in self.pool._live.values():
            assert ticket.kills < MAX_KILLS

    def teardown(self) -> None:
        """At the end everything ends, each stream with exactly one last output."""

        async def finish() -> None:
            self.pool.abort()
            for stream in self.streams.values():
                with contextlib.suppress(StopAsyncIteration):
                    outputs = [output async for output in stream]
                    assert [output.end is not None for output in outputs].count(True) == 1
                    assert outputs[-1].end is not None

        self.runner.run(finish())
        self.nobody_is_lost_and_nobody_ends_twice()
        assert all(stream.is_over for stream in self.streams.values())
        self.runner.close()


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
