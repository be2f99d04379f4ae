"""Two answers to one request: equal, or where and by how much they differ."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inferd.compare.answers import EXACT, Answer, Label, Numbers, Text, Tolerance, compare, first_difference

_numbers = st.lists(st.floats(width=32), max_size=20)


@given(st.text(), st.text())
def test_the_first_differing_character_is_that_of_the_common_prefix(one: str, other: str) -> None:
    at = first_difference(one, other)
    assert at == (
        None
        if one == other
        else next(
            (i for i, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), min(len(one), len(other))
        )
    )


@given(st.text(), st.integers(0, 50), st.characters())
def test_a_changed_character_is_found(text: str, at: int, character: str) -> None:
    at = min(at, len(text))
    changed = text[:at] + character + text[at + 1 :]
    found = first_difference(text, changed)
    assert found == (None if changed == text else at)


@given(_numbers, st.data(), st.floats(0, 1), st.floats(0, 1))
def test_numbers_are_within_a_tolerance_exactly_where_numpy_says_so(
    values: list[float], data: st.DataObject, relative: float, absolute: float
) -> None:
    others = data.draw(st.lists(st.floats(width=32), min_size=len(values), max_size=len(values)))
    shape = (len(values),)
    comparison = compare(
        (Numbers("x", values, shape),), (Numbers("x", others, shape),), Tolerance(relative=relative, absolute=absolute)
    )
    close = np.isclose(others, values, rtol=relative, atol=absolute, equal_nan=True)
    assert comparison.is_equal == bool(np.all(close))
    if not comparison.is_equal:
        assert comparison.differences[0].position == int(np.argmin(close))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(0, 10))
def test_the_largest_errors_are_reported_also_within_the_tolerance(values: list[float], more: float) -> None:
    others = [*values[:-1], values[-1] + more]
    found = compare((Numbers("x", values),), (Numbers("x", others),), Tolerance(absolute=100.0))
    assert found.is_equal
    assert found.max_abs == abs(others[-1] - values[-1])


@given(st.lists(st.sampled_from([Text("a", "x"), Label("b", "y"), Numbers("c", (1.0, math.nan), (2,))]), unique=True))
def test_every_answer_equals_itself(parts: list[Text | Label | Numbers]) -> None:
    assert compare(tuple(parts), tuple(parts)).is_equal


def test_whole_numbers_have_no_tolerance() -> None:
    wide = Tolerance(relative=1.0, absolute=10.0)
    one, other = Numbers("class", (1,), (1,), True), Numbers("class", (2,), (1,), True)
    (difference,) = compare((one,), (other,), wide).differences
    assert (difference.kind, difference.position, difference.one, difference.other) == ("numbers", 0, "1", "2")


def test_a_text_differs_at_its_first_character_that_does() -> None:
    (difference,) = compare((Text("t", "one two"),), (Text("t", "one tow"),)).differences
    assert (difference.part, difference.position, difference.one, difference.other) == ("t", 5, "wo", "ow")


def test_a_label_differs_whatever_the_tolerance() -> None:
    found = compare((Label("l", "spam"),), (Label("l", "ham"),), Tolerance(relative=1.0))
    assert [difference.kind for difference in found.differences] == ["label"]


def test_parts_that_are_missing_of_another_kind_or_of_another_shape_differ_in_form() -> None:
    answer: Answer = (Text("text", "a"), Numbers("x", (1.0, 2.0), (2,)), Label("l", "a"))
    other: Answer = (Label("text", "a"), Numbers("x", (1.0, 2.0), (1, 2)), Text("more", "b"))
    found = compare(answer, other, EXACT)
    assert [(one.part, one.kind, one.position) for one in found.differences] == [
        ("text", "form", None),
        ("x", "form", None),
        ("l", "form", None),
        ("more", "form", None),
    ]
    assert found.num_parts == 4
    ragged = compare((Numbers("x", (1.0,), (1,)),), (Numbers("x", (1.0, 2.0), (1,)),))
    assert [one.kind for one in ragged.differences] == ["form"]


def test_an_infinite_error_is_one_and_equal_infinities_are_none() -> None:
    assert compare((Numbers("x", (math.inf,)),), (Numbers("x", (math.inf,)),)).max_abs == 0.0
    found = compare((Numbers("x", (1.0,)),), (Numbers("x", (math.nan,)),), Tolerance(relative=1.0, absolute=1e9))
    assert found.max_abs == math.inf
    assert not found.is_equal
