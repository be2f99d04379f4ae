"""The accepted requests of one model that have not ended, and the end of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from inferd import clock
from inferd.errors import InferdError, Overloaded, Unavailable
from inferd.events import Emit
from inferd.router.queue_reporter import QueueReporter
from inferd.router.request_end import complete_end, ended_event, is_deadline_end
from inferd.router.ticket import Ticket
from inferd.router.waiting.availability import Availability
from inferd.router.waiting.queue import RequestQueue, is_batch_work
from inferd.types import End, Item, Output, Relayed


class LiveRequests:
    """The tickets of the requests that have not ended, by id.

    Every ticket ends here, exactly once. ``on_idle`` is called when no request is left.
    """

    __slots__ = (
        "_availability",
        "_emit",
        "_on_idle",
        "_queue",
        "_reporter",
        "idle",
        "last_used_at",
        "num_batch_work",
        "tickets",
    )

    def __init__(
        self,
        queue: RequestQueue,
        availability: Availability,
        reporter: QueueReporter,
        emit: Emit,
        on_idle: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._availability = availability
        self._reporter = reporter
        self._emit = emit
        self._on_idle = on_idle
        self.tickets: dict[str, Ticket] = {}
        self.num_batch_work = 0  # of them
        self.last_used_at = clock.now()
        self.idle = asyncio.Event()  # set while no request is queued or in flight
        self.idle.set()

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued, in backoff or in flight."""
        return not self.tickets

    def add(self, ticket: Ticket) -> None:
        """Add an accepted request."""
        if not self.tickets:
            self.idle.clear()
        self.tickets[ticket.request.id] = ticket
        self.num_batch_work += is_batch_work(ticket.request)

    def end(self, ticket: Ticket, end: End, last: Item | None = None, now: float | None = None) -> None:
        """End a request: pass on its last item, settle its cost and emit its event.

        ``last`` is the replica's final item; None where the pool ends the request. ``now``: the present time of the
        monotonic clock, where the caller has read it.
        """
        now = clock.now() if now is None else now
        request = ticket.request
        del self.tickets[request.id]
        self.num_batch_work -= is_batch_work(request)
        if ticket.outages_before is not None:
            self._availability.outages.end_wait(ticket, now)
        end = complete_end(end, ticket, last, now)
        ticket.runner = None
        self._note_wait(ticket, end, now)
        num_tokens = end.usage.prompt_tokens + end.usage.completion_tokens
        if num_tokens or end.outcome != "done":  # else the replica did not report the usage
            self._queue.settle(ticket, num_tokens)
        self.last_used_at = now
        try:
            if isinstance(last, Relayed):
                ticket.deliver_piece(Relayed(request.id, last.head, last.data, end), now)
            elif last is not None:
                ticket.deliver_output(Output(request.id, last.deltas, last.prompt, end, last.prediction), now)
            else:
                ticket.deliver_output(Output(request.id, end=end), now)
        finally:
            if not request.is_copy:  # no client asked it; ``rollout.copies`` says what became of it
                self._emit(ended_event(ticket, end))
            if not self.tickets:
                self.idle.set()
                self._on_idle()
            if not self._reporter.is_scheduled:
                self._reporter.report()

    def fail(self, ticket: Ticket, error: InferdError) -> None:
        """End a request with an error after it was accepted."""
        self.end(ticket, End("failed", ticket.usage, failure=error.to_failure()))

    def refuse(self, ticket: Ticket, error: InferdError) -> None:
        """End a request that a replica or the queue refused."""
        self.end(ticket, End("refused", failure=error.to_failure()))

    def refuse_or_fail(self, ticket: Ticket, error: InferdError) -> None:
        """End a request with an error: refused if nothing of its answer was computed, else failed."""
        if ticket.has_output:
            self.fail(ticket, error)
        else:
            self.refuse(ticket, error)

    def end_refused(self, ticket: Ticket, error: InferdError) -> None:
        """End a request with the error of the last replica that refused it, as no other replica is left."""
        if isinstance(error, Overloaded | Unavailable):
            self.refuse(ticket, error)
        else:
            self.fail(ticket, error)

    # -- measurements -----------------------------------------------------------------------

    def note_drained(self, end: End, now: float) -> None:
        """Measure the drain rate. A cancelled request, or one past its deadline, was not served and is not counted."""
        if end.outcome != "cancelled" and (end.failure is None or not is_deadline_end(end)):
            self._availability.drain_rate.ended(now, has_waiting=bool(self._queue.entries))
        elif not self._queue.entries:
            self._availability.drain_rate.paused()

    def _note_wait(self, ticket: Ticket, end: End, now: float) -> None:
        """Report the outcome to the bound of waiting: answers, and work for clients that had given up. Batch work does
        not count."""
        begun_at = ticket.dispatched_at
        if begun_at is None:
            return
        if end.outcome == "done":
            self._availability.wait_bound.answered(now - begun_at)
        elif (
            (end.outcome == "cancelled" or is_deadline_end(end))
            and ticket.is_answer_unseen
            and not is_batch_work(ticket.request)
        ):
            self._availability.wait_bound.given_up(begun_at - ticket.queued_at, begun_at, now)
