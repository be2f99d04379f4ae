"""When a request is tried again, and within which budget."""

from __future__ import annotations

from random import Random

import pytest
from tests.router.tickets import ticket
from tests.router.virtual_loop import VirtualLoop

from inferd.config import ModelConfig, RetryConfig
from inferd.events import ignore
from inferd.router.pool import Pool
from inferd.router.replicas.machines import Machines
from inferd.router.retries import Retries
from inferd.router.retry_budget import RESERVE
from inferd.router.ticket import Ticket
from inferd.router.waiting.availability import Availability
from inferd.worker.supervisor import Patience

FIRST_S, LONGEST_S = 0.025, 2.0


def unused() -> Availability:
    """That of a model without replicas, which backoffs and budgets do not ask."""
    pool = Pool(
        "m",
        ModelConfig(source=""),
        ignore,
        machines=Machines(()),
        patience=Patience(),
        demand=lambda pool: None,
        may_surge=lambda pool, member: False,
        on_idle=lambda pool: None,
    )
    return pool.availability


class Longest(Random):
    """Draws the end of every interval."""

    def random(self) -> float:
        return 1.0


def delays_of(attempts: list[int], random: Random) -> list[float]:
    """After how many seconds tickets with so many attempts are tried again."""
    loop, at = VirtualLoop(), dict[str, float]()
    began = loop.time()

    def retry(tried: Ticket) -> None:
        at[tried.request.id] = loop.time() - began

    retries = Retries("m", RetryConfig(), unused(), random, ignore, retry)

    async def scenario() -> None:
        for number, count in enumerate(attempts):
            one = ticket(number)
            one.attempts = count
            retries.back_off(one)
        loop.call_later(2 * LONGEST_S, loop.stop)

    loop.create_task(scenario())
    loop.run_forever()
    loop.close()
    assert not retries.backing_off
    return [at[str(number)] for number in range(len(attempts))]


def test_the_longest_backoff_doubles_with_each_attempt_up_to_two_seconds() -> None:
    doubled = [FIRST_S * 2**number for number in range(6)]
    assert delays_of([1, 2, 3, 4, 5, 6], Longest()) == pytest.approx(doubled, abs=1e-6)
    assert delays_of([8, 10], Longest()) == pytest.approx([LONGEST_S, LONGEST_S], abs=1e-6)


def test_requests_that_failed_together_are_not_tried_again_together() -> None:
    delays = delays_of([1] * 200, Random(7))
    assert all(0.0 <= delay <= FIRST_S for delay in delays)
    tenths = {int(10 * delay / FIRST_S) for delay in delays}
    assert tenths >= set(range(10))


def test_another_budget_begins_without_history_and_other_settings_leave_it() -> None:
    retries = Retries("m", RetryConfig(), unused(), Random(7), ignore, lambda _: None)

    def granted() -> int:
        return sum(retries.grant("retry", 0.0) for _ in range(RESERVE + 1))

    assert granted() == RESERVE
    retries.configure(RetryConfig(max_attempts=2))
    assert granted() == 0
    retries.configure(RetryConfig(budget=0.5))
    assert granted() == RESERVE
    retries.configure(RetryConfig(budget=0.0))
    assert granted() == 0
