"""Turns of trials beside the steps of the worker: which trials with the least share may compute at a time.

The least share alone keeps no step from waiting. A trial gets every gap of a core, also the short one between two
parts of a step, and keeps the core for some time when the step goes on. So while the worker computes, one trial
computes for ``RUN_S`` of each ``PERIOD_S``: at most so long a step waits, and few steps do. A trial that reaches its
limit of processor time so does it before its request stops waiting. While the worker does not compute, all may.

This module knows no process: its caller stops trials and lets them go on.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

RUN_S: Final = 0.001
PERIOD_S: Final = 0.01
_BUSY: Final = 0.2  # of a core, from which on the worker counts as computing

T = TypeVar("T")


class Turns(Generic[T]):
    """Trials by tenant. Tenants take turns; of a tenant's trials the oldest computes, so that it ends before others."""

    def __init__(self) -> None:
        self._trials: dict[Hashable, list[T]] = {}  # by tenant, the one whose turn is next in front
        self._is_busy = True
        self._chosen: T | None = None
        self._began = 0.0  # of the period
        self._worker_s = 0.0  # that the worker had computed then
        self.until: float | None = None  # when ``running`` has another answer; None: when a trial is added

    def add(self, tenant: Hashable, trial: T) -> None:
        self._trials.setdefault(tenant, []).append(trial)
        self.until = 0.0

    def remove(self, tenant: Hashable, trial: T) -> None:
        """A trial that ended. It may have had no turns."""
        trials = self._trials.get(tenant, [])
        if trial in trials:
            trials.remove(trial)
        if not trials:
            self._trials.pop(tenant, None)
        if trial is self._chosen:
            self._chosen = None
        if not self._trials:
            self.until = None

    def all(self) -> list[T]:
        return [trial for trials in self._trials.values() for trial in trials]

    def running(self, now: float, worker_s: float) -> list[T]:
        """The trials that may compute until ``until``; the others wait. ``worker_s``: processor time of the worker so
        far."""
        if now >= self._began + PERIOD_S:
            self._is_busy = worker_s - self._worker_s > _BUSY * (now - self._began)
            self._began, self._worker_s = now, worker_s
            self._chosen = self._next() if self._is_busy else None
        elif now >= self._began + RUN_S:
            self._chosen = None
        is_begun = self._is_busy and now < self._began + RUN_S
        self.until = self._began + (RUN_S if is_begun else PERIOD_S) if self._trials else None
        if not self._is_busy:
            return self.all()
        return [] if self._chosen is None else [self._chosen]

    def _next(self) -> T | None:
        tenant = next(iter(self._trials), None)
        if tenant is None:
            return None
        trials = self._trials[tenant] = self._trials.pop(tenant)  # its next turn is behind those of the others
        return trials[0]
