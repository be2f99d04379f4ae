"""Tensors as JSON lists and in the binary layout: the values, and what is wrong with one that is refused."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest

from inferd.errors import InvalidRequest
from inferd.predict.codecs.tensors import (
    MAX_PACKED,
    check_datatype,
    from_bytes,
    from_json,
    num_elements,
    to_bytes,
    to_json,
)
from inferd.predict.contract import object_array


def refusal(run: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        run()
    assert caught.value.param in ("inputs.x", "outputs")
    return caught.value.message


def test_a_shape_has_sizes_and_a_bound() -> None:
    assert num_elements("x", []) == 1
    assert num_elements("x", [3, 0, 2**63 - 1]) == 0
    assert num_elements("x", [2] * 32) == 2**32
    assert "has 33 dimensions; at most 32" in refusal(lambda: num_elements("x", [1] * 33))
    assert "has a dimension of -1 in its shape" in refusal(lambda: num_elements("x", [-1]))
    assert f"has a dimension of {2**63} in" in refusal(lambda: num_elements("x", [2**63]))
    assert f"has a dimension of {2**64 - 1} in" in refusal(lambda: num_elements("x", [2**64 - 1]))
    assert "has a dimension of an integer of 65 bits in" in refusal(lambda: num_elements("x", [2**64]))
    check_datatype("x", "FP16")
    assert "has the datatype 'FP8'; expected one of" in refusal(lambda: check_datatype("x", "FP8"))


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "expected"),
    [
        ("FP32", [2], b"[1, 2.5]", np.array([1, 2.5], np.float32)),
        ("FP32", [2], b"[1, null]", np.array([1, np.nan], np.float32)),
        ("FP64", [1, 2], b" [ [1, null]]", np.array([[1, np.nan]])),
        ("INT8", [2, 2], b"[1, 2, 3, -128]", np.array([[1, 2], [3, -128]], np.int8)),
        ("INT8", [2, 2], b"[[1, 2], [3, 4]]", np.array([[1, 2], [3, 4]], np.int8)),
        ("INT8", [2, 1, 2], b"[[1, 2], [3, 4]]", np.array([[[1, 2]], [[3, 4]]], np.int8)),
        ("INT8", [4], b"[[[1, 2, 3, 4]]]", np.array([1, 2, 3, 4], np.int8)),
        ("UINT64", [1], b"[18446744073709551615]", np.array([2**64 - 1], np.uint64)),
        ("BOOL", [1], b"[true]", np.array([True])),
        ("BOOL", [0], b"[]", np.zeros(0, np.bool_)),
        ("FP32", [0, 3], b"[[]]", np.zeros((0, 3), np.float32)),
        ("FP32", [], b"[7]", np.float32(7)),
    ],
)
def test_a_list_is_read_flat_or_nested_as_its_shape(
    datatype: str, shape: list[int], data: bytes, expected: Any
) -> None:
    found = from_json("x", datatype, shape, data)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)


def test_texts_are_bytes_also_in_base64() -> None:
    assert from_json("x", "BYTES", [2], '["a", "\u00e9"]'.encode()).tolist() == [b"a", "\u00e9".encode()]
    assert from_json("x", "BYTES", [1], b'["AP8="]', is_base64=True).tolist() == [b"\x00\xff"]


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "said"),
    [
        ("FP32", [2], b"[1]", "is FP32 of shape [2], which takes 2 values; 1 came"),
        ("FP32", [1], b"[1, 2]", "which takes 1 value; 2 came"),
        ("FP32", [1] * 9 + [2], b"[1]", "shape [1, 1, 1, 1, 1, 1, 1, 1, ...], which"),
        ("FP32", [2**40, 2**40], b"[1]", "which takes more than 2**80 values; 1 came"),
        ("FP32", [1], b"7", "has a number as its data; a list of 1 value is expected"),
        ("FP32", [2], b"{}", "has an object as its data; a list of 2 values is expected"),
        ("FP32", [2], b'"a"', "has a text as its data"),
        ("FP32", [2], b"true", "has a truth value as its data"),
        ("FP32", [2], b"null", "has null as its data"),
        ("FP32", [2], b"nothing", "has something as its data"),
        ("FP32", [1], b'["a"]', "is FP32, whose data are numbers: "),
        ("FP32", [2], b'[null, "a"]', "is FP32, whose data are numbers or null: "),
        ("INT8", [1], b"[null]", "is INT8, whose data are whole numbers: "),
        ("INT8", [1], b"[1.5]", "is INT8, whose data are whole numbers: "),
        ("BOOL", [1], b"[1]", "is BOOL, whose data are true or false: "),
        ("BYTES", [1], b"[1]", "is BYTES, whose data are texts: "),
        ("INT8", [1], b"[128]", "has a value that is out of the range of INT8"),
        ("UINT8", [1], b"[-1]", "has a value that is out of the range of UINT8"),
        ("FP32", [1], b"[1e39]", "has a value that is out of the range of FP32"),
        ("FP32", [2, 2], b"[[1], [2, 3]]", "has data nested in lists of different lengths (1 and 2)"),
        ("FP32", [4], b"[[1, 2], [3, 4]]", "has the shape [4], and its data are nested as [2, 2]"),
        ("FP32", [2, 3], b"[[1, 2], [3, 4], [5, 6]]", "has the shape [2, 3], and its data are nested as [3, 2]"),
        ("FP32", [1], b"[" * 33 + b"1" + b"]" * 33, "has data nested 33 deep; at most 32"),
        ("FP32", [1], b"[1", "has data that is not valid JSON"),
        ("FP16", [1], b"[1]", "is FP16, which has no form in JSON; send it as binary data"),
        ("FP8", [1], b"[1]", "has the datatype 'FP8'"),
    ],
)
def test_a_list_that_does_not_fit_is_told_with_the_reason(
    datatype: str, shape: list[int], data: bytes, said: str
) -> None:
    found = refusal(lambda: from_json("x", datatype, shape, data))
    assert found.startswith("The input 'x' ")
    assert said in found


def test_base64_that_is_none_is_told() -> None:
    said = refusal(lambda: from_json("x", "BYTES", [1], b'["A"]', is_base64=True))
    assert "has the content_type base64 and a text that is not base64" in said


@pytest.mark.parametrize("count", [MAX_PACKED, MAX_PACKED + 1])
def test_float32_holds_what_it_can_also_of_many_numbers(count: int) -> None:
    most = float(np.finfo(np.float32).max)
    data = b"[" + b"0," * (count - 1) + str(most).encode() + b"]"
    found = from_json("x", "FP32", [count], data)
    assert found.dtype == np.float32
    assert (float(found[-1]), int(np.count_nonzero(found))) == (most, 1)
    over = b"[" + b"0," * (count - 1) + b"1e39]"
    assert "out of the range of FP32" in refusal(lambda: from_json("x", "FP32", [count], over))


def test_answers_are_flat_lists_where_json_has_a_form_for_them() -> None:
    assert to_json("y", "FP32", np.array([[1.5, 2], [3, 4]], np.float32)) == [1.5, 2.0, 3.0, 4.0]
    assert math.isnan(to_json("y", "FP32", np.array([np.nan]))[0])  # type: ignore[arg-type]
    assert to_json("y", "BYTES", object_array([b"a", "b", 7])) == ["a", "b", "7"]
    for datatype in ("FP16", "BF16"):
        assert f"The output 'y' is {datatype}, which" in refusal(lambda: to_json("y", datatype, np.zeros(1)))  # noqa: B023
    assert "holds bytes that are not text" in refusal(lambda: to_json("y", "BYTES", object_array([b"\xff"])))


def test_bytes_are_read_where_they_stand_and_written_back() -> None:
    numbers = np.arange(6, dtype=np.int32).reshape(2, 3)
    for before in (b"", b"1234", b"odd"):
        found = from_bytes("x", "INT32", [2, 3], before + to_bytes("INT32", numbers) + b"after", len(before), 24)
        assert found.flags.aligned
        np.testing.assert_array_equal(found, numbers)
    assert from_bytes("x", "FP32", [0, 3], b"", 0, 0).shape == (0, 3)
    assert from_bytes("x", "BOOL", [2], b"\x00\x01\x02", 0, 2).tolist() == [False, True]
    texts = to_bytes("BYTES", object_array([b"ab", "\u00e9", b""]))
    assert texts == struct.pack("<I2sI2sI", 2, b"ab", 2, "\u00e9".encode(), 0)
    found = from_bytes("x", "BYTES", [3], b"_" + texts, 1, len(texts))
    assert found.tolist() == [b"ab", "\u00e9".encode(), b""]


@pytest.mark.parametrize(
    ("datatype", "shape", "body", "said"),
    [
        ("INT32", [2], b"1234567", "is INT32 of shape [2], which takes 8 bytes; 7 came"),
        ("FP64", [2**40, 2**40], b"1", "which takes more than 2**83 bytes; 1 came"),
        ("BOOL", [2], b"\x00\x02", "is BOOL and has a byte that is neither 0 nor 1"),
        ("FP8", [1], b"1", "has the datatype 'FP8'"),
        ("BYTES", [2], b"\x00" * 7, "2 elements and their lengths take at least 8 bytes; 7 came"),
        ("BYTES", [2], b"\x01\x00\x00\x00a\x00\x00\x00", "ends within the length of element 1"),
        ("BYTES", [1], b"\x02\x00\x00\x00a", "its element 0 has a length of 2 bytes; 1 are left of it"),
        ("BYTES", [1], b"\x01\x00\x00\x00ab", "is BYTES of 1 elements, behind which 1 bytes are left over"),
    ],
)
def test_bytes_that_do_not_fit_are_told_with_the_reason(
    datatype: str, shape: list[int], body: bytes, said: str
) -> None:
    whole = b"before" + body + b"\x00\x00\x00\x00"
    assert said in refusal(lambda: from_bytes("x", datatype, shape, whole, 6, len(body)))
