"""What does not fit a model's contract is told with the input, what was expected and what came."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.errors import InvalidRequest
from inferd.predict.check import Checker
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.contract import NUMPY, Array, Contract
from inferd.types import TensorSpec


def contract(*inputs: TensorSpec, **fields: object) -> Contract:
    given = {"max_batch_size": 8, "because": "declared", "outputs": (TensorSpec("y", "FP32", (-1, 1)),), **fields}
    return Contract(inputs=inputs, **given)  # type: ignore[arg-type]


TWO = contract(TensorSpec("x", "FP32", (-1, 2)), TensorSpec("mask", "BOOL", (-1,), is_optional=True))


def check(contract: Contract, inputs: dict[str, Array], said: dict[str, str] | None = None, **fields: object) -> Array:
    decoded = DecodedRequest(inputs=inputs, datatypes=said, **fields)  # type: ignore[arg-type]
    return Checker(contract).check(decoded)[0][contract.inputs[0].name]


def test_what_fits_is_not_copied() -> None:
    array = np.zeros((3, 2), np.float32)
    found, rows = Checker(TWO).check(DecodedRequest(inputs={"x": array}, datatypes={"x": "FP32"}))
    assert found["x"] is array
    assert rows == 3


@pytest.mark.parametrize(
    ("inputs", "said", "told"),
    [
        ({}, None, ["'x'", "missing", "FP32", "[-1, 2]"]),
        ({"x": np.zeros((1, 2), np.float32), "z": np.zeros(1)}, None, ["no input 'z'", "'mask', 'x'"]),
        ({"x": np.zeros((1, 2))}, {"x": "FP64"}, ["'x'", "expected FP32", "got the datatype FP64"]),
        ({"x": np.zeros((1, 3), np.float32)}, None, ["'x'", "[-1, 2]", "got the shape [1, 3]"]),
        ({"x": np.zeros(2, np.float32)}, None, ["'x'", "[-1, 2]", "got the shape [2]"]),
        ({"x": np.zeros((0, 2), np.float32)}, None, ["'x'", "[0, 2]", "at least one row"]),
        (
            {"x": np.zeros((2, 2), np.float32), "mask": np.zeros(3, np.bool_)},
            None,
            ["same number of rows", "[2, 2]", "[3]"],
        ),
        ({"x": np.array([[b"a", b"b"]], np.object_)}, None, ["'x'", "expected FP32", "got BYTES"]),
        ({"x": np.zeros((1, 2)), "mask": np.zeros(1)}, None, ["'mask'", "expected BOOL", "got FP64"]),
        ({"x": np.full((1, 2), 1e300)}, None, ["'x'", "too large"]),
        ({"x": np.zeros((1, 2), np.complex64)}, None, ["'x'", "complex64"]),
    ],
)
def test_what_does_not_fit_is_told(inputs: dict[str, Array], said: dict[str, str] | None, told: list[str]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check(TWO, inputs, said)
    for words in told:
        assert words in raised.value.message


def test_an_output_that_is_not_there_cannot_be_wanted() -> None:
    with pytest.raises(InvalidRequest, match=r"no output 'z'; its outputs are 'y'"):
        check(TWO, {"x": np.zeros((1, 2), np.float32)}, wanted=("z",))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_is_refused_where_the_model_refuses_it(value: float) -> None:
    array = np.array([[value, 1.0]], np.float32)
    check(TWO, {"x": array})
    with pytest.raises(InvalidRequest, match="'x' holds NaN or infinity"):
        check(contract(TensorSpec("x", "FP32", (-1, 2)), refuses_nan=True), {"x": array})


@pytest.mark.parametrize(
    ("datatype", "values", "problem"),
    [
        ("INT8", [1.0, -128.0], None),
        ("INT8", [200], "beyond -128 to 127"),
        ("UINT8", [-1], "beyond 0 to 255"),
        ("INT64", [1.5], "fractions"),
        ("INT64", [float("nan")], "no numbers"),
        ("FP16", [1e6], "too large"),
        ("FP32", [1, 2, 3], None),
        ("BOOL", [True, False], None),
        ("BOOL", [1], "got INT64"),
        ("INT32", [True], "got BOOL"),
    ],
)
def test_values_of_no_said_datatype_are_cast_when_none_of_them_changes(
    datatype: str, values: list[float], problem: str | None
) -> None:
    one = contract(TensorSpec("x", datatype, (-1,)))
    array = np.array(values)
    if problem is None:
        found = check(one, {"x": array})
        assert found.dtype == NUMPY[datatype]
        np.testing.assert_array_equal(found, array)
    else:
        with pytest.raises(InvalidRequest, match=problem):
            check(one, {"x": array})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=20))
def test_a_float_becomes_the_nearest_bfloat16(values: list[float]) -> None:
    array = np.array(values, np.float32)
    bits = check(contract(TensorSpec("x", "BF16", (-1,))), {"x": array})
    assert bits.dtype == np.uint16
    found = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    below = ((array.view(np.uint32) >> 16) << 16).view(np.float32).astype(np.float64)
    above = (((array.view(np.uint32) >> 16) + 1) << 16).view(np.float32).astype(np.float64)
    exact = array.astype(np.float64)
    assert (np.abs(exact - found) <= np.minimum(np.abs(exact - below), np.abs(exact - above))).all()


def test_texts_become_bytes() -> None:
    found = check(contract(TensorSpec("x", "BYTES", (-1,))), {"x": np.array(["ä", "b"])})
    assert found.tolist() == ["ä".encode(), b"b"]


def test_inputs_of_any_rank_and_models_without_a_batch_take_what_comes() -> None:
    free = contract(TensorSpec("x", "FP32", (-1,)), any_rank=("x",), max_batch_size=0)
    found, rows = Checker(free).check(DecodedRequest(inputs={"x": np.zeros((2, 3, 4), np.float32)}))
    assert found["x"].shape == (2, 3, 4)
    assert rows == 1
