"""Values without a declared shape: nested JSON to arrays by the model's inputs, and arrays to nested JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.predict.test_v2_codec import info

from inferd.errors import InvalidRequest
from inferd.predict.codecs.values import (
    array_of,
    fitted,
    is_bytes,
    named_inputs,
    nested,
    only_input,
    rows_of,
    wanted_outputs,
)
from inferd.predict.contract import Contract, object_array
from inferd.predict.runtime import Result
from inferd.types import TensorSpec


def spec(datatype: str, *shape: int, name: str = "x", is_optional: bool = False) -> TensorSpec:
    return TensorSpec(name, datatype, shape, is_optional=is_optional)


def contract(*inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = (), rows: int = 0, **more: Any) -> Contract:
    because = "declared" if rows else None
    return Contract(inputs=inputs, outputs=outputs, max_batch_size=rows, because=because, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("datatype", "value", "expected"),
    [
        ("FP32", 3, np.float64(3)),
        ("FP32", [1, None], np.array([1.0, np.nan])),
        ("FP32", [[1, 2.5], [True, None]], np.array([[1.0, 2.5], [1.0, np.nan]])),
        ("INT64", [1, 2.5], np.array([1.0, 2.5])),
        ("INT64", [1, 2], np.array([1, 2])),
        ("INT64", [True, 2], np.array([1, 2])),
        ("UINT64", [2**63 - 1], np.array([2**63 - 1], np.int64)),
        ("UINT64", [2**63], np.array([2**63], np.uint64)),
        ("BOOL", [[True], [False]], np.array([[True], [False]])),
        ("INT8", [True, False], np.array([True, False])),
        ("FP32", [], np.zeros(0)),
        ("FP32", [[], []], np.zeros((2, 0))),
        ("FP32", [[[1]]], np.ones((1, 1, 1))),
    ],
)
def test_numbers_have_the_datatype_that_they_are_written_in(datatype: str, value: object, expected: Any) -> None:
    found = array_of(spec(datatype, -1), value)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)


def test_texts_are_bytes_also_as_base64() -> None:
    found = array_of(spec("BYTES", -1), [["\u00e9", {"b64": "AP8="}]])
    assert (found.shape, found.tolist()) == ((1, 2), [["\u00e9".encode(), b"\x00\xff"]])
    assert is_bytes({"b64": "AP8="})
    assert not is_bytes({"b64": "AP8=", "x": 1})
    assert not is_bytes("b64")


@pytest.mark.parametrize(
    ("datatype", "value", "said"),
    [
        ("FP32", [[1], [2, 3]], "has lists of different lengths (1 and 2)"),
        ("FP32", [1, [2]], "takes FP32, and got lists and numbers"),
        ("INT64", [1, None], "takes INT64, and got null and numbers"),
        ("BOOL", [True, 1], "takes BOOL, and got numbers and truth values"),
        ("BOOL", [True, 1.5], "takes BOOL, and got numbers and truth values"),
        ("FP32", "1", "takes FP32, and got texts"),
        ("FP32", {"a": 1}, "takes FP32, and got objects"),
        ("BYTES", ["a", 1, None], "takes texts, and got null and numbers"),
        ("BYTES", {"b64": 1}, 'takes texts, or bytes as {"b64": "..."}, and got another object'),
        ("BYTES", {"b64": "", "c": ""}, 'takes texts, or bytes as {"b64": "..."}, and got another object'),
        ("BYTES", {"b64": "A"}, "has a b64 that is not base64"),
        ("INT64", [2**64], "has a whole number of more than 64 bits"),
        ("INT64", [-(2**63) - 1], "has a whole number of more than 64 bits"),
    ],
)
def test_values_that_an_input_cannot_have_are_named(datatype: str, value: object, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        array_of(spec(datatype, -1), value)
    assert f"The input 'x' {said}" in caught.value.message
    assert caught.value.param == "inputs.x"


def test_lists_are_nested_up_to_the_most_dimensions() -> None:
    value: Any = 1
    for _ in range(32):
        value = [value]
    assert array_of(spec("INT64", -1), value).shape == (1,) * 32
    with pytest.raises(InvalidRequest, match="is nested more than 32 deep"):
        array_of(spec("INT64", -1), [value])


@pytest.mark.parametrize(
    ("wanted", "rows", "given", "shape"),
    [
        ((2, 2), 0, (1, 2, 2), (2, 2)),
        ((2, 2), 0, (2, 2, 2), (2, 2, 2)),
        ((-1, 2), 8, (1, 3, 2), (1, 3, 2)),
        ((-1, 1), 8, (3,), (3, 1)),
        ((-1, -1), 8, (3,), (3, 1)),
        ((-1, 4), 8, (3,), (3,)),
        ((-1,), 8, (), (1,)),
        ((1,), 0, (), (1,)),
        ((-1, 1), 0, (3,), (3,)),
        ((4,), 0, (), ()),
        ((-1, 1), 8, (3, 1), (3, 1)),
    ],
)
def test_a_dimension_of_one_is_added_or_left_out(
    wanted: tuple[int, ...], rows: int, given: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    asked = spec("FP32", *wanted)
    assert fitted(asked, np.zeros(given), contract(asked, rows=rows)).shape == shape
    assert fitted(asked, np.zeros(given), contract(asked, rows=rows, any_rank=("x",))).shape == given


def test_rows_are_counted_where_there_are_any() -> None:
    asked = spec("FP32", -1, 2)
    with pytest.raises(InvalidRequest, match="has 3 rows; this model takes at most 2"):
        fitted(asked, np.zeros((3, 2)), contract(asked, rows=8, max_rows=2))
    assert fitted(asked, np.zeros((2, 2)), contract(asked, rows=8, max_rows=2)).shape == (2, 2)
    assert fitted(asked, np.zeros((3, 2)), contract(asked, max_rows=2)).shape == (3, 2)


def test_values_without_a_name_belong_to_the_only_input_that_is_needed() -> None:
    one, two = spec("FP32", -1, name="one"), spec("FP32", -1, name="two")
    may = spec("FP32", -1, name="may", is_optional=True)
    assert only_input(contract(may, one), "instances") is one
    assert only_input(contract(may), "instances") is may
    for inputs in ((one, two), (one, may, two), (may, spec("FP32", -1, name="other", is_optional=True))):
        with pytest.raises(InvalidRequest, match=f"has {len(inputs)} inputs .*names in instances") as caught:
            only_input(contract(*inputs), "instances")
        assert caught.value.param == "instances"
    found = named_inputs(contract(one, two), {"two": [1]}, "inputs")
    assert found.keys() == {"two"}
    with pytest.raises(InvalidRequest, match="There is no input 'three'; this model has: one, two") as caught:
        named_inputs(contract(one, two), {"three": [1]}, "inputs")
    assert caught.value.param == "inputs.three"


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("label", "probabilities"), ("label",)),
        (("output_label", "output_probability"), ("output_label",)),
        (("probabilities", "label"), ()),
        (("label",), ()),
        ((), ()),
    ],
)
def test_a_classifier_answers_with_its_classes(names: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    outputs = tuple(spec("FP32", -1, name=name) for name in names)
    assert wanted_outputs(contract(spec("FP32", -1), outputs=outputs)) == wanted


def test_outputs_are_nested_lists_of_texts_and_numbers() -> None:
    outputs = (spec("BYTES", -1, name="t"), spec("BF16", -1, name="h"), spec("FP32", -1, 2, name="f"))
    given = info(contract(spec("FP32", -1), outputs=outputs))
    half = (np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    arrays = {"t": object_array([b"a", "\u00e9"]), "h": half, "f": np.ones((1, 2)), "more": np.array([7])}
    result = Result(outputs=arrays)
    assert nested(result, (), given) == {"t": ["a", "\u00e9"], "h": [1.5, -2.0], "f": [[1.0, 1.0]], "more": [7]}
    assert nested(result, ("f",), given) == {"f": [[1.0, 1.0]]}
    with pytest.raises(InvalidRequest, match="holds bytes that are not text"):
        nested(Result(outputs={"t": object_array([b"\xff"])}), (), given)


@pytest.mark.parametrize(
    ("outputs", "shape", "rows", "expected"),
    [
        ({"a": [1, 2]}, (-1,), 0, [1, 2]),
        ({"a": [1, 2], "b": [3, 4]}, (-1,), 0, [{"a": 1, "b": 3}, {"a": 2, "b": 4}]),
        ({"a": [1, 2]}, (2,), 8, [1, 2]),
        ({"a": [1, 2]}, (2,), 0, [[1, 2]]),
        ({"a": [1, 2], "b": [3]}, (-1,), 8, [{"a": [1, 2], "b": [3]}]),
        ({"a": [1, 2], "b": 3}, (-1,), 8, [{"a": [1, 2], "b": 3}]),
        ({"a": 3}, (-1,), 8, [3]),
    ],
)
def test_an_answer_has_an_entry_for_each_row(
    outputs: dict[str, object], shape: tuple[int, ...], rows: int, expected: list[object]
) -> None:
    specs = tuple(spec("FP32", *shape, name=name) for name in outputs)
    assert rows_of(outputs, info(contract(spec("FP32", -1), outputs=specs, rows=rows))) == expected
