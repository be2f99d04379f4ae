"""Laws of the block pool."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from inferd.engine.scheduling import retention
from inferd.engine.scheduling.blocks import BlockPool, block_key


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
    pool.reuse([a])
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


def one_block(pool: BlockPool, key: bytes, tenant: str = "", weight: float = 1.0) -> bool:
    """A request for one block, alone; whether it was cached."""
    block = pool.find(key)
    if block is None:
        (fresh,) = pool.allocate(1)
        pool.publish(fresh, key, tenant, weight)
        pool.release([fresh])
        return False
    pool.reuse([block])
    pool.release([block])
    return True


def test_a_prefix_that_was_reused_stays_longer_than_one_that_was_not() -> None:
    pool = BlockPool(8)
    for number in range(7):
        one_block(pool, bytes([number]))
    assert one_block(pool, bytes([1]))
    for number in range(100, 108):
        one_block(pool, bytes([number]))
    assert [number for number in range(7) if pool.find(bytes([number])) is not None] == [1]


def test_of_what_comes_back_too_late_for_all_a_part_is_kept() -> None:
    """Three times as many others come between two uses of a block as the cache holds: by recency nothing were ever reused."""
    pool, draw = BlockPool(64), random.Random(1)
    due: dict[int, tuple[int, float]] = {}  # when -> which, and how likely it comes once more
    hits = []
    for now in range(20_000):
        number, chance = due.pop(now, (now, 0.25))
        is_hit = one_block(pool, block_key(b"", [number]))
        if number != now and now > 10_000:
            hits.append(is_hit)
        if draw.random() < chance:
            due[next(at for at in itertools.count(now + 200) if at not in due)] = (number, 0.5)
    assert sum(hits) > 0.2 * len(hits)
    pool.check()


def test_a_fork_is_no_use_of_its_own() -> None:
    """Several answers to one request share its blocks, but it was one request that asked for them."""
    pool = BlockPool(4)
    for key in (b"a", b"b"):
        (block,) = pool.allocate(1)
        pool.publish(block, key)
        if key == b"a":
            pool.share([block])
            pool.release([block])
        pool.release([block])
    pool.allocate(3)
    assert pool.find(b"a") is None


def test_only_what_can_be_found_is_shared_again() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="shared while it is free"):
        pool.share([0])
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="without a key"):
        pool.reuse([block])


@contextmanager
def learning_from_few() -> Iterator[None]:
    """What is worth how much is learnt anew after every few blocks, so that short traffic shows it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "SAMPLED", 16)
        patch.setattr(retention, "_PRIOR_CHANCE", 0.01)
        yield


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
CHAINS = st.lists(PROMPTS, min_size=1, max_size=60)


class PlainCache:
    """Keys only, and all of them looked at to find the one that goes."""

    def __init__(self, size: int) -> None:
        self.retention = retention.Retention(size)
        self.kept: dict[bytes, tuple[int, int]] = {}  # uses, idle since

    def ask(self, keys: list[bytes], size: int) -> None:
        """A request from its beginning to its end."""
        found = list(itertools.takewhile(lambda key: key in self.kept, keys))
        uses = {}
        for key in found:
            self.retention.asked(key)
            uses[key] = min(self.kept.pop(key)[0] + 1, retention.MOST_USES)
        while len(self.kept) + len(keys) > size:
            self._evict()
        for key in keys[len(found) :]:
            uses[key] = self.retention.computed(key)
        at = self.retention.released(list(uses.items()))
        self.kept |= {key: (count, at) for key, count in uses.items()}

    def _evict(self) -> None:
        once = [at for uses, at in self.kept.values() if uses == 1]
        least: tuple[float, int, int, int] | None = None
        for key, (uses, at) in self.kept.items():
            if uses > 1 or at in (min(once), max(once)):
                this = (self.retention.worth(uses, at), uses, at, -len(key))
                if least is None or this < least:
                    least, gone = this, key
        self.retention.evicted(gone, self.kept.pop(gone)[0])


@settings(max_examples=80)
@given(CHAINS, st.integers(6, 12))
@learning_from_few()
def test_eviction_follows_a_plain_twin_and_leaves_no_end_without_its_beginning(
    prompts: list[list[int]], num_blocks: int
) -> None:
    """Requests one after the other, each a path through a tree of blocks."""
    pool, plain = BlockPool(num_blocks), PlainCache(num_blocks)
    for prompt in prompts:
        keys = [bytes(prompt[: i + 1]) for i in range(len(prompt))]
        hits = [block for block in map(pool.find, keys) if block is not None]
        pool.reuse(hits)
        fresh = pool.allocate(len(keys) - len(hits))
        for key, block in zip(keys[len(hits) :], fresh, strict=True):
            pool.publish(block, key)
        pool.release([*hits, *fresh])
        plain.ask(keys, num_blocks)
        pool.check()
        assert {key for key in plain.kept if pool.find(key) is not None} == set(plain.kept)
        assert pool.num_cached == len(plain.kept)
        assert all(key[:-1] in plain.kept for key in plain.kept if len(key) > 1)


@settings(max_examples=80)
@given(st.lists(st.tuples(PROMPTS, st.integers(0, 3)), min_size=1, max_size=60), st.integers(12, 24))
@learning_from_few()
def test_requests_side_by_side_leave_no_end_without_its_beginning(
    requests: list[tuple[list[int], int]], num_blocks: int
) -> None:
    """Each stays while some others come and go; what it asks for is computed at once."""
    pool, seen = BlockPool(num_blocks), set()
    open_requests: list[list[int]] = []
    for prompt, length in requests:
        keys = [bytes(prompt[: i + 1]) for i in range(len(prompt))]
        while len(open_requests) > length or pool.num_available < len(keys):
            pool.release(open_requests.pop(0))
        hits = [block for block in map(pool.find, keys) if block is not None]
        pool.reuse(hits)
        while pool.num_available < len(keys) - len(hits):
            pool.release(open_requests.pop(0))
        fresh = pool.allocate(len(keys) - len(hits))
        for key, block in zip(keys[len(hits) :], fresh, strict=True):
            pool.publish(block, key)
        open_requests.append([*hits, *fresh])
        seen.update(keys)
        pool.check()
        assert all(pool.find(key[:-1]) is not None for key in seen if len(key) > 1 and pool.find(key) is not None)


# -- tenants -------------------------------------------------------------------------------------

WEIGHTS = {"a": 1.0, "b": 4.0, "c": 0.5}


def cached_by_tenant(pool: BlockPool) -> dict[str, int]:
    return {name: tenant.num_cached for name, tenant in pool._tenants.items() if tenant.num_cached}


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(WEIGHTS)), st.integers(0, 30)), min_size=20, max_size=200),
    st.integers(2, 24),
)
@learning_from_few()
def test_no_tenant_within_its_share_gives_a_block_while_one_is_above_its_own(
    requests: list[tuple[str, int]], num_blocks: int
) -> None:
    pool = BlockPool(num_blocks)
    for tenant, number in requests:
        before = cached_by_tenant(pool)
        evicts = not pool.num_free
        found = one_block(pool, f"{tenant}{number}".encode(), tenant, WEIGHTS[tenant])
        pool.check()
        if found or not evicts:
            continue
        after = cached_by_tenant(pool)
        after[tenant] -= 1  # what it computed
        (victim,) = [name for name, count in before.items() if after.get(name, 0) < count]
        per_weight = sum(before.values()) / sum(WEIGHTS[name] for name in before)
        above = {name for name, count in before.items() if count / WEIGHTS[name] > per_weight * (1 + 1e-9)}
        assert victim in above or not above


def test_what_fits_into_a_tenants_share_stays_however_much_more_others_reuse() -> None:
    pool, draw = BlockPool(64), random.Random(3)
    hits = []
    for now in range(20_000):
        one_block(pool, b"busy" + bytes([draw.randrange(200)]), "busy")
        if now % 20 == 0:
            hits.append(one_block(pool, b"calm" + bytes([now // 20 % 30]), "calm"))
    assert not any(hits[:30])
    assert all(hits[30:])


def test_what_a_tenant_leaves_of_its_share_is_the_others() -> None:
    pool = BlockPool(64)
    for number in range(4):
        one_block(pool, b"calm" + bytes([number]), "calm", 100.0)
    for number in range(200):
        one_block(pool, b"busy" + bytes([number]), "busy")
    assert cached_by_tenant(pool) == {"calm": 4, "busy": 60}


def test_shares_are_by_weight_where_all_want_more() -> None:
    pool = BlockPool(66)
    for number in range(2000):
        for tenant, weight in WEIGHTS.items():
            one_block(pool, block_key(tenant.encode(), [number]), tenant, weight)
    assert cached_by_tenant(pool) == {"a": 12, "b": 48, "c": 6}


def cache(pool: BlockPool, tenant: str, count: int, weight: float) -> None:
    """A prefix of so many blocks that nothing uses any more."""
    blocks = pool.allocate(count)
    for number, block in enumerate(blocks):
        pool.publish(block, block_key(tenant.encode(), [number]), tenant, weight)
    pool.release(blocks)


@pytest.mark.parametrize(
    ("large", "small", "count", "left"),
    [
        ((10, 1.0), (2, 1.0), 8, (2, 2)),
        ((10, 1.0), (2, 1.0), 7, (3, 2)),
        ((6, 1.0), (6, 3.0), 4, (2, 6)),
        ((5, 1.0), (3, 2.0), 3, (2, 3)),
        ((5, 1.0), (3, 2.0), 4, (1, 3)),
    ],
)
def test_many_blocks_at_once_are_taken_from_above_a_share_alone(
    large: tuple[int, float], small: tuple[int, float], count: int, left: tuple[int, int]
) -> None:
    pool = BlockPool(large[0] + small[0])
    cache(pool, "small", *small)  # released first: its worth would be the least
    cache(pool, "large", *large)
    pool.allocate(count)
    pool.check()
    assert cached_by_tenant(pool) == {"large": left[0], "small": left[1]}
    ours = [pool.find(block_key(b"large", [number])) is not None for number in range(large[0])]
    assert ours == [number < left[0] for number in range(large[0])], "the end of a prefix goes first"


@given(
    st.tuples(st.integers(1, 40), st.sampled_from([0.3, 0.5, 1.0, 2.0, 7.0])),
    st.tuples(st.integers(1, 40), st.sampled_from([0.3, 0.5, 1.0, 2.0, 7.0])),
    st.integers(1, 80),
)
def test_many_blocks_at_once_are_taken_as_one_after_the_other(
    large: tuple[int, float], small: tuple[int, float], count: int
) -> None:
    pools = [BlockPool(large[0] + small[0]) for _ in range(2)]
    for pool in pools:
        cache(pool, "small", *small)
        cache(pool, "large", *large)
    count = min(count, large[0] + small[0])
    pools[0].allocate(count)
    for _ in range(count):
        pools[1].allocate(1)
    assert cached_by_tenant(pools[0]) == cached_by_tenant(pools[1])


def test_a_tenant_that_has_all_cached_blocks_gives_all_at_once() -> None:
    pool = BlockPool(6)
    cache(pool, "idle", 2, 1.0)
    used = [pool.find(block_key(b"idle", [number])) for number in range(2)]
    pool.reuse([block for block in used if block is not None])  # so its tenant has no cached block
    cache(pool, "large", 4, 1.0)
    pool.allocate(4)
    pool.check()
    assert cached_by_tenant(pool) == {}


def test_above_their_shares_worth_decides_among_tenants() -> None:
    """Two are above their shares; the one that reuses keeps more than the one that does not."""
    pool = BlockPool(90)
    for number in range(3000):
        if number % 100 == 0:
            one_block(pool, b"calm" + bytes([number // 100 % 3]), "calm", 10.0)
        one_block(pool, b"reuses" + bytes([number % 40]), "reuses")
        one_block(pool, block_key(b"never", [number]), "never")
    assert all(pool.find(b"reuses" + bytes([number])) is not None for number in range(40))


def test_tenants_that_come_and_go_leave_nothing_behind() -> None:
    pool = BlockPool(8)
    for number in range(2000):
        one_block(pool, block_key(b"", [number]), str(number // 3))
    assert len(pool._tenants) <= 8
    assert len(pool._changed) <= 8
    assert len(pool._heap) <= 200


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
            tenant = data.draw(st.sampled_from(sorted(WEIGHTS)))
            weight = data.draw(st.sampled_from((WEIGHTS[tenant], 2.0)))
            self.pool.publish(data.draw(st.sampled_from(blocks)), self.keys.to_bytes(4, "big"), tenant, weight)

    @rule(number=st.integers(1, 40))
    def revive(self, number: int) -> None:
        block = self.pool.find(number.to_bytes(4, "big"))
        if block is not None:
            self.pool.reuse([block])
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
