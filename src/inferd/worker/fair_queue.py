"""A queue that takes one waiting item of each tenant in turn, and bounds how many items of a tenant are worked on."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Safe to use from several threads. ``most``: items of a tenant that are worked on at the same time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[T]] = {}  # by tenant, those in front whose turn is next
        self._running: Counter[str] = Counter()

    def put(self, tenant: str, item: T) -> None:
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append(item)
            self._changed.notify()

    def get(self) -> tuple[str, T]:
        """The next item and its tenant. Waits for it. ``done`` must follow."""
        with self._changed:
            while (tenant := self._next()) is None:
                self._changed.wait()
            items = self._waiting.pop(tenant)
            item = items.popleft()
            if items:
                self._waiting[tenant] = items  # behind the others
            self._running[tenant] += 1
            return tenant, item

    def done(self, tenant: str) -> None:
        with self._changed:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
            self._changed.notify()

    def _next(self) -> str | None:
        return next((tenant for tenant in self._waiting if self._running[tenant] < self._most), None)
