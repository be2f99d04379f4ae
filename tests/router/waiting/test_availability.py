"""When a waiting request has waited too long, which requests are refused for what waits before them, and when they
should come again: exactly, from a known rate. Time is simulated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from unittest import mock

import pytest
from tests.router.tickets import ticket
from tests.router.waiting.test_overload import FixedServer, Site, simulated

from inferd import clock
from inferd.config import QueueConfig
from inferd.router.ticket import Ticket

MAX_WAIT_S = 4.0


def run(scenario: Callable[[Site], Awaitable[None]]) -> None:
    """A site whose server is ready and has no room, so that every request waits."""

    async def whole() -> None:
        site = Site(QueueConfig(max_wait_s=MAX_WAIT_S))
        FixedServer.made[0].reached()
        await scenario(site)
        await site.close()

    with simulated() as runner, mock.patch.object(FixedServer, "capacity", 0):
        runner.run(whole())


@asynccontextmanager
async def waiting(site: Site, count: int) -> AsyncIterator[list[asyncio.Task[str | float]]]:
    tasks = [asyncio.create_task(site.attempt(1000.0)) for _ in range(count)]
    await asyncio.sleep(0)
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def serve_one_each_second(site: Site) -> None:
    """Of nine ends a rate of at most 4/3 per second is credible: three quarters of a second per request."""
    for seconds in reversed(range(9)):
        site.pool.availability.drain_rate.ended(clock.now() - seconds, has_waiting=True)


def refusal(site: Site, asked: Ticket) -> tuple[str | None, float | None]:
    """The code, and when to come again."""
    error, _ = site.pool.availability.wait_refusal(asked, clock.now())
    return (None, None) if error is None else (error.code, error.retry_after_s)


def test_a_deadline_has_to_leave_time_for_what_waits_and_for_the_request_itself() -> None:
    async def scenario(site: Site) -> None:
        async with waiting(site, 3):
            serve_one_each_second(site)
            for left_s, expected in ((2.9, ("deadline_unreachable", 4.0)), (3.1, (None, None))):
                assert refusal(site, ticket(0, deadline_s=clock.now() + left_s)) == expected

    run(scenario)


def test_a_request_may_wait_as_long_as_the_bound_for_what_is_before_it_alone() -> None:
    async def scenario(site: Site) -> None:
        async with waiting(site, 6):
            serve_one_each_second(site)
            assert refusal(site, ticket(0)) == (None, None), "it is not known yet how long an answer takes"
            site.pool.availability.wait_bound.answered(0.4)
            assert refusal(site, ticket(0)) == ("queue_full", 7.0)
            assert refusal(site, ticket(0, priority=1)) == (None, None), "batch work may wait"
        async with waiting(site, 5):
            serve_one_each_second(site)
            assert refusal(site, ticket(0)) == (None, None)

    run(scenario)


def test_a_request_that_waits_too_long_ends_though_no_other_does() -> None:
    """Time without a ready server is no time of waiting."""

    async def scenario(site: Site) -> None:
        availability, began = site.pool.availability, clock.now()
        availability.wait_bound.answered(0.4)
        assert availability.next_expiry(began) is None, "none waits"
        await asyncio.sleep(1.0)
        async with waiting(site, 1) as (task,):
            queued_at, due_at = began + 1.0, began + 1.0 + MAX_WAIT_S
            assert availability.next_expiry(queued_at) == due_at
            assert availability.expired_before(due_at - 0.01) < queued_at
            assert availability.expired_before(due_at) == queued_at
            FixedServer.made[0].is_ready = False
            assert availability.next_expiry(queued_at) is None
            assert availability.expired_before(due_at) == -math.inf
            assert availability.longest_wait_s(queued_at) == math.inf
            await asyncio.sleep(2.0)
            FixedServer.made[0].is_ready = True
            ready_at = clock.now()
            assert availability.next_expiry(ready_at) == ready_at + MAX_WAIT_S
            assert availability.expired_before(ready_at + MAX_WAIT_S - 0.01) == -math.inf
            assert await task == 1.0, "a refusal, and when to come again"
            assert clock.now() == pytest.approx(ready_at + MAX_WAIT_S, abs=0.01)

    run(scenario)


def test_while_a_model_loads_a_request_should_come_again_when_the_last_load_would_have_ended() -> None:
    async def scenario(site: Site) -> None:
        availability, fleet = site.pool.availability, site.pool.fleet
        FixedServer.made[0].is_ready = False
        assert availability.retry_after_s(clock.now()) == 1.0, "no load was measured"
        fleet.load_s = 30.0
        (member,) = fleet.members
        assert availability.retry_after_s(clock.now()) == 30.0, "it begins with the request"
        member.kind = "local"
        for seconds, expected in ((0.0, 30.0), (10.0, 20.0), (29.5, 1.0), (40.0, 1.0)):
            assert availability.retry_after_s(member.started_at + seconds) == expected
        fleet.load_s = 600.0
        assert availability.retry_after_s(member.started_at) == 60.0
        member.kind = "remote"

    run(scenario)
