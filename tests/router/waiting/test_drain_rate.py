"""How fast a queue empties is measured only while it is one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.router.waiting.drain_rate import SOUND_ENDS, WINDOW_S, DrainRate


@given(st.integers(SOUND_ENDS + 1, 60), st.floats(0.01, 0.4), st.integers(1, 100))
def test_a_steady_rate_is_found_and_doubted_by_its_standard_error(count: int, gap_s: float, ahead: int) -> None:
    rate = DrainRate()
    for number in range(count):
        rate.ended(number * gap_s, has_waiting=True)
    now = (count - 1) * gap_s
    assert rate.per_s(now) == pytest.approx(1 / gap_s)
    wait_s = rate.wait_s(ahead, now)
    assert wait_s == pytest.approx(ahead * gap_s)
    assert not rate.surely_longer_than(wait_s or 0.0, ahead, now)
    assert rate.surely_longer_than((wait_s or 0.0) / 2, ahead, now)


def test_ends_with_an_empty_queue_say_nothing_of_capacity() -> None:
    rate = DrainRate()
    for number in range(100):
        rate.ended(float(number), has_waiting=False)
    assert rate.per_s(99.0) is None
    assert not rate.surely_longer_than(0.001, 1000, 99.0)
    assert rate.roughly_wait_s(10, 99.0) == pytest.approx(10.0)


def test_a_standstill_lowers_the_rate_and_an_old_stretch_is_forgotten() -> None:
    rate = DrainRate()
    for number in range(10):
        rate.ended(number * 0.1, has_waiting=True)
    assert (rate.per_s(0.9) or 0) > (rate.per_s(5.0) or 0) > 0
    assert rate.per_s(1.0 + WINDOW_S) is None
