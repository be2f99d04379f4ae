"""How many retries there may be: a part of the live traffic, so failing replicas get no storm. Pure: time
is an argument.

Counts of the last ``SPAN_S`` seconds in slots of one second (as Finagle's RetryBudget, with a window in place
of its bucket): a retry passes while there were fewer than ``RESERVE`` plus ``ratio`` times the requests. The
reserve is for a model that is asked once in a while: its one request may be tried again too.
"""

from __future__ import annotations

from collections import deque
from typing import Final

SPAN_S: Final = 10
RESERVE: Final = 3


class RetryBudget:
    """Of one model. ``ratio`` 0 allows none."""

    __slots__ = ("_num_requests", "_num_retries", "_ratio", "_slot_ends", "_slots")

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._slots: deque[list[int]] = deque()  # [second, requests, retries]
        self._num_requests = 0
        self._num_retries = 0
        self._slot_ends = 0  # before it, the last slot is the one

    def note(self, now: float) -> None:
        """One request arrived."""
        self._num_requests += 1
        if now < self._slot_ends:  # the usual case, in one comparison: this is done for every request
            self._slots[-1][1] += 1
        else:
            self._slot(now)[1] += 1

    def take(self, now: float) -> bool:
        """Whether one more retry or hedge may be made; it is counted if so."""
        slot = self._slot(now)
        if not self._ratio or self._num_retries + 1 > RESERVE + self._ratio * self._num_requests:
            return False
        slot[2] += 1
        self._num_retries += 1
        return True

    def _slot(self, now: float) -> list[int]:
        second = int(now)
        while self._slots and self._slots[0][0] <= second - SPAN_S:
            _, requests, retries = self._slots.popleft()
            self._num_requests -= requests
            self._num_retries -= retries
        if not self._slots or self._slots[-1][0] < second:
            self._slots.append([second, 0, 0])
        self._slot_ends = second + 1
        return self._slots[-1]
