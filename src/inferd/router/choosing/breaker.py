"""The circuit breaker of a replica. Pure: time is an argument.

The circuit breaker of Nygard's "Release It!", with a limit: two changes of ``state`` are at least ``cooldown_s``
seconds apart, so that a flapping replica cannot make the router flap.

- closed: all requests pass. ``failures`` failures within ``window_s`` open the breaker.
- open: no request passes for ``cooldown_s``, then up to ``probes`` requests at a time (probes). A failed probe blocks
  requests for another ``cooldown_s``. A successful probe makes the breaker half-open.
- half-open: up to ``probes`` requests at a time. A failed one blocks requests for ``cooldown_s``, and opens the breaker
  if the last change is long enough ago. ``successes`` in a row close it, under the same condition. Where one success is
  enough, the breaker closes directly from open.

A probe without a result for ``cooldown_s`` no longer counts against ``probes``. A request that its client gives up is
such a probe, neither a success nor a failure, so a silent replica gets one request per ``cooldown_s``. The caller
decides which failures count: one that the request itself caused does not.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

from inferd.config import BreakerConfig

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """The breaker of one replica. ``now`` must not decrease from call to call."""

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
        """When requests pass again; None: the breaker is closed. The time may have passed."""
        return None if self.state == "closed" else self._shut_until

    @property
    def next_probe_at(self) -> float | None:
        """When another probe passes, even if those in flight have no result; None: the breaker is closed."""
        if self.state == "closed" or len(self._probes) < self._config.probes:
            return self.reopens_at
        oldest = self._probes[-self._config.probes]
        return max(self._shut_until, oldest + self._config.cooldown_s)

    def begin(self, now: float) -> None:
        """Note that a request is dispatched to the replica."""
        if self.state != "closed":
            while self._probes and now - self._probes[0] >= self._config.cooldown_s:
                self._probes.popleft()
            self._probes.append(now)

    def success(self, now: float, begun_at: float | None = None) -> None:
        """Note that the replica answered a request that was dispatched at ``begun_at``; None: not known.

        The answer to a request that was dispatched before the breaker opened does not count.
        """
        if self.state == "closed" or not self._ends_probe(begun_at):
            return
        self._streak += 1
        if self.state == "open" and self._config.successes > 1:
            self._change("half_open", now)
        elif self._streak >= self._config.successes:
            self._change("closed", now)

    def failure(self, now: float, begun_at: float | None = None) -> None:
        """Note that the replica failed a request that was dispatched at ``begun_at``; None: not known."""
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
        """Remove the probe of a request from the list; whether the request was a probe."""
        if begun_at is None:
            if not self._probes:
                return False
            self._probes.popleft()
            return True
        if begun_at in self._probes:
            self._probes.remove(begun_at)
        return begun_at > self._opened_at

    def _change(self, state: BreakerState, now: float) -> None:
        """Change the state, unless the last change was less than ``cooldown_s`` ago."""
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
