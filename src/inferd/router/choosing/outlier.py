"""The ejection of replicas that are healthy but slow. Pure: time is an argument.

This is Envoy's outlier detection, for latency. A replica is ejected when its typical latency is more than
``eject_factor`` times the median of the others. The ejection lasts ``eject_s`` seconds at first, and twice as long each
time the replica is ejected again soon. At most half of the replicas are ejected at the same time. A replica that is
readmitted starts without history.

The typical latency is the geometric mean of samples whose weight halves every ``HALF_LIFE_S``, so that one long answer
does not make a replica slow. With fewer than ``MIN_SAMPLES`` samples a replica is neither judged nor compared with.
Latencies must be comparable among requests: time to the first token, or time per token.

A request that was given up before its first token is a censored sample: the replica would have taken at least so long.
Such a sample counts where its duration alone is slow compared with the other replicas. A shorter one is ignored.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Final

from inferd.config import RoutingConfig

HALF_LIFE_S: Final = 15.0
MIN_SAMPLES: Final = 5.0
MIN_EXCESS_S: Final = 0.05
"""Smaller differences in seconds are noise, whatever the factor: replicas on one machine share its cores."""

_MAX_DOUBLINGS: Final = 5


class Outliers:
    """The latencies of one model's replicas, by index."""

    __slots__ = ("_config", "_history")

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self._history: dict[int, _History] = {}

    def note(self, replica: int, seconds: float, now: float) -> None:
        """Add a latency of a replica, in seconds; eject the replica if it is slow."""
        history = self._history.get(replica)
        if history is None:
            history = self._history[replica] = _History(now)
        if history.is_ejected(now):
            return  # the request began before the ejection
        history.add(seconds, now)
        if self._config.eject_factor > 0 and self._is_slow(replica, now):
            num_ejected = sum(other.is_ejected(now) for other in self._history.values())
            if 2 * (num_ejected + 1) <= len(self._history):
                history.eject(self._config.eject_s, now)

    def note_at_least(self, replica: int, seconds: float, now: float) -> None:
        """Add a censored latency: a request was given up ``seconds`` after its dispatch."""
        if self._config.eject_factor > 0 and self._exceeds(replica, seconds, now):
            self.note(replica, seconds, now)

    def ejected(self, now: float) -> frozenset[int]:
        """The indexes of the ejected replicas. They should still get requests that no other replica can take."""
        return frozenset(replica for replica, history in self._history.items() if history.is_ejected(now))

    def next_return(self, now: float) -> float:
        """When the first ejection ends; infinite where no replica is ejected."""
        return min((h.ejected_until for h in self._history.values() if h.is_ejected(now)), default=math.inf)

    def forget(self, replica: int) -> None:
        """Forget a replica that is gone or was replaced."""
        if self._history.pop(replica, None) is None:
            return
        # Fewer replicas allow fewer ejections: those that would end first are ended now.
        ejected = sorted(
            (history for history in self._history.values() if history.ejected_until > -math.inf),
            key=lambda history: history.ejected_until,
            reverse=True,
        )
        for history in ejected[len(self._history) // 2 :]:
            history.ejected_until = -math.inf

    def _is_slow(self, replica: int, now: float) -> bool:
        own = self._history[replica].typical(now)
        return own is not None and self._exceeds(replica, own, now)

    def _exceeds(self, replica: int, seconds: float, now: float) -> bool:
        """Whether a latency is slow compared with the other replicas; ejected ones have no samples."""
        peers = [
            typical
            for index, history in self._history.items()
            if index != replica and (typical := history.typical(now)) is not None
        ]
        if not peers:
            return False
        standard = median(peers)
        return seconds > self._config.eject_factor * standard and seconds - standard > MIN_EXCESS_S


class _History:
    __slots__ = ("_at", "_count", "_num_ejections", "_sum", "_term_s", "ejected_until")

    def __init__(self, now: float) -> None:
        self._at = now
        self._count = 0.0
        self._sum = 0.0  # of the logarithms
        self._num_ejections = 0
        self._term_s = 0.0  # of the last ejection
        self.ejected_until = -math.inf

    def add(self, seconds: float, now: float) -> None:
        """Add a latency in seconds."""
        self._decay(now)
        self._count += 1
        self._sum += math.log(max(seconds, 1e-6))

    def typical(self, now: float) -> float | None:
        """The geometric mean in seconds; None: there are too few samples."""
        self._decay(now)
        return math.exp(self._sum / self._count) if self._count >= MIN_SAMPLES else None

    def is_ejected(self, now: float) -> bool:
        """Whether the replica is ejected now."""
        return now < self.ejected_until

    def eject(self, eject_s: float, now: float) -> None:
        """Eject the replica, for longer if the last ejection was recent."""
        is_again = self._term_s > 0 and now - self.ejected_until < 2 * self._term_s
        self._num_ejections = self._num_ejections + 1 if is_again else 0
        self._term_s = eject_s * 2 ** min(self._num_ejections, _MAX_DOUBLINGS)
        self.ejected_until = now + self._term_s
        self._count = self._sum = 0.0

    def _decay(self, now: float) -> None:
        if now > self._at:
            factor = 0.5 ** ((now - self._at) / HALF_LIFE_S)
            self._count *= factor
            self._sum *= factor
            self._at = now
