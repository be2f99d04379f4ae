"""The direct path to a worker: one object per prediction, without a queue.

As in ``direct_relay`` for remote servers, one object stands in place of a ticket and a stream. It is converted into
these when the worker fails or dies, the client disconnects, or the answer comes in several parts.
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


class PredictionSlot:
    """A worker with room for one more prediction."""

    __slots__ = ("member", "pool", "replica")

    def __init__(self, pool: Pool, member: Member, replica: LocalReplica) -> None:
        self.pool = pool
        self.member = member
        self.replica = replica


def find_prediction_slot(pool: Pool, class_number: int, now: float) -> PredictionSlot | None:
    """A worker that can compute a prediction at once; None: the request has to use the general path.

    ``class_number`` is the index of the request's priority class, 0 for critical.
    """
    member = pool.direct_member(now)
    if member is None:
        return None
    replica = member.replica
    if not isinstance(replica, LocalReplica) or not replica.has_class_room(class_number):
        return None
    info = replica.info
    if info is None or info.kind != "predict" or info.is_stateful:
        return None
    return PredictionSlot(pool, member, replica)


class DirectPrediction(ABC):
    """One prediction on the direct path. A subclass writes to the client.

    Exactly one of ``deliver`` and ``converted`` is called. ``flush`` follows ``deliver``, after every prediction of the
    same frame from the worker was delivered. Writing wakes the client's process, which would compete for the processor
    with the rest of the frame.
    """

    __slots__ = ("_sent_at", "_slot", "class_number", "request")

    request: PredictRequest

    @abstractmethod
    def deliver(self, prediction: Prediction, end: End) -> None:
        """Prepare the answer for the client and settle its costs."""

    @abstractmethod
    def flush(self) -> None:
        """Write the prepared answer to the client."""

    @abstractmethod
    def converted(self, stream: Stream) -> None:
        """The request continues on the general path: its answer comes from ``stream``."""

    def send(self, slot: PredictionSlot, request: PredictRequest, class_number: int, now: float) -> None:
        """Send ``request`` to the worker of ``slot``. ``class_number`` is the index of its priority class."""
        self._slot = slot
        self._sent_at = now
        self.class_number = class_number
        self.request = request
        slot.pool.direct_began(slot.member, now)
        slot.replica.send_direct(self)

    def complete(self, prediction: Prediction, end: End) -> bool:
        """Deliver the worker's answer. The replica no longer counts the request as in flight.

        False: the delivery raised an exception. The request was converted and now belongs to the general path.
        """
        request, slot, reported = self.request, self._slot, end.timings
        now, arrived_at = clock.now(), request.arrived_at
        end = End(
            "done",
            end.usage,
            Timings(
                self._sent_at - arrived_at,
                reported.tokenized,
                reported.scheduled,
                reported.first_token,
                now - arrived_at,
                reported.steps_s,
            ),
        )
        slot.pool.fleet.health.answered(slot.member, now - self._sent_at, self._sent_at, now)
        try:
            self.deliver(prediction, end)
        except Exception:
            # A request boundary: a defect ends this request, and no other of its frame.
            _log.exception("request %s could not be answered", request.id)
            slot.replica.restore_direct(self)
            self.convert()
            return False
        slot.pool.direct_ended(
            RequestEnded(
                model=request.model,
                replica=slot.member.index,
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
        """Continue on the general path."""
        slot = self._slot
        ticket = slot.pool.adopt_direct(self.request, None, slot.member, self._sent_at, None)
        slot.replica.adopt(ticket)
        self.converted(ticket.stream)
