"""The window forgets by time and its quantiles are near the values that were added."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.window import ACCURACY, SMALLEST, Window

DURATIONS = st.floats(min_value=SMALLEST, max_value=1e5)


@given(st.lists(DURATIONS, min_size=1, max_size=200), st.floats(0.0, 1.0))
def test_a_quantile_is_within_the_accuracy_of_the_exact_one(values: list[float], share: float) -> None:
    window = Window()
    for value in values:
        window.add(value, now=100.0)
    exact = sorted(values)[int(share * (len(values) - 1))]
    (found,) = window.quantiles([share], now=100.0)
    assert found is not None
    assert abs(found - exact) <= exact * ACCURACY * (1 + 1e-9)


FEW = st.sampled_from([0.001, 0.0011, 1.0, 50.0])


@given(st.lists(st.tuples(st.lists(FEW, max_size=20), st.integers(0, 59)), max_size=8), st.floats(0.0, 1.0))
def test_values_count_as_often_as_they_were_added_whenever_and_with_whatever_others(
    added: list[tuple[list[float], int]], share: float
) -> None:
    added.sort(key=lambda pair: pair[1])
    together, one_by_one = Window(), Window()
    for values, now in added:
        together.add_many(values, now)
        for value in values:
            one_by_one.add(value, now)
    exact = sorted(value for values, _ in added for value in values)
    assert together.count(59) == one_by_one.count(59) == len(exact)
    found = together.quantiles([share], 59)
    assert found == one_by_one.quantiles([share], 59)
    if exact:
        (near,) = found
        assert near is not None
        assert abs(near - exact[int(share * (len(exact) - 1))]) <= near * 2 * ACCURACY


@given(st.lists(st.tuples(DURATIONS, st.floats(0.0, 300.0)), max_size=100))
def test_counts_what_is_young_enough_and_nothing_that_is_too_old(added: list[tuple[float, float]]) -> None:
    window = Window(span_s=60.0, num_slots=12)
    added.sort(key=lambda pair: pair[1])
    for value, at in added:
        window.add(value, now=at)
    counted = window.count(now=300.0)
    # Forgetting is in steps of five seconds: between 55 and 60 seconds old is either.
    assert sum(at > 300.0 - 55.0 for _, at in added) <= counted <= sum(at >= 300.0 - 60.0 for _, at in added)


def test_an_empty_window_has_no_quantiles() -> None:
    window = Window()
    window.add(1.0, now=0.0)
    assert window.quantiles([0.5, 0.99], now=61.0) == [None, None]
    assert window.count(now=61.0) == 0


def test_size_does_not_grow_with_traffic() -> None:
    window = Window(span_s=60.0, num_slots=12)
    for i in range(20_000):
        window.add(0.001 * (1 + i % 1000), now=i * 0.1)
    assert len(window._slots) <= 12
    assert sum(len(counts) for counts in window._slots.values()) <= 12 * 400


def test_nothing_is_shorter_than_the_smallest() -> None:
    window = Window()
    window.add(0.0, now=0.0)
    (median,) = window.quantiles([0.5], now=0.0)
    assert median is not None
    assert abs(median - SMALLEST) <= SMALLEST * 2 * ACCURACY
