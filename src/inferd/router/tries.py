"""A request's second tries: whether it may have one, the rest before it, and two replicas that work on it at once.

Knows the budget, who rests and who works in vain. Giving a request to a replica is the pool's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Literal

from inferd.config import RetryConfig
from inferd.events import Emit, Retried
from inferd.router.budget import RetryBudget
from inferd.router.replicas.replica import Replica
from inferd.router.ticket import Ticket
from inferd.router.waiting.outlook import Outlook

_REST_S = (0.025, 2.0)  # before another try: at first, doubled with each, and at the longest


class Tries:
    """``rested``: a request has rested and is to wait again."""

    __slots__ = ("_config", "_emit", "_model", "_outlook", "_random", "_rested", "budget", "losers", "resting")

    def __init__(
        self,
        model: str,
        config: RetryConfig,
        outlook: Outlook,
        random: Random,
        emit: Emit,
        rested: Callable[[Ticket], None],
    ) -> None:
        self._model = model
        self._config = config
        self._outlook = outlook
        self._random = random
        self._emit = emit
        self._rested = rested
        self.budget = RetryBudget(config.budget)
        self.resting: dict[str, asyncio.TimerHandle] = {}
        self.losers: set[str] = set()  # have ended, and a replica still works on them

    def configure(self, config: RetryConfig) -> None:
        old, self._config = self._config, config
        if old.budget != config.budget:
            self.budget = RetryBudget(config.budget)

    def grant(self, kind: Literal["retry", "hedge"], now: float) -> bool:
        """Take one from the budget, if it has one."""
        is_granted = self.budget.take(now)
        self._emit(Retried(model=self._model, kind=kind, granted=is_granted))
        return is_granted

    def may_retry(self, ticket: Ticket, now: float) -> bool:
        """Whether there is a replica left that has not failed it, and the budget for one more."""
        if ticket.attempts >= self._config.max_attempts or not ticket.request.idempotent:
            return False
        if self._outlook.why_not(ticket, now)[0] is not None:
            return False
        return self.grant("retry", now)

    def may_hedge(self, ticket: Ticket, attempt: int) -> bool:
        """Whether it still waits for the first word of this attempt, and of no other."""
        stream = ticket.stream
        return not (
            stream.is_over
            or stream.is_closed
            or stream.progress.has_output
            or ticket.reserve is not None
            or ticket.attempts != attempt
            or attempt >= self._config.max_attempts
        )

    def rest(self, ticket: Ticket) -> None:
        """Another try in a moment: not at once, and not when everybody else tries again."""
        shortest, longest = _REST_S
        delay = min(longest, shortest * 2.0 ** (ticket.attempts - 1)) * self._random.random()
        ticket.runner = None
        loop = asyncio.get_running_loop()
        self.resting[ticket.request.id] = loop.call_later(delay, self._has_rested, ticket)

    def _has_rested(self, ticket: Ticket) -> None:
        del self.resting[ticket.request.id]
        self._rested(ticket)

    def wake(self, request_id: str) -> bool:
        """Let it rest no longer, without another try; whether it rested."""
        resting = self.resting.pop(request_id, None)
        if resting is not None:
            resting.cancel()
        return resting is not None

    def wake_all(self) -> None:
        for resting in self.resting.values():
            resting.cancel()
        self.resting.clear()

    def take_word(self, ticket: Ticket, replica: Replica) -> None:
        """Of two replicas, this one has begun to answer: the other one's work is for nothing."""
        other = ticket.reserve if replica is ticket.runner else ticket.runner
        if replica is ticket.reserve:
            ticket.dispatched_at = ticket.reserve_at
        ticket.runner, ticket.reserve, ticket.replica = replica, None, replica.index
        if other is not None:
            self.losers.add(ticket.request.id)
            other.cancel(ticket.request.id)

    def is_out(self, ticket: Ticket, replica: Replica) -> bool:
        """Whether the replica's part of a request ended without ending the request: it has been let go, or
        another one still works on it."""
        if ticket.reserve is replica:
            ticket.reserve = None
        elif ticket.runner is replica and ticket.reserve is not None:
            ticket.runner, ticket.reserve = ticket.reserve, None
            ticket.replica, ticket.dispatched_at = ticket.runner.index, ticket.reserve_at
        elif ticket.runner is replica:
            return False
        self.losers.discard(ticket.request.id)
        return True
