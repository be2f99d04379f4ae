"""How long a request may wait behind others. Pure: time is an argument.

A queue that is bounded by its length alone keeps an overload alive after the load has gone: each request reaches a
replica shortly before its client gives up, so the replica works for nothing, and the client comes back. A bound in
time ends this, if it is below what clients wait for. It is ``max_wait_s``, or ``GENERATIONS`` times what an answer takes on
average where that is more: clients of a model whose answers take a minute wait for longer than ten seconds.

How long clients wait is mostly unknown, so the bound follows what comes of it, as TCP's congestion window does. Requests
that are given up in a replica, with nothing of their answer shown and after a wait that was longer than the work, are
evidence: ``EVIDENCE`` of them, against which every answer counts for one eighth, lower the bound to half of what the last one
waited, though never below ``LEAST_S``. Of those only such count that were begun after the bound was last lowered, as it could
not have spared the others.
The bound doubles again with every ``DOUBLING`` answers' times. So a few clients that leave change nothing, and where all are
impatient about one part in ``DOUBLING / 2`` of the replicas' work is for nothing.

CoDel (Nichols, Jacobson 2012; Maurer, "Fail at Scale", 2015) shortens each queue that stands. Here a standing queue is no
sign of overload: some hundred clients that each wait for their answer before they ask again make one as well.
"""

from __future__ import annotations

import math
from typing import Final

GENERATIONS: Final = 2.0
DOUBLING: Final = 64.0
EVIDENCE: Final = 4.0
LEAST: Final = 1 / 4
"""The bound is at least this part of an answer's time, or replicas would wait for requests."""
LEAST_S: Final = 1.0
"""Seconds that requests may wait in any case: hardly a client gives up before, and short waits are no overload."""
TOGETHER_S: Final = 0.05
"""Requests given up within so many seconds count once: a client that ends leaves all its requests at one moment, and says
nothing of how long clients wait."""

_COUNTER: Final = 1 / 8  # what an answer takes from the evidence
_MEMORY: Final = 1 / 32  # of the average: the weight of the latest answer


class WaitBound:
    """Of one model's queue. ``max_wait_s``: seconds."""

    __slots__ = ("_answer_s", "_evidence", "_given_up_at", "_lowered_at", "_lowered_to_s", "_max_wait_s")

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._answer_s: float | None = None
        self._evidence = 0.0
        self._given_up_at = -math.inf  # the last time that counted
        self._lowered_at = -math.inf
        self._lowered_to_s = math.inf

    def configure(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s

    def answered(self, seconds: float) -> None:
        """A replica has answered a request, so many seconds after it got it."""
        known = self._answer_s
        self._answer_s = seconds if known is None else known + _MEMORY * (seconds - known)
        if self._evidence:
            self._evidence = max(0.0, self._evidence - _COUNTER)

    def given_up(self, waited_s: float, begun_at: float, now: float) -> None:
        """What a replica did for a request, begun after such a wait, is for nothing: its client has left, or its deadline
        has passed."""
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
        """The bound; infinite while no answer says how long one takes."""
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
