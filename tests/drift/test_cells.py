"""Values become counts of a fixed number of cells, and are compared by sums up to each edge, or by name."""

from __future__ import annotations

import math
import operator
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from inferd.drift.cells import FEW, MAX_NAMES, NUM_PARTS, Cells, Value, cell_words, chosen_cells, compared, num_compared

numbers = st.one_of(st.integers(-50, 50), st.floats(-1e6, 1e6), st.sampled_from([0.0, 1.0]))
values = st.one_of(st.lists(numbers, min_size=1), st.lists(st.text(max_size=2), min_size=1))


def counted(cells: Cells, of: list[Value]) -> list[int]:
    counts = [0.0] * len(cells)
    cells.count(of, counts)
    return [int(count) for count in counts]


@given(values, st.data())
def test_every_value_is_in_one_cell_and_sets_are_what_their_words_say(
    chosen_by: list[Value], data: st.DataObject
) -> None:
    cells = chosen_cells(chosen_by)
    of = data.draw(st.lists(st.sampled_from(chosen_by) if isinstance(chosen_by[0], str) else numbers))
    counts = counted(cells, of)
    assert sum(counts) == len(of)
    assert len(cells) <= max(MAX_NAMES + 1, 2 * FEW + 1, NUM_PARTS)
    found = list(compared(cells, [0] * len(cells), counts))
    assert len(found) == num_compared(cells)
    if cells.edges is not None:
        for edge, one in zip(cells.edges, found, strict=True):
            assert one.window == sum(float(value) <= edge for value in of)
    else:
        assert sum(one.window for one in found) == len(of)


def test_few_numbers_have_a_cell_each_and_what_is_between_them_another() -> None:
    cells = chosen_cells([1, 1, 1, 2])
    assert counted(cells, [1, 1, 2, 0.5, 1.5, 3]) == [1, 2, 1, 1, 1]
    assert [one.words for one in compared(cells, [0] * 5, [0] * 5)] == [
        "is below 1",
        "is at most 1",
        "is below 2",
        "is at most 2",
    ]


def test_many_numbers_are_cut_into_parts_of_about_one_size() -> None:
    cells = chosen_cells([float(number) for number in range(1000)])
    assert counted(cells, list(range(1000))) == [101, *[100] * 8, 99]


def test_rare_and_unknown_names_share_a_cell() -> None:
    names = [f"name {number:02d}" for number in range(MAX_NAMES + 5) for _ in range(100 - number)]
    cells = chosen_cells(names)
    counts = counted(cells, [*names, "other", "other"])
    common = Counter(names)
    assert counts[:MAX_NAMES] == [common[f"name {number:02d}"] for number in range(MAX_NAMES)]
    assert counts[-1] == sum(common[f"name {number:02d}"] for number in range(MAX_NAMES, MAX_NAMES + 5)) + 2
    assert [one.words for one in compared(cells, counts, counts)][-2:] == ["is 'name 30'", "is another one"]


def test_a_number_that_is_none_harms_nothing() -> None:
    cells = chosen_cells([1.0, 2.0, 3.0])
    assert sum(counted(cells, [math.inf, -math.inf, math.nan])) == 3


@given(st.lists(st.integers(-30, 30), min_size=1), st.integers(-40, 40))
def test_the_words_of_a_cell_are_true_of_its_numbers(chosen_by: list[int], value: int) -> None:
    cells = chosen_cells([float(number) for number in chosen_by])
    words = cell_words(cells)
    assert len(words) == len(cells)
    (cell,) = [place for place, count in enumerate(counted(cells, [float(value)])) if count]

    def is_true(text: str) -> bool:
        said = text.split()
        if len(said) == 1:
            return value == float(said[0])
        relations = {"to": operator.le, "below": operator.lt, "above": operator.gt, "from": operator.ge}
        parts = [word for word in said if word != "up"]
        return all(relations[word](value, float(number)) for word, number in zip(parts[::2], parts[1::2], strict=True))

    assert [is_true(text) for text in words] == [place == cell for place in range(len(words))]
    assert cell_words(Cells(names=("a", "b"))) == ["a", "b", "others"]
