"""The KV arena's books: fixed-size blocks, reference counts, and the prefix cache.

Knows block numbers and keys; knows no tensor, no sequence and no clock. A block is in one of three
states, and the three always add up to the total:

    used     referenced by at least one sequence
    cached   referenced by none, but findable by its key: evictable
    free     referenced by none and without a key

Free blocks are taken first. Then that cached one goes which is worth least (``retention``). What is worth the same is
kept together: blocks that became idle at one time after equally many uses are a batch, beginning first, and
batches stand in order of time, for each number of uses:

    used once:     batch, batch, ..., batch        the oldest or the youngest goes
    used twice:    batch, batch, ..., batch        the oldest goes
    ...

so one comparison per number of uses finds the least. Blocks used once may be worth least while they are young, for the chance
that they are asked for rises at first. Within a prefix the end goes before the beginning, always, so what is
left of it can be found: a beginning was used as often as its ends and as late, is then worth as much, and leaves its batch
after them. (An exception is a beginning that two sequences computed side by side: one copy has the key, and may go first.)
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from inferd.engine.retention import MOST_USES, Retention


def block_key(parent: bytes, tokens: Seq[int]) -> bytes:
    """Key of a full block: a hash over (key of the block before, its tokens).

    The first block's parent is the salt (tenant, adapter), so equal prompts of different tenants
    have different keys. BLAKE2b with 32 bytes: colliding on purpose is infeasible.
    """
    return hashlib.blake2b(array("q", tokens).tobytes(), key=parent[:64], digest_size=32).digest()


class _Batch:
    """Cached blocks that became idle at one time after equally many uses, the beginning of their prefix first."""

    __slots__ = ("at", "blocks", "uses")

    def __init__(self, uses: int, at: int) -> None:
        self.uses = uses
        self.at = at
        self.blocks: dict[int, None] = {}


class BlockPool:
    """Allocates, shares and recycles blocks. Pure bookkeeping; every change is O(1) per block."""

    __slots__ = (
        "_batch_of",
        "_batches",
        "_by_key",
        "_free",
        "_keys",
        "_num_cached",
        "_refs",
        "_retention",
        "_uses",
        "num_blocks",
    )

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
        self._batches: list[OrderedDict[int, _Batch]] = [OrderedDict() for _ in range(MOST_USES)]  # [uses - 1][at]
        self._num_cached = 0
        self._retention = Retention(num_blocks)

    # -- questions --------------------------------------------------------------------------

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

    # -- deeds ------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, evicting cached ones when the free ones are used up.

        Raises ValueError when fewer are available; ask ``num_available`` first.
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
        """Add a reference to each block; a cached one is used again."""
        for block in blocks:
            if self._refs[block] == 0:
                batch = self._batch_of[block]
                if batch is None:
                    raise ValueError(f"block {block} shared while it is free. This is a bug.")
                del batch.blocks[block]
                self._left(block, batch)
            self._refs[block] += 1

    def reuse(self, blocks: Iterable[int]) -> None:
        """Share blocks that were found by their keys: one use more of each."""
        for block in blocks:
            key = self._keys[block]
            if key is None:
                raise ValueError(f"block {block} reused without a key. This is a bug.")
            self._retention.asked(key)
            self._uses[block] = min(self._uses[block] + 1, MOST_USES)
        self.share(blocks)

    def release(self, blocks: Seq[int]) -> None:
        """Drop a reference to each. Given in order of position: the last goes to be evicted first."""
        idle: list[int] = []
        for block in blocks:
            refs = self._refs[block]
            if refs <= 0:
                raise ValueError(f"block {block} released while not referenced. This is a bug.")
            self._refs[block] = refs - 1
            if refs == 1:
                idle.append(block)
        self._idle(idle)

    def publish(self, block: int, key: bytes) -> None:
        """Make a computed full block findable. The first block with a key keeps it."""
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block
            self._uses[block] = self._retention.computed(key)

    def clear_cache(self) -> None:
        """Forget every prefix and what was learnt; blocks in use stay in use."""
        for block in self._by_key.values():
            self._keys[block] = None
            if self._batch_of[block] is not None:
                self._batch_of[block] = None
                self._free.append(block)
        self._by_key.clear()
        for batches in self._batches:
            batches.clear()
        self._num_cached = 0
        self._retention = Retention(self.num_blocks)

    def check(self) -> None:
        """Verify every invariant; for tests and for the idle check. Raises AssertionError."""
        cached = []
        for uses, batches in enumerate(self._batches, 1):
            assert list(batches) == sorted(batches)
            for at, batch in batches.items():
                assert batch.blocks
                assert (batch.uses, batch.at) == (uses, at)
                cached += [(block, batch) for block in batch.blocks]
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
            batches = self._batches[uses - 1]
            batch = batches.get(at)
            if batch is None:
                batch = batches[at] = _Batch(uses, at)
            batch.blocks[block] = None
            self._batch_of[block] = batch
            self._num_cached += 1

    def _evict(self, most: int) -> None:
        """Free blocks of the batch that is worth least, up to ``most``."""
        batch = self._worth_least()
        for _ in range(min(most, len(batch.blocks))):
            block, _ = batch.blocks.popitem()
            self._left(block, batch)
            key = self._keys[block]
            assert key is not None
            self._retention.evicted(key, batch.uses)
            self._keys[block] = None
            del self._by_key[key]
            self._free.append(block)

    def _worth_least(self) -> _Batch:
        heads = [next(iter(batches.values())) for batches in self._batches if batches]
        if self._batches[0]:
            heads.insert(1, next(reversed(self._batches[0].values())))
        worth = self._retention.worth
        return min(heads, key=lambda batch: worth(batch.uses, batch.at))  # the first of equals, the least used

    def _left(self, block: int, batch: _Batch) -> None:
        self._batch_of[block] = None
        self._num_cached -= 1
        if not batch.blocks:
            del self._batches[batch.uses - 1][batch.at]

    def __repr__(self) -> str:
        return f"<BlockPool used={self.num_used} cached={self.num_cached} free={self.num_free} of {self.num_blocks}>"
