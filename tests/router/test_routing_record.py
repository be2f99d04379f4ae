"""What a request met in the router, over real worker processes: the queue, loading, lost workers, further attempts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
from tests.worker.watching import IMPATIENT, ask, outputs_of, serving, until, worker_pid

from inferd.config import RetryConfig
from inferd.router.stream import Stream, open_stream
from inferd.types import GenerateRequest, Routing, Timings


def of_tenant(request: GenerateRequest, tenant: str) -> GenerateRequest:
    return msgspec.structs.replace(request, tenant=tenant)


async def routing_of(stream: Stream) -> tuple[Routing, Timings]:
    outputs = await outputs_of(stream)
    end = outputs[-1].end
    assert end is not None
    assert end.routing is not None
    return end.routing, end.timings


def test_a_request_that_a_replica_takes_at_once_met_nothing() -> None:
    async def scenario() -> None:
        async with serving() as (router, _):
            routing, _ = await routing_of(open_stream(router, ask()))
            assert routing == Routing(attempts=1, replica=0)

    asyncio.run(scenario())


def test_a_request_in_the_queue_knows_what_was_ahead_of_it_and_that_the_model_was_loaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = tmp_path / "gate"
        async with serving(f"gate={gate}", until_ready=False) as (router, _):
            flood = [
                open_stream(router, of_tenant(ask(name=f"flood-{i}", priority=0 if i < 4 else 1), "flood"))
                for i in range(5)
            ]
            mine = open_stream(router, of_tenant(ask(name="mine"), "mine"))
            await asyncio.sleep(0.05)
            gate.touch()
            routing, timings = await routing_of(mine)
            assert (routing.ahead, routing.ahead_of_class) == (5, 4)
            assert (routing.ahead_tenant, routing.ahead_of_tenant) == ("flood", 5)
            assert routing.restart_s == 0.0
            assert timings.dispatched is not None
            assert 0.05 <= routing.load_s <= timings.dispatched
            first, _ = await routing_of(flood[0])
            assert (first.ahead, first.ahead_tenant) == (0, "")

    asyncio.run(scenario())


def test_a_request_that_arrives_while_workers_restart_knows_it() -> None:
    async def scenario() -> None:
        async with serving(patience=msgspec.structs.replace(IMPATIENT, first_delay_s=0.2)) as (router, _):
            os.kill(worker_pid(router), signal.SIGKILL)
            await until(lambda: router.models()[0].replicas_ready == 0, "its death is noticed")
            routing, timings = await routing_of(open_stream(router, ask()))
            assert timings.dispatched is not None
            assert 0.1 < routing.restart_s <= timings.dispatched
            assert (routing.load_s, routing.lost_s, routing.worker_deaths) == (0.0, 0.0, 0)

    asyncio.run(scenario())


def test_a_request_whose_worker_dies_knows_the_time_that_was_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving() as (router, _):
            gate = tmp_path / "gate"
            stream = open_stream(router, ask(f"gate={gate}"))
            await until(lambda: router.models()[0].in_flight == 1, "it is in the worker")
            await asyncio.sleep(0.05)
            os.kill(worker_pid(router), signal.SIGKILL)
            gate.touch()
            routing, timings = await routing_of(stream)
            assert (routing.attempts, routing.worker_deaths) == (2, 1)
            assert timings.dispatched is not None
            assert timings.finished is not None
            assert 0.05 <= routing.lost_s <= timings.finished - timings.dispatched
            assert (routing.load_s, routing.restart_s) == (0.0, 0.0), "these are of the wait before the first attempt"

    asyncio.run(scenario())


def test_a_hedge_is_noted_and_counts_as_an_attempt(tmp_path: Path) -> None:
    async def scenario() -> None:
        retry = RetryConfig(hedge_after_s=0.02, budget=1.0)
        async with serving(replicas=2, retry=retry) as (router, _):
            gate = tmp_path / "gate"
            stream = open_stream(router, ask(f"gate={gate}"))
            await until(lambda: [r.num_in_flight for r in router.replicas("tiny")] == [1, 1], "both have the request")
            gate.touch()
            routing, _ = await routing_of(stream)
            assert (routing.attempts, routing.was_hedged, routing.was_remote) == (2, True, False)
            assert routing.replica in (0, 1)

    asyncio.run(scenario())
