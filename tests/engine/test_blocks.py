"""Laws of the block pool."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from inferd.engine.blocks import BlockPool, block_key


def test_allocating_takes_free_blocks_before_cached_ones() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.publish(first, b"a")
    pool.release([first, second])
    assert (pool.num_free, pool.num_cached) == (3, 1)
    taken = pool.allocate(3)
    assert first not in taken
    assert pool.find(b"a") == first


def test_eviction_forgets_the_least_recently_released_prefix_first() -> None:
    pool = BlockPool(3)
    for key in (b"a", b"b", b"c"):
        (block,) = pool.allocate(1)
        pool.publish(block, key)
        pool.release([block])
    # "a" is used again, so "b" is now the oldest.
    a = pool.find(b"a")
    assert a is not None
    pool.share([a])
    pool.release([a])
    pool.allocate(1)
    assert pool.find(b"b") is None
    assert pool.find(b"a") == a
    assert pool.find(b"c") is not None


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for i, block in enumerate(blocks):
        pool.publish(block, bytes([i]))
    pool.release(blocks)
    pool.allocate(1)
    assert pool.find(b"\x02") is None
    assert pool.find(b"\x00") is not None


def test_a_shared_block_stays_used_until_its_last_owner_releases_it() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.share(blocks)
    assert pool.is_shared(blocks[0])
    pool.release(blocks)
    assert pool.num_used == 1
    pool.release(blocks)
    assert pool.num_used == 0


def test_taking_more_than_there_is_or_releasing_twice_is_refused() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks wanted"):
        pool.allocate(3)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="not referenced"):
        pool.release(blocks)


def test_keys_differ_by_salt_parent_and_tokens() -> None:
    keys = {
        block_key(b"", [1, 2]),
        block_key(b"tenant", [1, 2]),
        block_key(b"", [2, 1]),
        block_key(block_key(b"", [1, 2]), [1, 2]),
        block_key(b"", [1, 2, 0]),
    }
    assert len(keys) == 5


def test_a_reused_prefix_stays_twice_as_long_as_one_that_was_not() -> None:
    pool = BlockPool(8)
    for key in range(8):
        (block,) = pool.allocate(1)
        pool.publish(block, bytes([key]))
        pool.release([block])
        if key == 1:
            pool.share([block])
            pool.release([block])
    gone = []
    for _ in range(8):
        before = {key for key in range(8) if pool.find(bytes([key])) is not None}
        pool.allocate(1)
        (key,) = before - {key for key in range(8) if pool.find(bytes([key])) is not None}
        gone.append(key)
    # Ages, the youngest first: 0 for key 7, and so on to 6 for key 1 and 8 for key 0. Key 1's counts 3, as key 4's is.
    assert gone == [0, 2, 3, 4, 1, 5, 6, 7]


CHAINS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=40)


@settings(max_examples=150)
@given(CHAINS, st.integers(6, 12))
def test_eviction_follows_a_plain_twin_and_leaves_no_end_without_its_beginning(
    prompts: list[list[int]], num_blocks: int
) -> None:
    """Requests one after the other, each a path through a tree of blocks. The twin knows keys only, and looks at
    every one of them to find the one that goes: largest age, half of it where the block was reused; of two, that one
    which was not."""
    pool = BlockPool(num_blocks)
    cached: dict[bytes, tuple[int, bool]] = {}  # key -> (when released, reused)
    releases = 0
    for prompt in prompts:
        keys = [bytes(prompt[: i + 1]) for i in range(len(prompt))]
        hits = [block for block in map(pool.find, keys) if block is not None]
        assert len(hits) == next((i for i, key in enumerate(keys) if key not in cached), len(keys))
        pool.share(hits)
        held = set(keys[: len(hits)])
        for key in held:
            del cached[key]
        fresh = pool.allocate(len(keys) - len(hits))
        while len(cached) + len(keys) > num_blocks:
            age = {key: (releases - at) / (2 if again else 1) for key, (at, again) in cached.items()}
            del cached[max(age, key=lambda key: (age[key], not cached[key][1]))]
        for key, block in zip(keys[len(hits) :], fresh, strict=True):
            pool.publish(block, key)
        pool.release([*hits, *fresh])
        for key in reversed(keys):
            releases += 1
            cached[key] = (releases, key in held)
        pool.check()
        found = {key for key in cached if pool.find(key) is not None}
        assert found == set(cached)
        assert pool.num_cached == len(cached)
        assert all(key[:-1] in cached for key in cached if len(key) > 1)


class PoolMachine(RuleBasedStateMachine):
    """Owners allocate, share, publish and release at random; a plain model keeps the same books."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.owners: list[list[int]] = []
        self.keys = 0

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_available:
            taken = self.pool.allocate(count)
            assert len(set(taken)) == count
            held = {block for owner in self.owners for block in owner}
            assert not held & set(taken)
            self.owners.append(taken)
        else:
            with pytest.raises(ValueError, match="wanted"):
                self.pool.allocate(count)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.owners:
            owner = data.draw(st.sampled_from(self.owners))
            self.pool.share(owner)
            self.owners.append(list(owner))

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        blocks = [block for owner in self.owners for block in owner]
        if blocks:
            self.keys += 1
            self.pool.publish(data.draw(st.sampled_from(blocks)), self.keys.to_bytes(4, "big"))

    @rule(number=st.integers(1, 40))
    def revive(self, number: int) -> None:
        block = self.pool.find(number.to_bytes(4, "big"))
        if block is not None:
            self.pool.share([block])
            self.owners.append([block])

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owners:
            at = data.draw(st.integers(0, len(self.owners) - 1))
            self.pool.release(self.owners.pop(at))

    @rule()
    def clear(self) -> None:
        self.pool.clear_cache()
        assert self.pool.num_cached == 0

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        held = {block for owner in self.owners for block in owner}
        assert self.pool.num_used == len(held)


TestPool = PoolMachine.TestCase
