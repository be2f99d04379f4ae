"""Retries and hedges of a request: whether one is granted, the backoff before a retry, and the two attempts of a hedge.

Holds the budget, the requests in backoff and the abandoned attempts. The pool dispatches requests to replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Literal

from inferd.config import RetryConfig
from inferd.events import Emit, Retried
from inferd.router.replicas.replica import Replica
from inferd.router.retry_budget import RetryBudget
from inferd.router.ticket import Ticket
from inferd.router.waiting.availability import Availability

_BACKOFF_S = (0.025, 2.0)  # the first backoff, which doubles with each attempt, and the longest


class Retries:
    """The retries of one model's requests. ``retry`` is called when a request's backoff is over."""

    __slots__ = (
        "_availability",
        "_config",
        "_emit",
        "_model",
        "_random",
        "_retry",
        "abandoned",
        "backing_off",
        "budget",
    )

    def __init__(
        self,
        model: str,
        config: RetryConfig,
        availability: Availability,
        random: Random,
        emit: Emit,
        retry: Callable[[Ticket], None],
    ) -> None:
        self._model = model
        self._config = config
        self._availability = availability
        self._random = random
        self._emit = emit
        self._retry = retry
        self.budget = RetryBudget(config.budget)
        self.backing_off: dict[str, asyncio.TimerHandle] = {}
        self.abandoned: set[str] = set()  # ids of requests that a replica still computes, without need

    def configure(self, config: RetryConfig) -> None:
        """Use other settings from now on. Another budget begins without history."""
        old, self._config = self._config, config
        if old.budget != config.budget:
            self.budget = RetryBudget(config.budget)

    def grant(self, kind: Literal["retry", "hedge"], now: float) -> bool:
        """Whether the budget allows one more; emits ``Retried``."""
        is_granted = self.budget.take(now)
        self._emit(Retried(model=self._model, kind=kind, granted=is_granted))
        return is_granted

    def may_retry(self, ticket: Ticket, now: float) -> bool:
        """Whether a retry is allowed: another replica is left, and the budget grants one more."""
        if ticket.attempts >= self._config.max_attempts or not ticket.request.idempotent:
            return False
        if self._availability.replica_refusal(ticket, now)[0] is not None:
            return False
        return self.grant("retry", now)

    def may_hedge(self, ticket: Ticket, attempt: int) -> bool:
        """Whether the request still waits for the first output of this attempt, and has no hedge yet."""
        return not (
            ticket.end is not None
            or ticket.is_closed
            or ticket.has_output
            or ticket.hedge_replica is not None
            or ticket.attempts != attempt
            or attempt >= self._config.max_attempts
        )

    def back_off(self, ticket: Ticket) -> None:
        """Schedule a retry after a random backoff, so that requests that failed together are not retried together."""
        shortest, longest = _BACKOFF_S
        delay = min(longest, shortest * 2.0 ** (ticket.attempts - 1)) * self._random.random()
        ticket.runner = None
        loop = asyncio.get_running_loop()
        self.backing_off[ticket.request.id] = loop.call_later(delay, self._backoff_ended, ticket)

    def _backoff_ended(self, ticket: Ticket) -> None:
        del self.backing_off[ticket.request.id]
        self._retry(ticket)

    def cancel_backoff(self, request_id: str) -> bool:
        """End a request's backoff without a retry; whether the request was in backoff."""
        timer = self.backing_off.pop(request_id, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def cancel_backoffs(self) -> None:
        """End all backoffs without retries."""
        for timer in self.backing_off.values():
            timer.cancel()
        self.backing_off.clear()

    def settle_hedge(self, ticket: Ticket, replica: Replica) -> None:
        """Keep the attempt of ``replica``, the first of the hedge's two that answered, and cancel the other."""
        other = ticket.hedge_replica if replica is ticket.runner else ticket.runner
        ticket.use(replica, ticket.hedged_at if replica is ticket.hedge_replica else ticket.dispatched_at)
        ticket.hedge_replica = None
        if other is not None:
            self.abandoned.add(ticket.request.id)
            other.cancel(ticket.request.id)

    def drop_attempt(self, ticket: Ticket, replica: Replica) -> bool:
        """Note that a replica's attempt ended. Whether the request continues without it.

        It does where the attempt had been abandoned, and where the other attempt of a hedge still runs.
        """
        if ticket.hedge_replica is replica:
            ticket.hedge_replica = None
        elif ticket.runner is replica and ticket.hedge_replica is not None:
            ticket.use(ticket.hedge_replica, ticket.hedged_at)
            ticket.hedge_replica = None
        elif ticket.runner is replica:
            return False
        self.abandoned.discard(ticket.request.id)
        return True
