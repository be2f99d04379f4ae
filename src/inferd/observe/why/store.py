"""The records that are kept: the last ones, the slowest of each model and hour, and the last errors.

Every part is bounded, so the memory is fixed whatever clients do. Adding a record costs no search. Finding one by its
id is a scan over at most some ten thousand records, which is a matter of milliseconds and rare.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappush, heapreplace
from typing import Final, Literal

from inferd.observe.why.record import Numbers, RequestRecord

NUM_RECENT: Final = 16_384
"""Records of the last calls that are kept, unless the setting ``server.request_records`` has another number."""

NUM_SLOWEST: Final = 64
"""Records that are kept of each model and hour."""

NUM_GROUPS: Final = 128
"""Pairs of a model and an hour whose slowest calls are kept; the oldest pair is dropped first."""

NUM_ERRORS: Final = 2048
"""Records that are kept of the last calls that failed."""

NUM_NEIGHBOURS: Final = 1024
"""Records that are read to find the calls that ran at the same time as another one."""

_HOUR_S: Final = 3600.0
_SWITCHED: Final = 101  # a WebSocket, which lasts as long as its client likes

Order = Literal["recent", "slowest", "errors"]
_Slow = tuple[float, int, RequestRecord]  # seconds, and a number that makes every entry different


class RecordStore:
    """Keeps records in a fixed amount of memory. ``size``: how many of the last calls are kept; 0 keeps nothing."""

    def __init__(self, size: int = NUM_RECENT) -> None:
        self.size = size
        self._recent: deque[RequestRecord] = deque(maxlen=size)
        self._errors: deque[RequestRecord] = deque(maxlen=min(size, NUM_ERRORS))
        self._slowest: dict[tuple[int, str], list[_Slow]] = {}
        self._num_added = 0

    def resize(self, size: int) -> None:
        """Keep another number of records from now on; the newest stay."""
        if size != self.size:
            self.size = size
            self._recent = deque(self._recent, maxlen=size)
            self._errors = deque(self._errors, maxlen=min(size, NUM_ERRORS))
            if not size:
                self._slowest.clear()

    def add(self, record: RequestRecord, arrived_at: float, total_s: float, status: int) -> None:
        """Keep the record of a call that is over. ``arrived_at``: seconds since the epoch."""
        self._num_added += 1
        self._recent.append(record)
        if status >= 400:
            self._errors.append(record)
        if status == _SWITCHED or not self.size:
            return
        key = (int(arrived_at // _HOUR_S), record.model)
        group = self._slowest.get(key)
        if group is None:
            group = self._slowest[key] = []
            if len(self._slowest) > NUM_GROUPS:
                del self._slowest[next(iter(self._slowest))]
        if len(group) < NUM_SLOWEST:
            heappush(group, (total_s, self._num_added, record))
        elif total_s > group[0][0]:
            heapreplace(group, (total_s, self._num_added, record))

    def find(self, request_id: str) -> list[RequestRecord]:
        """The calls with this id, the newest first. Clients choose ids, so several calls may have the same."""
        found = {id(record): record for record in self._all() if record.id == request_id}
        return sorted(found.values(), key=_ended_at, reverse=True)

    def select(
        self, order: Order, keep: Callable[[RequestRecord, Numbers], bool], limit: int
    ) -> list[tuple[RequestRecord, Numbers]]:
        """The first ``limit`` records in an order, of those that ``keep`` accepts."""
        records = self._errors if order == "errors" else self._recent
        if order != "slowest":
            return self._first(reversed(records), keep, limit)
        slow = {id(record): record for group in self._slowest.values() for _, _, record in group}
        ranked = sorted(slow.values(), key=lambda record: record.span[1], reverse=True)
        return self._first(iter(ranked), keep, limit)

    def beside(self, record: RequestRecord) -> Iterator[tuple[RequestRecord, Numbers]]:
        """The calls to the same model and replica that were open at the same time as ``record``.

        At most ``NUM_NEIGHBOURS`` records are read, those that ended nearest to it.
        """
        began, total = record.span
        ended = began + total
        # Records are in the order in which their calls ended.
        low, high = 0, len(self._recent)
        while low < high:
            middle = (low + high) // 2
            if _ended_at(self._recent[middle]) < ended:
                low = middle + 1
            else:
                high = middle
        half = NUM_NEIGHBOURS // 2
        replica = record.numbers.replica
        for place in range(max(0, low - half), min(len(self._recent), low + half)):
            other = self._recent[place]
            if other is record or other.model != record.model:
                continue
            other_began, other_total = other.span
            if other_began < ended and other_began + other_total > began:
                numbers = other.numbers
                if numbers.replica == replica:
                    yield other, numbers

    def __len__(self) -> int:
        return len({id(record) for record in self._all()})

    def _all(self) -> Iterator[RequestRecord]:
        yield from self._recent
        yield from self._errors
        for group in self._slowest.values():
            for _, _, record in group:
                yield record

    @staticmethod
    def _first(
        records: Iterator[RequestRecord], keep: Callable[[RequestRecord, Numbers], bool], limit: int
    ) -> list[tuple[RequestRecord, Numbers]]:
        found: list[tuple[RequestRecord, Numbers]] = []
        for record in records:
            numbers = record.numbers
            if keep(record, numbers):
                found.append((record, numbers))
                if len(found) == limit:
                    break
        return found


def _ended_at(record: RequestRecord) -> float:
    began, total = record.span
    return began + total
