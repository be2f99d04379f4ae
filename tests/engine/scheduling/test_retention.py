"""What a cached block is worth: the learnt table against its definition, and what it learns from plain traffic."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.engine.scheduling.retention import HORIZON, MOST_USES, REMEMBERED, Histogram, Retention, worth_by_age

AGES = len(worth_by_age([[0.0] * 9] * MOST_USES, [[0.0] * 9] * MOST_USES)[0])
WIDTHS = [1.0] + [2.0**i for i in range(AGES - 1)]
COUNTS = st.lists(
    st.lists(st.integers(0, 9).map(float), min_size=AGES, max_size=AGES), min_size=MOST_USES, max_size=MOST_USES
)


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8), digest_size=32).digest()


def one_by_one(reused: list[float], left: list[float], uses: int, start: int) -> float:
    """The worth by its definition: blocks, and for each age of eviction which were reused and how long they stayed."""
    blocks = [(age, 1.0, True) for age in range(AGES) for _ in range(int(reused[age]))]
    blocks += [(age, 1.0, False) for age in range(AGES) for _ in range(int(left[age]))]
    rest = 1.0  # the imagined block, in parts
    for age in range(AGES):
        blocks.append((age, rest * 0.05 * uses, True))
        rest *= 1 - 0.05 * uses
    blocks.append((AGES, rest, False))
    best = 0.0
    for stop in range(start, AGES):
        chance = sum(weight for age, weight, again in blocks if again and start <= age <= stop)
        time = sum(
            weight * WIDTHS[age] * (0.5 if end == age else 1.0)
            for end, weight, _ in blocks
            for age in range(start, min(end, stop) + 1)
        )
        best = max(best, chance / time)
    return best


@settings(max_examples=25, deadline=None)
@given(COUNTS, COUNTS)
def test_worth_is_the_best_reuse_per_time_kept(reused: Histogram, left: Histogram) -> None:
    worth = worth_by_age(reused, left)
    expected = [[one_by_one(reused[u], left[u], u + 1, age) for age in range(AGES)] for u in range(MOST_USES)]
    for uses in range(1, MOST_USES):  # of reused blocks: never less than older or less used ones
        for age in reversed(range(AGES)):
            expected[uses][age] = max(expected[uses][age], expected[uses - 1][age], *expected[uses][age + 1 : age + 2])
    for row, expected_row in zip(worth, expected, strict=True):
        assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(row, expected_row, strict=True))


@given(COUNTS, COUNTS)
def test_no_block_is_worth_less_than_one_behind_it(reused: Histogram, left: Histogram) -> None:
    """A beginning was used at least as often as its ends, and at least as late."""
    worth = worth_by_age(reused, left)
    for uses in range(2, MOST_USES + 1):
        for age in range(AGES):
            for fewer in range(1, uses + 1):
                older = range(age + 1, AGES) if fewer == uses else range(age, AGES)
                assert all(worth[uses - 1][age] >= worth[fewer - 1][later] for later in older)


def test_before_anything_is_known_the_older_and_the_less_used_is_worth_less() -> None:
    retention = Retention(64)
    ages = [retention.now]
    for number in range(40):
        ages.append(retention.released([(key(4 * number + i), 1) for i in range(4)]))
    for uses in range(1, MOST_USES + 1):
        worth = [retention.worth(uses, at) for at in ages]
        assert worth == sorted(worth)
        assert worth[0] < worth[-1]
        if uses > 1:
            assert all(retention.worth(uses - 1, at) < more for at, more in zip(ages, worth, strict=True))


def follow(retention: Retention, keys: Iterable[int]) -> None:
    """Requests for one block each, one after the other, none of them ever cached."""
    for number in keys:
        uses = retention.computed(key(number))
        retention.released([(key(number), uses)])
        retention.evicted(key(number), uses)


def test_what_comes_back_late_is_worth_most_shortly_before() -> None:
    """Every key comes back once, four times the cache's size later."""
    size = 64
    retention = Retention(size)
    waves = [range(start, start + 4 * size) for start in range(0, 40 * size, 4 * size)]
    for wave in waves:
        follow(retention, wave)
        follow(retention, wave)
    young, soon, late = retention.now, retention.now - 3 * size, retention.now - HORIZON * size
    assert retention.worth(1, soon) > retention.worth(1, young) > retention.worth(1, late)


def test_uses_are_remembered_for_a_while_after_eviction() -> None:
    retention = Retention(2)
    retention.evicted(key(0), 3)
    assert retention.computed(key(0)) == 4
    assert retention.computed(key(0)) == 1
    retention.evicted(key(0), MOST_USES)
    assert retention.computed(key(0)) == MOST_USES
    for number in range(2 * REMEMBERED + 1):
        retention.evicted(key(number), 2)
    assert retention.computed(key(0)) == 1
    assert retention.computed(key(1)) == 3


def test_a_large_cache_follows_a_sample_of_keys() -> None:
    """As many as make a table, not as many as there are."""
    retention = Retention(1 << 16)
    for number in range(1 << 13):
        retention.released([(key(number), 1)])
    for number in range(1 << 13):
        retention.asked(key(number))
    seen = sum(map(sum, retention._reused))
    assert 1 <= seen <= 60  # about one in 512


def test_every_release_is_counted_once_at_the_age_of_its_reuse_or_as_never_reused() -> None:
    """A cache of 64 blocks: every key is followed for 1,024 releases, and the table is fitted once in 1,024."""
    retention = Retention(64)
    for number in range(100):
        retention.released([(key(number), 1)])
    for number in (99, 95, 0, 0, 500):  # ages of 0, 4 and 99 releases; the others are not followed
        retention.asked(key(number))
    retention.released([(key(99), 2)])
    retention.asked(key(99))
    expected = [[0.0] * AGES for _ in range(MOST_USES)]
    for uses, age in ((1, 0), (1, 1), (1, 5), (2, 0)):
        expected[uses - 1][age] += 1.0
    assert retention._reused == expected
    before = retention._worth
    retention.released([(key(number), 1) for number in range(1000, 1000 + 922)])
    assert retention._worth == before, "1,023 releases"
    retention.released([(key(2000), 1)])
    assert retention._worth != before
    for number in range(3000, 3000 + 1024):
        retention.released([(key(number), 1)])
    left = [[0.0] * AGES for _ in range(MOST_USES)]
    left[0][-1] = 97 + 923.0  # released up to 1,024, three of the first hundred were reused
    kept = 1 - 1 / 64
    assert retention._reused == [[number * kept * kept for number in row] for row in expected]
    assert retention._left == [[number * kept for number in row] for row in left]
    for age in range(1024):
        left[0][(age // 4).bit_length()] += 1.0
    assert retention._worth == worth_by_age([[number * kept for number in row] for row in expected], left)
