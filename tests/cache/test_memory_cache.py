"""The cache in memory against a plain dictionary, and what it may never do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from inferd.cache.key import cache_key
from inferd.cache.memory import MemoryCache
from inferd.cache.port import CachedAnswer
from inferd.config import CacheConfig

T = TypeVar("T")
TENANTS = ("a", "b", "c", "d")


def run(asked: Coroutine[object, object, T]) -> T:
    """What the memory says: it never waits, so no loop is needed."""
    try:
        asked.send(None)
    except StopIteration as ended:
        value: T = ended.value
        return value
    raise AssertionError("memory does not wait")


def key(tenant: str, number: int) -> bytes:
    return cache_key(tenant, "m", "f", "/p", b'{"n": %d}' % number)


def answer(size: int, mark: int = 0) -> CachedAnswer:
    return CachedAnswer(b"application/json", bytes([mark % 256]) * size, 1, mark)


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "wait"]),
        st.sampled_from(TENANTS),
        st.integers(0, 6),
        st.integers(0, 3000),
        st.sampled_from([1.0, 5.0]),
    ),
    max_size=60,
)


@given(operations)
def test_with_room_enough_it_is_a_dictionary_that_forgets_in_time(did) -> None:  # type: ignore[no-untyped-def]
    now = Clock()
    cache = MemoryCache(CacheConfig(), now)
    twin: dict[tuple[str, int], tuple[CachedAnswer, float]] = {}
    for mark, (what, tenant, number, size, ttl) in enumerate(did):
        if what == "put":
            run(cache.put(key(tenant, number), answer(size, mark), ttl))
            twin[tenant, number] = (answer(size, mark), now.time + ttl)
        elif what == "wait":
            now.time += ttl / 2
        else:
            kept = twin.get((tenant, number))
            expected = kept[0] if kept is not None and kept[1] > now.time else None
            assert run(cache.get(key(tenant, number))) == expected


@given(operations, st.integers(2000, 12_000))
def test_when_room_is_short_bytes_are_bounded_and_hits_are_exact(did, max_bytes) -> None:  # type: ignore[no-untyped-def]
    now = Clock()
    cache = MemoryCache(CacheConfig(max_bytes=max_bytes, max_entry_bytes=2000), now)
    latest: dict[tuple[str, int], tuple[CachedAnswer, float]] = {}
    for mark, (what, tenant, number, size, ttl) in enumerate(did):
        if what == "put":
            run(cache.put(key(tenant, number), answer(size, mark), ttl))
            latest[tenant, number] = (answer(size, mark), now.time + ttl)
        elif what == "wait":
            now.time += ttl / 2
        else:
            found = run(cache.get(key(tenant, number)))
            if found is not None:
                kept = latest[tenant, number]
                assert found == kept[0]
                assert kept[1] > now.time
        assert cache.num_bytes <= max_bytes
        assert cache.num_bytes == sum(cache.bytes_of(name) for name in TENANTS)
    now.time += 10
    assert [run(cache.get(key(name, number))) for name in TENANTS for number in range(7)] == [None] * 7 * len(TENANTS)
    assert cache.num_bytes == len(cache) == 0


@given(
    st.permutations(TENANTS),
    st.lists(st.sampled_from([0, 0, 0, 0, 0, 1, 1, 2, 3]), min_size=30, max_size=120),
    st.integers(6_000, 20_000),
)
def test_nothing_is_taken_from_a_tenant_that_holds_less_than_half_of_what_another_does(names, puts, max_bytes) -> None:  # type: ignore[no-untyped-def]
    cache = MemoryCache(CacheConfig(max_bytes=max_bytes))
    for number, place in enumerate(puts):
        storing = names[place]
        before = {name: cache.bytes_of(name) for name in names}
        run(cache.put(key(storing, number), answer(100), 60))
        entry = 100 + 16 + 48 + 512  # equal ones, so that one put moves one of them
        largest = max({**before, storing: before[storing] + entry}.values())
        for name in names:
            if name != storing and cache.bytes_of(name) < before[name]:
                assert before[name] * 2 > largest


def test_an_answer_is_there_for_its_seconds_and_no_longer() -> None:
    now = Clock()
    cache = MemoryCache(CacheConfig(), now)
    for number, ttl in enumerate((1.0, 5.0)):
        run(cache.put(key("a", number), answer(10), ttl))
    for time, is_there in ((0.9, [True, True]), (1.0, [False, True]), (4.9, [False, True]), (5.0, [False, False])):
        now.time = time
        assert [run(cache.get(key("a", number))) is not None for number in range(2)] == is_there
    run(cache.put(key("a", 0), answer(10), 1.0))
    now.time = 5.5
    run(cache.put(key("a", 0), answer(10), 1.0))
    now.time = 6.4
    assert run(cache.get(key("a", 0))) is not None, "another answer has its own seconds"


def test_a_flood_of_one_tenant_pushes_out_its_own_answers_alone() -> None:
    cache = MemoryCache(CacheConfig(max_bytes=100_000))
    for number in range(5):
        run(cache.put(key("quiet", number), answer(1000), 60))
    for number in range(1000):
        run(cache.put(key("loud", number), answer(1000), 60))
    assert all(run(cache.get(key("quiet", number))) is not None for number in range(5))
    assert run(cache.get(key("loud", 999))) is not None
    assert run(cache.get(key("loud", 0))) is None


def test_among_tenants_that_hold_as_much_room_is_made_by_the_one_that_stores() -> None:
    entry = 100 + 16 + 48 + 512
    cache = MemoryCache(CacheConfig(max_bytes=10 * entry))
    for number in range(5):
        for tenant in TENANTS[:2]:
            run(cache.put(key(tenant, number), answer(100), 60))
    for number, storing in enumerate((*TENANTS[:2], *TENANTS[:2]), 5):
        before = {tenant: cache.bytes_of(tenant) for tenant in TENANTS[:2]}
        run(cache.put(key(storing, number), answer(100), 60))
        assert {tenant: cache.bytes_of(tenant) for tenant in TENANTS[:2]} == before == dict.fromkeys(before, 5 * entry)


def test_a_tenant_that_holds_little_keeps_what_it_stores() -> None:
    entry = 100 + 16 + 48 + 512
    cache = MemoryCache(CacheConfig(max_bytes=10 * entry))
    for number in range(10):
        run(cache.put(key(TENANTS[0], number), answer(100), 60))
    for number in range(3):
        run(cache.put(key(TENANTS[1], number), answer(100), 60))
        assert cache.bytes_of(TENANTS[1]) == (number + 1) * entry


def test_the_longest_unused_answer_leaves_first() -> None:
    cache = MemoryCache(CacheConfig(max_bytes=8_000))
    for number in range(4):
        run(cache.put(key("a", number), answer(1000), 60))
    assert run(cache.get(key("a", 0))) is not None
    for number in range(4, 6):
        run(cache.put(key("a", number), answer(1000), 60))
    assert run(cache.get(key("a", 0))) is not None
    assert run(cache.get(key("a", 1))) is None


def test_what_is_too_old_gives_its_bytes_back_without_being_asked_for() -> None:
    now = Clock()
    cache = MemoryCache(CacheConfig(), now)
    run(cache.put(key("a", 0), answer(1000), 1))
    run(cache.put(key("a", 1), answer(1000), 100))
    now.time = 1.0
    run(cache.put(key("b", 0), answer(10), 1))
    assert len(cache) == 2


def test_an_answer_that_is_too_large_is_not_kept_and_displaces_nothing() -> None:
    cache = MemoryCache(CacheConfig(max_bytes=5_000, max_entry_bytes=2_000))
    run(cache.put(key("a", 0), answer(100), 60))
    run(cache.put(key("a", 1), answer(2_001), 60))
    assert run(cache.get(key("a", 1))) is None
    assert run(cache.get(key("a", 0))) is not None
    nothing = MemoryCache(CacheConfig(max_bytes=0))
    run(nothing.put(key("a", 0), answer(0), 60))
    assert len(nothing) == 0


def test_closing_forgets() -> None:
    cache = MemoryCache(CacheConfig())
    run(cache.put(key("a", 0), answer(10), 60))
    asyncio.run(cache.close())
    assert run(cache.get(key("a", 0))) is None
    assert cache.num_bytes == 0
