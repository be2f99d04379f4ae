"""The budget of retries and hedges: a fraction of the live traffic, so that failing replicas get no retry storm.

Pure: time is an argument. Requests and retries of the last ``SPAN_S`` seconds are counted in slots of one second (as
in Finagle's RetryBudget, with a window in place of its token bucket). A retry is granted while fewer than
``RESERVE + ratio * requests`` were granted in the window. The reserve lets a model with little traffic retry a request.
"""

from __future__ import annotations

from collections import deque
from typing import Final

SPAN_S: Final = 10
RESERVE: Final = 3


class RetryBudget:
    """The retry budget of one model. ``ratio``: retries per request; 0 allows none."""

    __slots__ = ("_num_requests", "_num_retries", "_ratio", "_slot_ends", "_slots")

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._slots: deque[list[int]] = deque()  # [second, requests, retries]
        self._num_requests = 0
        self._num_retries = 0
        self._slot_ends = 0  # seconds; until then a request belongs to the last slot

    def note(self, now: float) -> None:
        """Count a request that arrived."""
        self._num_requests += 1
        if now < self._slot_ends:  # the common case in one comparison, as every request passes here
            self._slots[-1][1] += 1
        else:
            self._slot(now)[1] += 1

    def take(self, now: float) -> bool:
        """Whether one more retry or hedge is granted. A granted one is counted."""
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
