"""The timeline of starts: the phases of the server's own start, and of every load of a model by a worker.

A load begins when its process is started, and ends when the worker is ready, has failed or is gone. So a load that
fails, a restart after a crash and a load on demand each have a record. Times come from the worker's and the gateway's
monotonic clock, which is one clock on one machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from inferd import clock
from inferd.events import LoadProgress, ReplicaChanged

MAX_LOADS: Final = 200
"""Ended loads that are kept, the latest."""

SPAWN: Final = "spawn"
"""The first phase: from the start of the process to its first report."""

LoadState = Literal["loading", "ready", "hung", "died", "failed", "stopped"]
_ENDED: Final[dict[str, LoadState]] = {
    "ready": "ready",
    "hung": "hung",
    "died": "died",
    "failed": "failed",
    "stopped": "stopped",
}


class Phase(msgspec.Struct, frozen=True):
    """One phase. ``begin_s``: seconds after the begin of what it is a phase of."""

    name: str
    begin_s: float
    seconds: float


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """One load of a model by one worker, ended or under way."""

    model: str
    replica: int
    cause: Literal["load", "restart"]  # restart: the worker before it had ended
    restarts: int
    begun_at: float  # seconds since the epoch
    seconds: float
    state: LoadState
    reason: str = ""  # of a load that failed
    phases: list[Phase]  # in their order, each from the end of the one before it


class StartReport(msgspec.Struct, frozen=True, kw_only=True):
    """The start of the server itself."""

    begun_at: float  # seconds since the epoch, when its process began
    seconds: float  # until it accepted requests, or until now
    is_over: bool
    phases: list[Phase]


class StartupReport(msgspec.Struct, frozen=True, kw_only=True):
    """GET /admin/startup"""

    gateway: StartReport
    loads: list[LoadReport]  # the latest first


class _Phases:
    """Phases of which one is under way."""

    def __init__(self, begun_at: float, name: str) -> None:
        self.begun_at = begun_at
        self.done: list[Phase] = []
        self._name = name
        self._since = begun_at

    @property
    def name(self) -> str:
        return self._name

    def enter(self, name: str, at: float) -> None:
        """The next phase begins, and the one under way ends."""
        at = max(at, self._since)
        self.done.append(self._phase(at))
        self._name, self._since = name, at

    def until(self, now: float) -> list[Phase]:
        return [*self.done, self._phase(max(now, self._since))]

    def _phase(self, at: float) -> Phase:
        return Phase(self._name, round(self._since - self.begun_at, 6), round(at - self._since, 6))


class _Load:
    """A load under way."""

    def __init__(self, event: ReplicaChanged, now: float) -> None:
        self.event = event
        self.phases = _Phases(now, SPAWN)


class Startup:
    """Made when the server starts, and told of every event of a load. Used from the gateway's loop.

    ``began``: when the process began, on the monotonic clock. ``on_load`` gets every load that has ended.
    """

    def __init__(
        self,
        began: float,
        *,
        now: Callable[[], float] = clock.now,
        wall: Callable[[], float] = clock.wall,
        on_load: Callable[[LoadReport], None] | None = None,
        on_start: Callable[[StartReport], None] | None = None,
    ) -> None:
        self._now = now
        self._wall = wall
        self._on_load = on_load
        self._on_start = on_start
        self._gateway = _Phases(began, "import")
        self._ended_at: float | None = None  # when the server accepted requests
        self._open: dict[tuple[str, int], _Load] = {}
        self._ended: deque[LoadReport] = deque(maxlen=MAX_LOADS)

    # -- the server's own start -------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """The next phase of the server's start begins."""
        self._gateway.enter(phase, self._now())

    def accepts(self) -> None:
        """The server accepts requests: its start is over. Idempotent."""
        if self._ended_at is None:
            self._ended_at = self._now()
            if self._on_start is not None:
                self._on_start(self.start())

    def start(self) -> StartReport:
        until = self._now() if self._ended_at is None else self._ended_at
        begun_at = self._gateway.begun_at
        return StartReport(
            begun_at=self._epoch(begun_at),
            seconds=round(until - begun_at, 6),
            is_over=self._ended_at is not None,
            phases=self._gateway.until(until),
        )

    # -- loads ------------------------------------------------------------------------------

    def changed(self, event: ReplicaChanged) -> None:
        """A replica has reached another state. Remote servers load nothing here."""
        if event.is_remote:
            return
        key = (event.model, event.replica)
        if event.state == "starting":
            self._open[key] = _Load(event, self._now())
            return
        state = _ENDED.get(event.state)
        if state is None:
            return
        load = self._open.pop(key, None)
        if load is not None:
            report = self._report(load, state, event.reason)
            self._ended.append(report)
            if self._on_load is not None:
                self._on_load(report)

    def progressed(self, event: LoadProgress) -> None:
        """A worker has begun a phase, or continues one."""
        load = self._open.get((event.model, event.replica))
        if load is not None and event.phase != load.phases.name:
            load.phases.enter(event.phase, event.at or self._now())

    def loads(self) -> list[LoadReport]:
        """The loads under way and those that ended, the latest first."""
        found = [*self._ended, *(self._report(load, "loading", "") for load in self._open.values())]
        return sorted(found, key=lambda load: load.begun_at, reverse=True)

    def report(self) -> StartupReport:
        return StartupReport(gateway=self.start(), loads=self.loads())

    def _report(self, load: _Load, state: LoadState, reason: str) -> LoadReport:
        now, event = self._now(), load.event
        return LoadReport(
            model=event.model,
            replica=event.replica,
            cause="restart" if event.restarts else "load",
            restarts=event.restarts,
            begun_at=self._epoch(load.phases.begun_at),
            seconds=round(now - load.phases.begun_at, 6),
            state=state,
            reason=reason,
            phases=load.phases.until(now),
        )

    def _epoch(self, at: float) -> float:
        return round(self._wall() - self._now() + at, 6)
