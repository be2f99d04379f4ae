"""The bound on how long a request may wait in the queue, in seconds. Pure: time is an argument.

A queue that is bounded by its length alone prolongs an overload after the load has gone. Each request reaches a
replica shortly before its client gives up, the replica's work is wasted, and the client retries. A bound in time ends
this, if it is below the time that clients wait. The bound is ``max_wait_s``, or ``GENERATIONS`` times the average time
of an answer where that is more. Clients of a model whose answers take a minute wait for longer than ten seconds.

The time that clients wait is mostly unknown, so the bound adapts like TCP's congestion window. Evidence is a request
that is given up in a replica, without any output and after a wait that was longer than its computation. ``EVIDENCE``
of them lower the bound to half of the wait of the last one, but not below ``LEAST_S``; every answer counts one eighth
against them. Only requests that were begun after the bound was last lowered count, as the lower bound could not have
refused the others. The bound doubles again in every ``DOUBLING`` times the average time of an answer. So a few clients
that leave change nothing. Where all clients are impatient, about 2 / ``DOUBLING`` of the replicas' work is wasted.

CoDel (Nichols, Jacobson 2012; Maurer, "Fail at Scale", 2015) shortens every standing queue. Here a standing queue is no
sign of overload: a hundred clients that each wait for their answer before the next request make one as well.
"""

from __future__ import annotations

import math
from typing import Final

GENERATIONS: Final = 2.0
DOUBLING: Final = 64.0
EVIDENCE: Final = 4.0
LEAST: Final = 1 / 4
"""The least bound, as a part of the average time of an answer. Below it replicas would run out of requests."""
LEAST_S: Final = 1.0
"""The least bound in seconds: few clients give up earlier, and short waits are no overload."""
TOGETHER_S: Final = 0.05
"""Requests given up within so many seconds count once: a client that stops gives up all its requests at one moment."""

_COUNTER: Final = 1 / 8  # the evidence that an answer removes
_MEMORY: Final = 1 / 32  # the weight of the latest answer in the moving average


class WaitBound:
    """The bound of one model's queue. ``max_wait_s``: the configured bound in seconds."""

    __slots__ = ("_answer_s", "_evidence", "_given_up_at", "_lowered_at", "_lowered_to_s", "_max_wait_s")

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._answer_s: float | None = None
        self._evidence = 0.0
        self._given_up_at = -math.inf  # the last time that counted
        self._lowered_at = -math.inf
        self._lowered_to_s = math.inf

    def configure(self, max_wait_s: float) -> None:
        """Set another configured bound, in seconds."""
        self._max_wait_s = max_wait_s

    def answered(self, seconds: float) -> None:
        """Note that a replica answered a request, ``seconds`` after the dispatch."""
        known = self._answer_s
        self._answer_s = seconds if known is None else known + _MEMORY * (seconds - known)
        if self._evidence:
            self._evidence = max(0.0, self._evidence - _COUNTER)

    def given_up(self, waited_s: float, begun_at: float, now: float) -> None:
        """Note that a request in flight was given up without output: its client has left, or its deadline has passed.

        ``waited_s``: seconds in the queue; ``begun_at``: when it was dispatched.
        """
        if begun_at <= self._lowered_at or waited_s < now - begun_at or waited_s / 2 >= self.seconds(now):
            return
        if now - self._given_up_at < TOGETHER_S:
            return
        self._given_up_at = now
        self._evidence += 1
        if self._evidence >= EVIDENCE:
            self._evidence = 0.0
            self._lowered_at, self._lowered_to_s = now, waited_s / 2

    def seconds(self, now: float) -> float:
        """The bound in seconds; infinite before the first answer."""
        answer_s = self._answer_s
        if answer_s is None:
            return math.inf
        most_s = max(self._max_wait_s, GENERATIONS * answer_s)
        if self._lowered_to_s < most_s:
            doublings = (now - self._lowered_at) / (DOUBLING * max(answer_s, 1e-6))
            grown_s = self._lowered_to_s * math.exp2(min(doublings, 64.0))
            if grown_s < most_s:
                return max(grown_s, min(max(LEAST * answer_s, LEAST_S), most_s))
            self._lowered_to_s = math.inf
        return most_s
