"""The response cache in this process's memory, within a bound of bytes.

Knows sizes, ages and tenants. Does not know what an answer contains. Every operation takes constant time for any number
of entries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from inferd import clock
from inferd.cache.key import TENANT_BYTES, tenant_digest
from inferd.cache.port import CachedAnswer
from inferd.config import CacheConfig

_OVERHEAD_BYTES = 512
"""Approximate memory of an entry beside its key and its answer: objects and places in tables."""


class _Entry(msgspec.Struct, frozen=True):
    answer: CachedAnswer
    expires_at: float
    size: int
    ttl_s: float


class _TenantEntries:
    """The entries of one tenant, the least recently used first."""

    __slots__ = ("entries", "size")

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.size = 0


class MemoryCache:
    """Evicts the least recently used entry of one of the largest tenants.

    Tenants are grouped by the magnitude (power of two) of their bytes, and entries are evicted from the group of the
    largest magnitude. A tenant that holds less than half of the bytes of another tenant therefore loses nothing, and a
    tenant that floods the cache evicts its own entries.
    """

    def __init__(self, config: CacheConfig, now: Callable[[], float] = clock.now) -> None:
        self._max_bytes = config.max_bytes
        self._max_entry_bytes = config.max_entry_bytes
        self._now = now
        self._tenants: dict[bytes, _TenantEntries] = {}
        self._by_magnitude: list[dict[bytes, None]] = [{} for _ in range(65)]
        self._magnitudes = 0  # bit m: some tenant is in _by_magnitude[m]
        self._by_ttl: dict[float, OrderedDict[bytes, float]] = {}  # in the order in which they expire
        self.num_bytes = 0

    def __len__(self) -> int:
        return sum(len(held.entries) for held in self._tenants.values())

    def bytes_of(self, tenant: str) -> int:
        """Bytes that a tenant holds."""
        held = self._tenants.get(tenant_digest(tenant))
        return held.size if held is not None else 0

    async def get(self, key: bytes) -> CachedAnswer | None:
        """The answer of a key, unless it has expired."""
        now = self._now()
        held = self._tenants.get(key[:TENANT_BYTES])
        entry = held.entries.get(key) if held is not None else None
        if held is None or entry is None:
            return None
        if entry.expires_at <= now:
            self._remove(key)
            return None
        held.entries.move_to_end(key)
        return entry.answer

    async def put(self, key: bytes, answer: CachedAnswer, ttl_s: float) -> None:
        """Store an answer for ``ttl_s`` seconds. It is not stored if it is too large, and may be evicted earlier."""
        now = self._now()
        self._expire(now)
        self._remove(key)
        content = len(answer.body) + len(answer.content_type)
        size = content + len(key) + _OVERHEAD_BYTES
        if content > self._max_entry_bytes or size > self._max_bytes:
            return
        tenant = key[:TENANT_BYTES]
        held = self._tenants.setdefault(tenant, _TenantEntries())
        held.entries[key] = _Entry(answer, now + ttl_s, size, ttl_s)
        self._by_ttl.setdefault(ttl_s, OrderedDict())[key] = now + ttl_s
        self._resize(tenant, held, size)
        while self.num_bytes > self._max_bytes:
            self._evict(tenant)

    async def close(self) -> None:
        self._tenants.clear()
        self._by_ttl.clear()
        self._by_magnitude = [{} for _ in range(65)]
        self._magnitudes = self.num_bytes = 0

    def _evict(self, storing: bytes) -> None:
        """Evict one entry of a largest tenant: of the storing tenant, if it is one of these."""
        largest = self._by_magnitude[self._magnitudes.bit_length() - 1]
        tenant = storing if storing in largest else next(iter(largest))
        self._remove(next(iter(self._tenants[tenant].entries)))

    def _expire(self, now: float) -> None:
        """Remove expired entries, also those that are never requested again."""
        for keys in self._by_ttl.values():  # as many as there are different settings of models
            while keys:
                key, expires_at = next(iter(keys.items()))
                if expires_at > now:
                    break
                self._remove(key)

    def _remove(self, key: bytes) -> None:
        tenant = key[:TENANT_BYTES]
        held = self._tenants.get(tenant)
        entry = held.entries.pop(key, None) if held is not None else None
        if held is None or entry is None:
            return
        self._by_ttl[entry.ttl_s].pop(key)
        self._resize(tenant, held, -entry.size)

    def _resize(self, tenant: bytes, held: _TenantEntries, by: int) -> None:
        before, held.size = held.size.bit_length(), held.size + by
        after = held.size.bit_length()
        self.num_bytes += by
        if not held.entries:
            del self._tenants[tenant]
        if before == after:
            return
        if before:
            del self._by_magnitude[before][tenant]
            if not self._by_magnitude[before]:
                self._magnitudes &= ~(1 << before)
        if after:
            self._by_magnitude[after][tenant] = None
            self._magnitudes |= 1 << after
