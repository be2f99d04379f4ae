"""The allocator of KV blocks: fixed-size blocks, reference counts, and the prefix cache.

Knows block numbers and keys. Does not know tensors, sequences or clocks. A block is in one of three states, and the
three always add up to the total:

    used     referenced by at least one sequence
    cached   referenced by none, but findable by its key: evictable
    free     referenced by none and without a key

Free blocks are allocated first, then the cached block with the least worth (``retention``). Blocks of equal worth are
kept together: blocks of a tenant that became idle at one time after equally many uses are a batch, the beginning of a
prefix first. For each number of uses, batches are in order of time:

    used once:     batch, batch, ..., batch        the oldest or the youngest goes
    used twice:    batch, batch, ..., batch        the oldest goes
    ...

So one comparison per number of uses finds a tenant's least valuable batch. Blocks used once may be worth least while
they are young, because the chance of reuse rises at first. Within a prefix the end is always evicted before the
beginning, so the rest can still be found: a beginning was used as often and as late as its ends, has the same worth,
and leaves its batch after them. (One exception: of a beginning that two sequences computed side by side, the copy with
the key may go first.)

A tenant's cached blocks are safe from other tenants up to its **share**: its weight among the tenants with cached
blocks, applied to all cached blocks. Only blocks of tenants above their shares compete by worth, and at most
``COMPETING`` tenants, those furthest above. At least one tenant is not below its share, because the shares are a
weighted mean. A single tenant has all blocks, and worth alone decides. Tenants never share prefixes, because keys begin
with the tenant's salt.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Final

from inferd.engine.scheduling.retention import MOST_USES, Retention

COMPETING: Final = 8
"""Tenants above their shares whose blocks are compared by worth."""

_SLACK: Final = 64  # outdated entries of the heap


def block_key(parent: bytes, tokens: Seq[int]) -> bytes:
    """Key of a full block: a hash over (key of the block before, its tokens).

    The first block's parent is the salt (tenant, adapter), so equal prompts of different tenants have different keys.
    BLAKE2b with 32 bytes makes deliberate collisions infeasible.
    """
    return hashlib.blake2b(array("q", tokens).tobytes(), key=parent[:64], digest_size=32).digest()


class _Tenant:
    """A tenant with keyed blocks: its cached blocks, in batches by uses and time."""

    __slots__ = ("batches", "name", "num_cached", "num_keys", "stamp", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0
        self.num_keys = 0
        self.num_cached = 0
        self.batches: list[OrderedDict[int, _Batch]] = [OrderedDict() for _ in range(MOST_USES)]  # [uses - 1][at]
        self.stamp = 0  # of its one valid entry in the heap; 0: it has none

    @property
    def ratio(self) -> float:
        """Cached blocks per weight."""
        return self.num_cached / self.weight


class _Batch:
    """A tenant's cached blocks that became idle at one time after equally many uses, the beginning of their prefix
    first."""

    __slots__ = ("at", "blocks", "tenant", "uses")

    def __init__(self, tenant: _Tenant, uses: int, at: int) -> None:
        self.tenant = tenant
        self.uses = uses
        self.at = at
        self.blocks: dict[int, None] = {}


class BlockPool:
    """Allocates, shares and recycles blocks.

    Every change is O(1) per block, and O(log tenants) per call where there are several tenants.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._uses = bytearray(num_blocks)  # requests that asked for what the block holds, up to MOST_USES
        self._free = deque(range(num_blocks))
        self._batch_of: list[_Batch | None] = [None] * num_blocks  # of cached blocks
        self._num_cached = 0
        self._tenant_of: list[_Tenant | None] = [None] * num_blocks  # of blocks with keys
        self._tenants: dict[str, _Tenant] = {}
        self._weights = 0.0  # of the tenants with cached blocks, together
        self._heap: list[tuple[float, int, _Tenant]] = []  # (-ratio, stamp, tenant), once there are several
        self._num_stamps = 0
        self._changed: dict[_Tenant, None] = {}  # since they were lined up
        self._retention = Retention(num_blocks)

    # -- queries ----------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can give: free and cached ones."""
        return len(self._free) + self._num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks kept for their prefix."""
        return self._num_cached

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, key: bytes) -> int | None:
        """The block that holds this prefix, referenced or not."""
        return self._by_key.get(key)

    def is_shared(self, block: int) -> bool:
        return self._refs[block] > 1

    def is_idle(self, block: int) -> bool:
        return self._refs[block] == 0

    # -- changes ----------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` blocks, evicting cached ones when the free ones are used up.

        Raises ValueError when fewer are available; check ``num_available`` first.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks wanted, {self.num_available} available. This is a bug.")
        while len(self._free) < count:
            self._evict(count - len(self._free))
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; a cached one becomes used."""
        for block in blocks:
            if self._refs[block] == 0:
                batch = self._batch_of[block]
                if batch is None:
                    raise ValueError(f"block {block} shared while it is free. This is a bug.")
                del batch.blocks[block]
                self._left(block, batch)
            self._refs[block] += 1

    def reuse(self, blocks: Iterable[int]) -> None:
        """Share blocks that were found by their keys, and count a use of each."""
        for block in blocks:
            key = self._keys[block]
            if key is None:
                raise ValueError(f"block {block} reused without a key. This is a bug.")
            self._retention.asked(key)
            self._uses[block] = min(self._uses[block] + 1, MOST_USES)
        self.share(blocks)

    def release(self, blocks: Seq[int]) -> None:
        """Drop a reference to each block. In order of position: the last is evicted first."""
        idle: list[int] = []
        for block in blocks:
            refs = self._refs[block]
            if refs <= 0:
                raise ValueError(f"block {block} released while not referenced. This is a bug.")
            self._refs[block] = refs - 1
            if refs == 1:
                idle.append(block)
        self._idle(idle)

    def publish(self, block: int, key: bytes, tenant: str = "", weight: float = 1.0) -> None:
        """Make a computed full block findable; the first block with a key keeps it. ``weight``: the tenant's from now
        on."""
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block
            self._uses[block] = self._retention.computed(key)
            owner = self._tenants.get(tenant)
            if owner is None:
                owner = self._tenants[tenant] = _Tenant(tenant)
            if owner.weight != weight:
                if owner.num_cached:
                    self._weights += weight - owner.weight
                    self._changed[owner] = None
                owner.weight = weight
            owner.num_keys += 1
            self._tenant_of[block] = owner

    def clear_cache(self) -> None:
        """Forget every prefix and all statistics; used blocks stay used."""
        for block in self._by_key.values():
            self._keys[block] = None
            self._tenant_of[block] = None
            if self._batch_of[block] is not None:
                self._batch_of[block] = None
                self._free.append(block)
        self._by_key.clear()
        self._tenants.clear()
        self._heap.clear()
        self._changed.clear()
        self._weights = 0.0
        self._num_cached = 0
        self._retention = Retention(self.num_blocks)

    def check(self) -> None:
        """Verify every invariant; for tests and for the idle check. Raises AssertionError."""
        cached = []
        for name, tenant in self._tenants.items():
            own = 0
            for uses, batches in enumerate(tenant.batches, 1):
                assert list(batches) == sorted(batches)
                for at, batch in batches.items():
                    assert batch.blocks
                    assert (batch.tenant, batch.uses, batch.at) == (tenant, uses, at)
                    cached += [(block, batch) for block in batch.blocks]
                    own += len(batch.blocks)
            assert (tenant.name, tenant.num_cached) == (name, own)
            assert tenant.num_keys == sum(owner is tenant for owner in self._tenant_of) > 0
        assert [owner is None for owner in self._tenant_of] == [key is None for key in self._keys]
        assert math.isclose(self._weights, sum(t.weight for t in self._tenants.values() if t.num_cached), abs_tol=1e-9)
        idle = [*self._free, *(block for block, _ in cached)]
        assert len(idle) == len(set(idle)) == self.num_available
        assert all(self._refs[block] == 0 for block in idle)
        assert sum(1 for refs in self._refs if refs == 0) == len(idle)
        assert all(self._keys[block] is None and self._batch_of[block] is None for block in self._free)
        assert all(self._keys[block] is not None and self._batch_of[block] is batch for block, batch in cached)
        assert len(cached) == self._num_cached
        assert self.num_free + self.num_cached + self.num_used == self.num_blocks
        assert {key: block for block, key in enumerate(self._keys) if key is not None} == self._by_key

    # -- cached blocks ----------------------------------------------------------------------

    def _idle(self, blocks: list[int]) -> None:
        """Cached where there is a key, else free."""
        keys = self._keys
        at = self._retention.released([(key, self._uses[b]) for b in blocks if (key := keys[b]) is not None])
        for block in blocks:
            if keys[block] is None:
                self._free.append(block)
                continue
            uses = self._uses[block]
            tenant = self._tenant_of[block]
            assert tenant is not None
            batches = tenant.batches[uses - 1]
            batch = batches.get(at)
            if batch is None:
                batch = batches[at] = _Batch(tenant, uses, at)
            batch.blocks[block] = None
            self._batch_of[block] = batch
            self._num_cached += 1
            if not tenant.num_cached:
                self._weights += tenant.weight
            tenant.num_cached += 1
            self._changed[tenant] = None

    def _evict(self, most: int) -> None:
        """Free up to ``most`` blocks of the least valuable competing batch, while its tenant is above its share."""
        rivals = self._rivals()
        batch = min(map(self._worth_least, rivals), key=self._worth)
        tenant = batch.tenant
        for _ in range(min(most, len(batch.blocks), self._excess(tenant))):
            block, _ = batch.blocks.popitem()
            self._left(block, batch)
            key = self._keys[block]
            assert key is not None
            self._retention.evicted(key, batch.uses)
            self._keys[block] = self._tenant_of[block] = None
            del self._by_key[key]
            self._free.append(block)
            tenant.num_keys -= 1
        if not tenant.num_keys:
            tenant.stamp = 0
            del self._tenants[tenant.name], self._changed[tenant]

    def _worth(self, batch: _Batch) -> float:
        return self._retention.worth(batch.uses, batch.at)

    def _worth_least(self, tenant: _Tenant) -> _Batch:
        heads = [next(iter(batches.values())) for batches in tenant.batches if batches]
        if tenant.batches[0]:
            heads.insert(1, next(reversed(tenant.batches[0].values())))
        return min(heads, key=self._worth)  # the first of equals, the least used

    def _left(self, block: int, batch: _Batch) -> None:
        self._batch_of[block] = None
        self._num_cached -= 1
        tenant = batch.tenant
        tenant.num_cached -= 1
        self._changed[tenant] = None
        if not tenant.num_cached:
            self._weights = self._weights - tenant.weight if self._num_cached else 0.0
        if not batch.blocks:
            del tenant.batches[batch.uses - 1][batch.at]

    # -- tenants ----------------------------------------------------------------------------

    def _rivals(self) -> list[_Tenant]:
        """The tenants furthest above their shares; where none is above, those with the most blocks."""
        if len(self._tenants) == 1:
            return list(self._tenants.values())
        self._line_up()
        first: list[tuple[float, int, _Tenant]] = []
        share = self._num_cached / self._weights * (1 + 1e-9)  # per weight
        while self._heap and len(first) < COMPETING:
            ratio, stamp, tenant = self._heap[0]
            if stamp == tenant.stamp:
                if first and -ratio <= share:
                    break
                first.append(self._heap[0])
            heapq.heappop(self._heap)
        for entry in first:
            heapq.heappush(self._heap, entry)
        return [tenant for _, _, tenant in first]

    def _excess(self, tenant: _Tenant) -> int:
        """Number of blocks to take from the tenant before the shares are compared again; at least one.

        A tenant above its share is not below it afterwards: every eviction also lowers the share.
        """
        if tenant.num_cached == self._num_cached:
            return tenant.num_cached
        above = tenant.num_cached - self._num_cached * tenant.weight / self._weights
        return max(1, int(above))

    def _line_up(self) -> None:
        """Every tenant with cached blocks has one valid entry, by its current ratio."""
        for tenant in self._changed:
            tenant.stamp = 0
            if tenant.num_cached:
                self._num_stamps += 1
                tenant.stamp = self._num_stamps
                heapq.heappush(self._heap, (-tenant.ratio, tenant.stamp, tenant))
        self._changed.clear()
        if len(self._heap) > _SLACK + 4 * len(self._tenants):
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].stamp]
            heapq.heapify(self._heap)

    def __repr__(self) -> str:
        return f"<BlockPool used={self.num_used} cached={self.num_cached} free={self.num_free} of {self.num_blocks}>"
