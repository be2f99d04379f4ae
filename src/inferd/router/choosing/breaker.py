"""A replica that fails is left alone, and tried again with single requests. Pure: time is an argument.

The circuit breaker of Nygard's "Release It!", made calm: two changes of ``state`` are never closer together
than ``cooldown_s``, whatever the replica does, so one that flaps cannot make the router flap.

- closed: everything passes. ``failures`` failures within ``window_s`` open it.
- open: nothing passes for ``cooldown_s``, then up to ``probes`` requests at a time. One that fails shuts it
  for another ``cooldown_s``; one that succeeds makes it half-open.
- half-open: up to ``probes`` requests at a time. A failed one shuts it for ``cooldown_s`` (and opens it, where
  that is not too soon to change again); ``successes`` in a row close it, again not too soon. Where one
  success is enough, it closes from open at once.

A probe that is not heard of for ``cooldown_s`` no longer keeps others out. A request that is given up is such a probe:
it is neither a success nor a failure, and a silent replica gets one more request per ``cooldown_s`` alone. Which failures
count is the caller's to say: one that is the request's own fault is none.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

from inferd.config import BreakerConfig

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """The state of one replica's. Times never go back."""

    __slots__ = ("_changed_at", "_config", "_failures", "_opened_at", "_probes", "_shut_until", "_streak", "state")

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self.state: BreakerState = "closed"
        self._changed_at = -math.inf
        self._failures: deque[float] = deque(maxlen=config.failures)
        self._opened_at = -math.inf
        self._shut_until = -math.inf
        self._probes: deque[float] = deque()  # when those that have not ended began
        self._streak = 0  # probes in a row that succeeded

    def allows(self, now: float) -> bool:
        """Whether a request may be given to the replica now."""
        if self.state == "closed":
            return True
        probing = sum(now - begun_at < self._config.cooldown_s for begun_at in self._probes)
        return now >= self._shut_until and probing < self._config.probes

    @property
    def reopens_at(self) -> float | None:
        """When a request is let through again, if it is shut now; None: it is not. For timers."""
        return None if self.state == "closed" else self._shut_until

    @property
    def next_probe_at(self) -> float | None:
        """Likewise, where probes are under way: when one of them no longer keeps others out, heard of or not."""
        if self.state == "closed" or len(self._probes) < self._config.probes:
            return self.reopens_at
        oldest = self._probes[-self._config.probes]
        return max(self._shut_until, oldest + self._config.cooldown_s)

    def begin(self, now: float) -> None:
        """A request is given to the replica."""
        if self.state != "closed":
            while self._probes and now - self._probes[0] >= self._config.cooldown_s:
                self._probes.popleft()
            self._probes.append(now)

    def success(self, now: float, begun_at: float | None = None) -> None:
        """The replica answered a request, which was given to it at ``begun_at``. Where that is told, an
        answer to a request from before the breaker opened says nothing of the replica's present."""
        if self.state == "closed" or not self._ends_probe(begun_at):
            return
        self._streak += 1
        if self.state == "open" and self._config.successes > 1:
            self._change("half_open", now)
        elif self._streak >= self._config.successes:
            self._change("closed", now)

    def failure(self, now: float, begun_at: float | None = None) -> None:
        """The replica failed a request."""
        if not self._config.enabled:
            return
        if self.state == "closed":
            self._failures.append(now)
            is_full = len(self._failures) == self._config.failures
            if is_full and now - self._failures[0] <= self._config.window_s:
                self._change("open", now)
        elif self._ends_probe(begun_at):
            self._streak = 0
            self._shut_until = now + self._config.cooldown_s
            if self.state == "half_open":
                self._change("open", now)

    def _ends_probe(self, begun_at: float | None) -> bool:
        """Strike one probe from the list; whether the request was one."""
        if begun_at is None:
            if not self._probes:
                return False
            self._probes.popleft()
            return True
        if begun_at in self._probes:
            self._probes.remove(begun_at)
        return begun_at > self._opened_at

    def _change(self, state: BreakerState, now: float) -> None:
        """Take another state, unless the last change was less than a cooldown ago."""
        if now - self._changed_at < self._config.cooldown_s:
            return
        if self.state == "closed":
            self._opened_at = now
            self._shut_until = now + self._config.cooldown_s
            self._streak = 0
        elif state == "closed":
            self._failures.clear()
            self._probes.clear()
        self.state = state
        self._changed_at = now
