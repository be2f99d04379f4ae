"""An overload ends with the load: clients that give up and come back are served again within seconds.

The pool, its queue and its bounds are real. The one replica is a fake with a fixed capacity, and time is simulated, so
each run of a seed is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from random import Random
from unittest import mock

import pytest
from tests.router.tickets import ticket
from tests.router.virtual_loop import VirtualLoop
from tests.tiers import sample

from inferd import clock
from inferd.config import ModelConfig, QueueConfig, RemoteConfig
from inferd.errors import DeadlineExceeded, Overloaded
from inferd.events import ignore
from inferd.router.pool import Pool
from inferd.router.replicas.machines import Machines
from inferd.router.replicas.replica import ReplicaOwner
from inferd.router.request_end import deadline_error
from inferd.router.stream import open_stream
from inferd.router.ticket import Ticket
from inferd.types import End, Priority, Relay, Relayed, RelayHead, Request
from inferd.worker.supervisor import Patience

BACKOFF_S = 0.5
MAX_RETRIES = 2


class FixedServer:
    """A remote server that works on ``capacity`` requests at a time, each for about ``service_s``."""

    made: list[FixedServer] = []
    capacity = 8
    service_s = 0.4
    kind = "remote"
    info = failure = None
    name, region, reason, weight, is_fallback = "there", "", "", 1.0, False

    def __init__(self, model: str, index: int, config: RemoteConfig, owner: ReplicaOwner, emit: object) -> None:
        self._owner = owner
        self._random = Random(index)
        self._holds: dict[str, tuple[Ticket, asyncio.TimerHandle]] = {}
        self.index = index
        self.state = "starting"
        self.is_ready = self.was_ready = False
        self.made.append(self)

    @property
    def outstanding(self) -> int:
        return len(self._holds)

    num_in_flight = load = outstanding

    @property
    def can_take(self) -> bool:
        return self.is_ready and len(self._holds) < self.capacity

    def runs(self, ticket: Ticket) -> bool:
        return True

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
        self._owner.replica_ready(self)  # type: ignore[arg-type]

    async def stop(self) -> None:
        self.state, self.is_ready = "stopped", False

    def dispatch(self, ticket: Ticket) -> None:
        service_s = self.service_s * self._random.uniform(0.5, 1.5)
        timer = asyncio.get_running_loop().call_later(service_s, self._end, ticket, "done")
        self._holds[ticket.request.id] = ticket, timer

    def cancel(self, request_id: str) -> None:
        if request_id in self._holds:
            ticket, timer = self._holds[request_id]
            timer.cancel()
            asyncio.get_running_loop().call_soon(self._end, ticket, "cancelled")

    def _end(self, ticket: Ticket, outcome: str) -> None:
        request_id = ticket.request.id
        if request_id in self._holds:
            item = (
                Relayed(request_id, RelayHead(200, b"text/plain"), b"x", End("done"))
                if outcome == "done"
                else Relayed(request_id, end=End("cancelled"))
            )
            self._owner.replica_relayed(self, ticket, item)  # type: ignore[arg-type]

    def ticket(self, request_id: str) -> Ticket | None:
        held = self._holds.get(request_id)
        return held[0] if held is not None else None

    def release(self, ticket: Ticket) -> None:
        del self._holds[ticket.request.id]

    def release_all(self) -> list[Ticket]:
        tickets = [ticket for ticket, _ in self._holds.values()]
        for _, timer in self._holds.values():
            timer.cancel()
        self._holds.clear()
        return tickets


class Site:
    """A pool with one such server, and what its clients saw: (time of the end, how it ended)."""

    def __init__(self, queue: QueueConfig) -> None:
        config = ModelConfig(source="", replicas=0, remotes=(RemoteConfig(url="http://there/v1"),), queue=queue)
        self.pool = Pool(
            "m",
            config,
            ignore,
            machines=Machines(()),
            patience=Patience(),
            demand=lambda pool: None,
            may_surge=lambda pool, member: True,
            on_idle=lambda pool: None,
            make_remote=FixedServer,  # type: ignore[arg-type]
        )
        self.pool.start()
        self.random = Random(1)
        self.seen: list[tuple[float, str]] = []
        self._num_made = 0
        self._clients: set[asyncio.Task[None]] = set()

    async def attempt(self, patience_s: float, *, priority: Priority = 0, tenant: str = "") -> str | float:
        """How one attempt ended; for a refusal, the seconds after which another may be made."""
        self._num_made += 1
        request = Request(id=str(self._num_made), model="m", priority=priority, tenant=tenant)
        try:
            stream = open_stream(self.pool, request, Relay(path="/completions", body=b"{}"))
        except Overloaded as refusal:
            return self._refused(refusal.retry_after_s)
        try:
            async with asyncio.timeout(patience_s):
                async for item in stream:
                    end = item.end
        except TimeoutError:
            stream.close()
            return self._saw("gave up")
        assert end is not None
        if end.outcome == "done":
            return self._saw("answered")
        assert end.failure is not None
        assert end.failure.kind == Overloaded.kind
        return self._refused(end.failure.retry_after_s)

    def _refused(self, retry_after_s: float | None) -> float:
        self._saw("refused")
        assert retry_after_s is not None
        return retry_after_s

    def _saw(self, how: str) -> str:
        self.seen.append((clock.now(), how))
        return how

    async def client(self, patience_s: float) -> None:
        """Tries, and tries again, as clients' libraries do."""
        for attempt in range(1 + MAX_RETRIES):
            how = await self.attempt(patience_s)
            if how == "answered":
                return
            wait_s = how if isinstance(how, float) else BACKOFF_S * 2**attempt
            await asyncio.sleep(wait_s * self.random.uniform(1.0, 1.25))

    async def offer(self, rate: float, seconds: float, patience_s: Callable[[], float]) -> None:
        """Clients come at random, whether or not those before them were answered."""
        until = clock.now() + seconds
        while clock.now() < until:
            client = asyncio.create_task(self.client(patience_s()))
            self._clients.add(client)
            client.add_done_callback(self._clients.discard)
            await asyncio.sleep(self.random.expovariate(rate))

    def count(self, how: str, begin: float, end: float) -> int:
        return sum(begin <= at < end for at, seen in self.seen if seen == how)

    async def close(self) -> None:
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        await self.pool.stop()


@contextlib.contextmanager
def simulated() -> Iterator[asyncio.Runner]:
    FixedServer.made = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(clock, "now", runner.get_loop().time))
        yield runner


def goodput(site: Site, begin: float, end: float) -> float:
    """Answers that their clients were still there for, per second."""
    return site.count("answered", begin, end) / (end - begin)


@pytest.mark.parametrize("patience_s", sample([3.0, 5.0, 10.0, 20.0, 60.0], 5.0))
def test_goodput_is_the_capacity_in_a_storm_and_the_load_soon_after_it(patience_s: float) -> None:
    capacity = FixedServer.capacity / FixedServer.service_s

    async def storm() -> None:
        site = Site(QueueConfig())
        FixedServer.made[0].reached()
        await site.offer(0.8 * capacity, 10.0, lambda: patience_s)
        begun_at = clock.now()
        await site.offer(5.0 * capacity, 40.0, lambda: patience_s)
        over_at = clock.now()
        await site.offer(0.8 * capacity, 40.0, lambda: patience_s)
        now = clock.now()
        assert goodput(site, begun_at + 10.0, over_at) >= 0.95 * capacity
        assert goodput(site, over_at, over_at + 10.0) >= 0.95 * 0.8 * capacity
        attempts = site.count("answered", over_at + 10.0, now) + site.count("gave up", over_at + 10.0, now)
        assert site.count("gave up", over_at + 10.0, now) <= 0.05 * attempts
        assert goodput(site, over_at + 10.0, now) >= 0.95 * 0.8 * capacity
        await site.close()

    with simulated() as runner:
        runner.run(storm())


def test_no_request_waits_for_longer_than_it_may() -> None:
    waits: list[float] = []
    dispatch = FixedServer.dispatch

    def noted(server: FixedServer, ticket: Ticket) -> None:
        waits.append(clock.now() - ticket.request.arrived_at)
        dispatch(server, ticket)

    async def flood() -> None:
        site = Site(QueueConfig(max_wait_s=4.0))
        FixedServer.made[0].reached()
        await site.offer(100.0, 30.0, lambda: 1000.0)
        await site.close()

    with simulated() as runner, mock.patch.object(FixedServer, "dispatch", noted):
        runner.run(flood())
    assert 3.5 < max(waits) <= 4.0 + 0.01


def test_clients_that_wait_for_their_answers_before_they_ask_again_are_no_overload() -> None:
    async def closed_loop() -> None:
        site = Site(QueueConfig())
        FixedServer.made[0].reached()

        async def one() -> None:
            for _ in range(20):
                assert await site.attempt(60.0) == "answered"

        await asyncio.gather(*(one() for _ in range(96)))
        await site.close()

    with simulated() as runner:
        runner.run(closed_loop())


def test_batch_work_waits_for_as_long_as_it_takes() -> None:
    async def bulk() -> None:
        site = Site(QueueConfig())
        FixedServer.made[0].reached()
        found = await asyncio.gather(*(site.attempt(1000.0, priority=1) for _ in range(600)))
        assert set(found) == {"answered"}
        await site.close()

    with simulated() as runner:
        runner.run(bulk())


def test_requests_are_held_until_the_model_is_ready_and_wait_behind_others_from_then_on() -> None:
    async def cold() -> None:
        site = Site(QueueConfig(max_wait_s=4.0))
        begun_at = clock.now()
        held = [asyncio.create_task(site.attempt(1000.0)) for _ in range(60)]
        await asyncio.sleep(120.0)
        assert not any(task.done() for task in held)
        FixedServer.made[0].reached()
        assert {await task for task in held} == {"answered"}
        assert clock.now() - begun_at - 120.0 <= 4.0
        await site.close()

    with simulated() as runner:
        runner.run(cold())


def test_a_light_tenant_is_let_in_beside_a_flood() -> None:
    """The flood fills the bound in time; by its fair share the other tenant's request is next."""

    async def beside() -> None:
        site = Site(QueueConfig())
        FixedServer.made[0].reached()
        flood = [asyncio.create_task(site.attempt(1000.0, tenant="heavy")) for _ in range(20)]
        for _ in range(40):
            flood += [asyncio.create_task(site.attempt(1000.0, tenant="heavy")) for _ in range(50)]
            await asyncio.sleep(0.5)
            if site.count("refused", 0.0, clock.now()):
                break
        assert site.count("refused", 0.0, clock.now()), "the flood met no bound"
        assert await site.attempt(2.0, tenant="light") == "answered"
        await asyncio.gather(*flood)
        await site.close()

    with simulated() as runner:
        runner.run(beside())


def test_a_request_that_its_deadline_cannot_be_met_for_is_refused_at_once() -> None:
    async def late() -> None:
        site = Site(QueueConfig(max_wait_s=60.0))
        FixedServer.made[0].reached()
        waiting = [asyncio.create_task(site.attempt(1000.0)) for _ in range(200)]
        await asyncio.sleep(2.0)
        for deadline_s, first_byte_s in ((1.0, None), (None, 1.0)):
            request = Request(
                id="late", model="m", arrived_at=clock.now(), deadline_s=deadline_s, first_byte_s=first_byte_s
            )
            with pytest.raises(Overloaded) as refused:
                open_stream(site.pool, request, Relay(path="/completions", body=b"{}", stream=True))
            assert refused.value.code == "deadline_unreachable"
        await asyncio.gather(*waiting)
        await site.close()

    with simulated() as runner:
        runner.run(late())


def test_a_stream_that_waits_ends_when_its_client_stops_waiting_for_the_first_byte() -> None:
    dispatched: list[str] = []
    dispatch = FixedServer.dispatch

    def noted(server: FixedServer, ticket: Ticket) -> None:
        dispatched.append(ticket.request.id)
        dispatch(server, ticket)

    async def behind() -> None:
        site = Site(QueueConfig(max_wait_s=60.0))
        FixedServer.made[0].reached()
        waiting = [asyncio.create_task(site.attempt(1000.0)) for _ in range(200)]
        await asyncio.sleep(0)
        began = clock.now()
        request = Request(id="impatient", model="m", arrived_at=began, first_byte_s=2.0)
        stream = open_stream(site.pool, request, Relay(path="/completions", body=b"{}", stream=True))
        ends = [item.end async for item in stream]
        assert clock.now() - began == pytest.approx(2.0, abs=0.01)
        assert ends[-1] is not None
        assert ends[-1].failure is not None
        assert ends[-1].failure.kind == DeadlineExceeded.kind
        await asyncio.gather(*waiting)
        await site.close()

    with simulated() as runner, mock.patch.object(FixedServer, "dispatch", noted):
        runner.run(behind())
    assert len(dispatched) == 200
    assert "impatient" not in dispatched


def test_a_stream_that_has_begun_is_bound_by_its_deadline_alone() -> None:
    one = ticket(0, deadline_s=10.0, first_byte_s=2.0)
    assert one.due_at == 2.0
    one.has_output = True
    assert one.due_at == 10.0


def test_the_error_names_the_limit_that_passed_in_the_queue() -> None:
    request = ticket(0, deadline_s=10.0, first_byte_s=2.0).request
    assert "The 2 s within which the client wants the stream to begin passed" in deadline_error(request, 2.0).message
    assert "The request's deadline of 10 s passed" in deadline_error(request, 10.0).message
