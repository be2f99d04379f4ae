"""Differences of texts, numbers and labels, against counting."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.compare.answers import Tolerance
from inferd.replay.answers import read_answer
from inferd.replay.difference import difference_of, tensor_difference, text_difference, ulps_between

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(FLOAT32, st.integers(0, 40), st.booleans())
def test_ulps_are_the_steps_from_one_number_to_the_next(value: float, steps: int, up: bool) -> None:
    one = other = np.float32(value)
    for _ in range(steps):
        with np.errstate(over="ignore", under="ignore"):
            other = np.nextafter(other, np.float32(math.inf if up else -math.inf))
    if np.isfinite(other):
        zeros = np.float32(0) in (one, other) or (one < 0) != (other < 0)
        found = ulps_between(np.array([one]), np.array([other]))[0]
        assert found == steps or zeros  # the two zeros are one place, and two steps of nextafter at most
        assert abs(found - steps) <= 1


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_ulps_of_doubles_and_halves_are_symmetric_and_0_for_equal_numbers(values: list[float]) -> None:
    for dtype in (np.float64, np.float16):
        with np.errstate(over="ignore"):
            one = np.array(values, dtype)
        other = one[::-1].copy()
        assert ulps_between(one, other).tolist() == ulps_between(other, one).tolist()
        assert not ulps_between(one, one.copy()).any()


def test_a_value_that_became_no_number_is_infinitely_far() -> None:
    nan = np.float32(math.nan)
    found = tensor_difference("y", np.array([1, nan], np.float32), np.array([nan, nan], np.float32))
    assert found is not None
    assert (found.number_different, found.max_abs, found.max_rel) == (1, math.inf, math.inf)
    assert found.ulps == (0.0, math.inf, math.inf, math.inf)


def test_numbers_have_their_largest_differences_and_how_many_differ() -> None:
    one, other = np.array([1.0, 2.0, 4.0], np.float64), np.array([1.0, 2.5, 4.0], np.float64)
    found = tensor_difference("y", one, other)
    assert found is not None
    assert (found.number, found.number_different, found.max_abs, found.max_rel) == (3, 1, 0.5, 0.2)
    assert tensor_difference("y", one, one.copy()) is None


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (np.zeros((2, 2), np.float32), "float32 [4] became float32 [2, 2]"),
        (np.zeros(4, np.float64), "float32 [4] became float64 [4]"),
        (None, "only one of the answers has it"),
    ],
)
def test_other_shapes_and_datatypes_are_named(other: Any, said: str) -> None:
    found = tensor_difference("y", np.zeros(4, np.float32), other)
    assert found is not None
    assert found.problem == said


def test_the_first_difference_of_a_text_is_shown_with_its_surroundings() -> None:
    one, other = "one two three " * 10 + "four", "one two three " * 10 + "fire"
    found = text_difference("choices", one, other)
    assert (found.first, found.first_word, found.length, found.distance) == (141, 30, 144, 3)
    assert found.before.endswith("four")
    assert found.after.endswith("fire")


def answer(document: Any, route: str = "/v2/models/{model}/infer") -> Any:
    return read_answer(route, 200, json.dumps(document).encode(), is_stream=False)


def output(*scores: float) -> Any:
    return {"outputs": [{"name": "p", "datatype": "FP32", "shape": [1, len(scores)], "data": list(scores)}]}


def test_a_label_that_changed_is_a_flip_and_a_number_beside_it_is_none() -> None:
    flipped = difference_of(answer(output(0.9, 0.1)), answer(output(0.4, 0.6)))
    assert [(one.before, one.after) for one in flipped.flips] == [("0", "1")]
    near = difference_of(answer(output(0.9, 0.1)), answer(output(0.9, 0.1000001)))
    assert (near.is_equal, near.flips, near.num_labels) == (False, (), 1)
    same = difference_of(answer(output(0.9, 0.1)), answer(output(0.9, 0.1)))
    assert (same.is_equal, same.num_labels) == (True, 1)


def test_a_difference_that_has_no_own_part_is_still_one() -> None:
    def scored(logprob: float) -> Any:
        return answer({"choices": [{"text": "a", "logprobs": {"token_logprobs": [logprob]}}]}, "/v1/completions")

    found = difference_of(scored(-0.5), scored(-0.6))
    assert not found.is_equal
    assert "log-probabilities" in found.other


@pytest.mark.parametrize(
    ("before", "after", "tolerance", "beyond"),
    [
        ([1.0, 2.0], [1.0001, 2.0], Tolerance(relative=1e-3, absolute=0.0), 0),
        ([1.0, 2.0], [1.1, 2.0], Tolerance(relative=1e-3, absolute=0.0), 1),
        ([0.0, 2.0], [1e-7, 2.0], Tolerance(relative=1e-3, absolute=0.0), 1),
        ([0.0, 2.0], [1e-7, 2.0], Tolerance(relative=0.0, absolute=1e-6), 0),
        ([float("inf"), 1.0], [float("inf"), 1.5], Tolerance(relative=1.0, absolute=0.0), 0),
        ([1.0], [float("nan")], Tolerance(relative=1.0, absolute=9.0), 1),
        ([float("nan"), 1.0], [float("nan"), 1.1], Tolerance(relative=0.5, absolute=0.0), 0),
        ([1.0], [float("inf")], Tolerance(relative=1.0, absolute=9.0), 1),
    ],
)
def test_values_outside_of_a_tolerance_are_counted_as_numpy_has_it(
    before: list[float], after: list[float], tolerance: Tolerance, beyond: int
) -> None:
    one, other = np.array(before), np.array(after)
    found = tensor_difference("y", one, other, tolerance)
    assert found is not None
    assert found.number_beyond == beyond
    near = np.isclose(other, one, rtol=tolerance.relative, atol=tolerance.absolute, equal_nan=True)
    assert beyond == int((~near).sum())


def test_whole_numbers_words_and_labels_have_no_tolerance() -> None:
    wide = Tolerance(relative=1.0, absolute=100.0)
    whole = tensor_difference("y", np.array([1, 2]), np.array([1, 3]), wide)
    words = tensor_difference("y", np.array([b"a"], object), np.array([b"b"], object), wide)
    assert whole is not None
    assert words is not None
    assert (whole.number_beyond, words.number_beyond) == (1, 1)
    assert not difference_of(answer(output(0.9, 0.1)), answer(output(0.4, 0.6)), wide).is_within, "another class"
    assert difference_of(answer(output(0.9, 0.1)), answer(output(0.8, 0.2)), wide).is_within
    assert not difference_of(answer(output(0.9, 0.1)), answer(output(0.8, 0.2))).is_within
