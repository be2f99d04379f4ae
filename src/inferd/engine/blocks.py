"""The KV arena's books: fixed-size blocks, reference counts, and the prefix cache.

Knows block numbers and keys; knows no tensor, no sequence and no clock. A block is in one of three
states, and the three always add up to the total:

    used     referenced by at least one sequence
    cached   referenced by none, but findable by its key: evictable
    free     referenced by none and without a key

Cached and free blocks share doubly linked lists threaded through arrays (no allocation per
operation), so the free list *is* the prefix cache (after vLLM's FreeKVCacheBlockQueue). There are two,
for a prefix that was used again once is likely to be used once more (as in the segmented LRU of Karedla,
Love and Wherry, 1994):

    once:   free, free, ..., cached (oldest), ..., cached (newest)
    again:  cached and reused (oldest), ..., cached and reused (newest)

Free blocks are taken first. Then the older of the two heads goes, where a reused block's age counts
half: it stays twice as long. Within a prefix the end goes before the beginning, always, so what is
left of it can be found: the end is released first, and is never reused without its beginning. (An exception
is a beginning that two sequences computed side by side: one copy has the key, and may go first.)
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq


def block_key(parent: bytes, tokens: Seq[int]) -> bytes:
    """Key of a full block: a hash over (key of the block before, its tokens).

    The first block's parent is the salt (tenant, adapter), so equal prompts of different tenants
    have different keys. BLAKE2b with 32 bytes: colliding on purpose is infeasible.
    """
    return hashlib.blake2b(array("q", tokens).tobytes(), key=parent[:64], digest_size=32).digest()


_STAY_AGAIN = 2  # times as long as a block that was never reused; measured by bench/prefix_replay.py


class BlockPool:
    """Allocates, shares and recycles blocks. Pure bookkeeping; every change is O(1) per block."""

    __slots__ = (
        "_again",
        "_by_key",
        "_idle_since",
        "_is_reused",
        "_keys",
        "_next",
        "_num_cached",
        "_num_idle",
        "_once",
        "_prev",
        "_refs",
        "_releases",
        "num_blocks",
    )

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        # Two sentinel nodes behind the blocks close each list into a ring.
        self._once, self._again = num_blocks, num_blocks + 1
        self._next: list[int] = [*range(1, num_blocks + 1), 0, num_blocks + 1]
        self._prev = [num_blocks, *range(num_blocks), num_blocks + 1]
        self._releases = 0  # the age of blocks is counted in these
        self._idle_since = [0] * num_blocks
        self._is_reused = bytearray(num_blocks)
        self._num_idle = num_blocks
        self._num_cached = 0

    # -- questions --------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can give: free and cached ones."""
        return self._num_idle

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._num_idle

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks kept for their prefix."""
        return self._num_cached

    @property
    def num_free(self) -> int:
        return self._num_idle - self._num_cached

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
        if count > self._num_idle:
            raise ValueError(f"{count} blocks wanted, {self._num_idle} available. This is a bug.")
        taken = []
        for _ in range(count):
            block = self._next_to_go()
            self._unlink(block)
            self._forget_key(block)
            self._is_reused[block] = 0
            self._refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; a cached one leaves the idle list and is used again."""
        for block in blocks:
            if self._refs[block] == 0:
                self._unlink(block)
                if self._keys[block] is not None:
                    self._num_cached -= 1
            self._refs[block] += 1
            self._is_reused[block] = 1

    def release(self, blocks: Seq[int]) -> None:
        """Drop a reference to each. Given in order of position: the last goes to be evicted first."""
        for block in reversed(blocks):
            refs = self._refs[block]
            if refs <= 0:
                raise ValueError(f"block {block} released while not referenced. This is a bug.")
            self._refs[block] = refs - 1
            if refs == 1:
                if self._keys[block] is None:
                    self._link_after(self._once, block)
                else:
                    self._releases += 1
                    self._idle_since[block] = self._releases
                    self._link_after(self._prev[self._again if self._is_reused[block] else self._once], block)
                    self._num_cached += 1

    def publish(self, block: int, key: bytes) -> None:
        """Make a computed full block findable. The first block with a key keeps it."""
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def clear_cache(self) -> None:
        """Forget every prefix; blocks in use stay in use."""
        for block in self._by_key.values():
            self._keys[block] = None
            if self._refs[block] == 0 and self._is_reused[block]:  # free ones are all in one list
                self._unlink(block)
                self._link_after(self._once, block)
            self._is_reused[block] = 0
        self._by_key.clear()
        self._num_cached = 0

    def check(self) -> None:
        """Verify every invariant; for tests and for the idle check. Raises AssertionError."""
        idle = [*self._listed(self._once), *self._listed(self._again)]
        assert all(self._is_reused[block] and self._keys[block] is not None for block in self._listed(self._again))
        assert len(idle) == len(set(idle)) == self._num_idle
        assert all(self._refs[block] == 0 for block in idle)
        assert sum(1 for refs in self._refs if refs == 0) == self._num_idle
        assert sum(1 for block in idle if self._keys[block] is not None) == self._num_cached
        assert self.num_free + self.num_cached + self.num_used == self.num_blocks
        assert {key: block for block, key in enumerate(self._keys) if key is not None} == self._by_key

    # -- the rings --------------------------------------------------------------------------

    def _next_to_go(self) -> int:
        once, again = self._next[self._once], self._next[self._again]
        if again == self._again or (once != self._once and self._keys[once] is None):
            return once
        if once == self._once:
            return again
        now = self._releases
        return once if (now - self._idle_since[once]) * _STAY_AGAIN >= now - self._idle_since[again] else again

    def _listed(self, head: int) -> list[int]:
        found = []
        node = self._next[head]
        while node != head:
            found.append(node)
            assert self._prev[self._next[node]] == node
            node = self._next[node]
        return found

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._num_idle -= 1

    def _link_after(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = block
        self._prev[block] = before
        self._next[block] = after
        self._prev[after] = block
        self._num_idle += 1

    def _forget_key(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            del self._by_key[key]
            self._num_cached -= 1

    def __repr__(self) -> str:
        return f"<BlockPool used={self.num_used} cached={self.num_cached} free={self.num_free} of {self.num_blocks}>"
