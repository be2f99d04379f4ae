"""The short way to a worker: for a prediction that nobody is ahead of.

As with ``express`` for remote servers, one object is what else a ticket and a stream are together, and is turned into
those as soon as anything is not as usual: the worker fails or dies, the client leaves, the answer comes in parts.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from inferd import clock
from inferd.events import RequestEnded
from inferd.router.replicas.replica import LocalReplica
from inferd.types import End, Prediction, PredictRequest, Timings

if TYPE_CHECKING:
    from inferd.router.pool import Pool
    from inferd.router.replicas.member import Member
    from inferd.router.stream import Stream


_log = logging.getLogger("inferd.router")


class Desk:
    """A worker with room for one more."""

    __slots__ = ("member", "pool", "replica")

    def __init__(self, pool: Pool, member: Member, replica: LocalReplica) -> None:
        self.pool = pool
        self.member = member
        self.replica = replica


def find_desk(pool: Pool, line: int, now: float) -> Desk | None:
    """``line``: the place of the request's class. None: the ordinary way is the one."""
    member = pool.next_taker(now)
    if member is None:
        return None
    replica = member.replica
    if not isinstance(replica, LocalReplica) or not replica.has_place(line):
        return None
    info = replica.info
    if info is None or info.kind != "predict" or info.is_stateful:
        return None
    return Desk(pool, member, replica)


class Errand(ABC):
    """One prediction on the short way. A subclass knows the client.

    Exactly one of ``deliver`` and ``taken_over`` is called. ``tell`` comes behind ``deliver``, and behind that of every other
    prediction that was answered in the same frame: a client that is written to wakes, and takes the processor from what
    is yet to be done here.
    """

    __slots__ = ("_desk", "_sent_at", "line", "request")

    request: PredictRequest

    @abstractmethod
    def deliver(self, prediction: Prediction, end: End) -> None: ...
    @abstractmethod
    def tell(self) -> None:
        """Let the client have what was delivered."""

    @abstractmethod
    def taken_over(self, stream: Stream) -> None:
        """From now on ``stream`` says what happens."""

    def depart(self, desk: Desk, request: PredictRequest, line: int, now: float) -> None:
        self._desk = desk
        self._sent_at = now
        self.line = line
        self.request = request
        desk.pool.transit_begins(desk.member, now)
        desk.replica.run(self)

    def take(self, prediction: Prediction, end: End) -> bool:
        """It is done; the replica has let go. False: it could not be delivered, and goes the ordinary way."""
        request, desk, told = self.request, self._desk, end.timings
        now, arrived_at = clock.now(), request.arrived_at
        end = End(
            "done",
            end.usage,
            Timings(
                self._sent_at - arrived_at,
                told.tokenized,
                told.scheduled,
                told.first_token,
                now - arrived_at,
                told.steps_s,
            ),
        )
        desk.pool.fleet.health.answered(desk.member, now - self._sent_at, self._sent_at, now)
        try:
            self.deliver(prediction, end)
        except Exception:
            # A request boundary: a defect ends this request, and no other of its frame.
            _log.exception("request %s could not be answered", request.id)
            desk.replica.take_back(self)
            self.convert()
            return False
        desk.pool.transit_ended(
            RequestEnded(
                model=request.model,
                replica=desk.member.index,
                request_id=request.id,
                tenant=request.tenant,
                outcome="done",
                usage=end.usage,
                timings=end.timings,
                priority=request.priority,
            ),
            self._sent_at,
            now,
        )
        return True

    def convert(self) -> None:
        """Go the ordinary way from here."""
        desk = self._desk
        ticket = desk.pool.take_over(self.request, None, desk.member, self._sent_at, None)
        desk.replica.take_over(ticket)
        self.taken_over(ticket.stream)
