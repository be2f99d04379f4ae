"""For how long no replica of a model worked, and why: for the requests that waited meanwhile."""

from __future__ import annotations

from typing import Literal

from inferd.router.replicas.fleet import Fleet
from inferd.router.ticket import Ticket

Outage = Literal["", "load", "restart"]


class Outages:
    """Cumulative seconds without a ready replica, since the model is loaded or since its replicas were lost.

    ``update`` is called after every change of the replicas. A wait is the difference of two readings.
    """

    __slots__ = ("_fleet", "_load_s", "_outage", "_restart_s", "_since")

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._outage: Outage = ""
        self._since = 0.0
        self._load_s = self._restart_s = 0.0

    def update(self, now: float) -> None:
        """Enter the time until ``now``, and note whether a replica works from now on."""
        outage = self._present()
        if outage == self._outage:
            return
        self._load_s, self._restart_s = self._read(now)
        self._outage, self._since = outage, now

    def begin_wait(self, ticket: Ticket, now: float) -> None:
        """The request waits in the queue from now on, for the first time."""
        self.update(now)
        ticket.outages_before = self._read(now)

    def end_wait(self, ticket: Ticket, now: float) -> None:
        """The request waits no longer. Has no effect if it did not wait, or waited a second time."""
        before = ticket.outages_before
        if before is not None:
            load_s, restart_s = self._read(now)
            ticket.load_s, ticket.restart_s = load_s - before[0], restart_s - before[1]
            ticket.outages_before = None

    def _read(self, now: float) -> tuple[float, float]:
        """The seconds until ``now``: of loading, and of restarts."""
        outage, running_s = self._outage, now - self._since
        return (
            self._load_s + running_s if outage == "load" else self._load_s,
            self._restart_s + running_s if outage == "restart" else self._restart_s,
        )

    def _present(self) -> Outage:
        has_worked = False
        for member in self._fleet.members:
            if not member.is_leaving:
                if member.replica.is_ready:
                    return ""
                has_worked = has_worked or member.replica.was_ready
        return "restart" if has_worked else "load"
