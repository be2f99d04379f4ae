"""Windows alarm as rarely as they promise, whatever the traffic is, and name what has changed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.drift.cells import Cells, Value, chosen_cells
from inferd.drift.windows import MAX_LEVEL, MAX_PAST, SIZES, Counted, Windows, compare, read

NAMES = Cells(names=("a", "b"))


def multinomials(total: int, shares: tuple[float, ...]) -> dict[tuple[int, ...], float]:
    """Every way in which ``total`` values fall into cells, and its probability."""
    found = {}
    for counts in itertools.product(range(total + 1), repeat=len(shares)):
        if sum(counts) == total:
            ways = math.factorial(total) / math.prod(math.factorial(count) for count in counts)
            found[counts] = ways * math.prod(share**count for share, count in zip(shares, counts, strict=True))
    return found


@pytest.mark.parametrize("cells", [NAMES, Cells(edges=(0.0, 1.0))], ids=["names", "numbers"])
@pytest.mark.parametrize("shares", [(0.5, 0.3, 0.2), (0.98, 0.01, 0.01), (0.0, 0.0, 1.0)])
def test_an_unchanged_window_is_below_a_level_at_most_as_often_as_that(cells: Cells, shares: tuple[float, ...]) -> None:
    """By enumeration of every reference and every window: exact, for any shares."""
    references, windows = multinomials(12, shares), multinomials(9, shares)
    found = [
        (compare(Counted(cells, reference), window).p, p * q)
        for reference, p in references.items()
        for window, q in windows.items()
    ]
    assert sum(weight for _, weight in found) == pytest.approx(1.0)
    for level in (0.3, 0.1, 0.01, 1e-3, 1e-4):
        assert sum(weight for p, weight in found if p <= level) <= level


def test_a_rare_name_is_no_false_alarm_where_chi_squared_would_be_one() -> None:
    """Three of a name that the reference has once in 9,000: chi-squared says 1.5e-5."""
    reference, window = Counted(Cells(names=("a",)), (8999, 1)), (997, 3)
    stats = pytest.importorskip("scipy.stats")
    said = stats.chi2_contingency([reference.counts, window], correction=False).pvalue
    assert said < 2e-5 < 1e-2 < compare(reference, window).p


def test_the_levels_of_all_tests_add_up_to_the_rate_times_the_time() -> None:
    counted = Counted(NAMES, (50, 50, 0))
    windows = Windows(counted, 10, 1e-4, 0.0, now=0.0)
    random = np.random.default_rng(1)
    now, spent, num_tests = 0.0, 0.0, 0
    for _ in range(SIZES[-1] * 20):
        now += float(random.exponential(2.0))
        for readings in windows.add(["a"] * 10, now):
            spent += sum(reading.level for reading in readings)
            num_tests += len(readings)
    assert spent == pytest.approx(1e-4 * now)
    assert num_tests == sum(SIZES[-1] * 20 // size for size in SIZES)
    (late,) = windows.add(["a"] * 10, now + 1e9)
    assert late[0].level == MAX_LEVEL


@given(st.lists(st.integers(1, 90), min_size=1, max_size=30))
def test_windows_do_not_depend_on_how_values_come(pieces: list[int]) -> None:
    values: list[Value] = [float(number % 7) for number in range(sum(pieces))]
    cells = chosen_cells(values)
    counted = Counted(cells, (10,) * len(cells))
    at_once, in_pieces = Windows(counted, 20, 1e-3, 0.0, 0.0), Windows(counted, 20, 1e-3, 0.0, 0.0)
    whole = at_once.add(values, 5.0)
    told = []
    for size in pieces:
        part, values = values[:size], values[size:]
        told += in_pieces.add(part, 5.0)
    assert told == whole
    assert [len(readings) for readings in whole] == [
        1 + (number % 4 == 0) + (number % 16 == 0) for number in range(1, len(whole) + 1)
    ]


def test_a_change_is_found_and_named_and_ends() -> None:
    random = np.random.default_rng(3)

    def drawn(shares: tuple[float, float], total: int) -> list[Value]:
        return [str(name) for name in random.choice(["a", "b"], size=total, p=shares)]

    windows = Windows(Counted(NAMES, (6300, 2700, 0)), 1000, 1e-6, 0.0, now=0.0)
    assert not any(reading.is_alarm for (reading, *_) in windows.add(drawn((0.7, 0.3), 3000), 300.0))
    ((reading, *_),) = windows.add(drawn((0.5, 0.5), 1000), 400.0)
    assert reading.is_alarm
    assert windows.is_drifting
    assert windows.num_alarms == 2, "the window of 4,000 that ends with it is one too"
    assert reading.p <= reading.level == pytest.approx(1e-6 * 100 / 3)
    assert reading.distance > reading.by_chance
    assert "% of the last 1,000, and in" in reading.sentence
    assert reading.sentence.startswith(("is 'a' in 4", "is 'a' in 5", "is 'b' in 4", "is 'b' in 5"))
    windows.add(drawn((0.7, 0.3), 16_000), 500.0)
    windows.add(drawn((0.7, 0.3), 12_000), 600.0)
    assert not windows.is_drifting


def test_a_change_below_min_psi_is_no_alarm() -> None:
    counted, window = Counted(NAMES, (5000, 5000, 0)), (600, 400, 0)
    assert read(counted, window, 1e-3, 0.0).is_alarm
    index = read(counted, window, 1e-3, 0.0).distance
    assert read(counted, window, 1e-3, index).is_alarm
    assert not read(counted, window, 1e-3, index * 1.01).is_alarm


def test_many_earlier_windows_are_thinned_and_a_time_with_an_alarm_keeps_it() -> None:
    windows = Windows(Counted(NAMES, (500, 500, 0)), 10, 1e-4, 0.0, now=0.0)
    for number in range(MAX_PAST * 40):
        values: list[Value] = ["a", "b"] * 5 if number != 7 else ["c"] * 10
        windows.add(values, float(number))
        smallest = windows.last[0]
        assert len(smallest.past) <= MAX_PAST
        assert smallest.past[-1].reading == smallest.reading
        times = [one.at for one in smallest.past]
        assert times == sorted(times)
    alarms = [one.at for one in windows.last[0].past if one.reading.is_alarm]
    assert alarms == [7.0]
    assert windows.since is not None
    assert windows.since > 7.0
