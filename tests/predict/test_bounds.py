"""What one request may hold: the largest that the model can take passes, one more of anything is refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.predict.test_v2_codec import info

from inferd.errors import InvalidRequest
from inferd.predict.bounds import (
    MAX_ANSWERED,
    MAX_ELEMENTS,
    MAX_EXTREMES,
    MAX_ROWS,
    MAX_TEXTS,
    bounded,
    check_values,
    most_in_json,
)
from inferd.predict.check import Checker
from inferd.predict.codecs.invocations_csv import WITHOUT_HEADER
from inferd.predict.codecs.registry import codec_for
from inferd.predict.contract import Contract, Tensors
from inferd.predict.runtime import Result
from inferd.protowire import packed, sized
from inferd.types import PredictRequest, TensorSpec

ROW = (TensorSpec("y", "FP32", (-1,)),)


def contract(*inputs: TensorSpec, max_rows: int | None = None, batch: int = 8, **more: Any) -> Contract:
    made = Contract(inputs=inputs, outputs=ROW, max_batch_size=batch, because="declared" if batch else None, **more)
    return bounded(made, max_rows, batch or 1)


TABLE = contract(TensorSpec("x", "FP32", (-1, 4)))
FREE = contract(TensorSpec("x", "FP32", (-1, -1, -1)))
BYTES = contract(TensorSpec("x", "BYTES", (-1,)), batch=0)
TEXTS = contract(TensorSpec("text", "BYTES", (-1,)), tasks=("embed", "score", "classify"), max_tokens=512)


def read(dialect: str, body: bytes, of: Contract, header_bytes: int = -1) -> tuple[Tensors, int]:
    """The inputs as a runtime would get them, and their rows."""
    request = PredictRequest(id="r-1", model="m", dialect=dialect, body=body, header_bytes=header_bytes)
    return Checker(of).check(codec_for(dialect).decode(request, of))


def refusal(dialect: str, body: bytes, of: Contract) -> str:
    with pytest.raises(InvalidRequest) as refused:
        read(dialect, body, of)
    return refused.value.message


# -- every dialect, at its bound and one beyond -----------------------------------------------------


def v2(datatype: str, rows: list[list[Any]], data: object) -> bytes:
    shape = [len(rows), len(rows[0])]
    return json.dumps({"inputs": [{"name": "x", "shape": shape, "datatype": datatype, "data": data}]}).encode()


def v2_flat(datatype: str, rows: list[list[Any]]) -> bytes:
    return v2(datatype, rows, [value for row in rows for value in row])


def v2_nested(datatype: str, rows: list[list[Any]]) -> bytes:
    return v2(datatype, rows, rows)


def grpc(datatype: str, rows: list[list[Any]], *, is_raw: bool) -> bytes:
    values = [value for row in rows for value in row]
    contents = raw = b""
    if datatype == "BYTES" and is_raw:
        raw = sized(7, b"".join(struct.pack("<I", len(value)) + value.encode() for value in values))
    elif datatype == "BYTES":
        contents = sized(5, b"".join(sized(8, value.encode()) for value in values))
    elif is_raw:
        raw = sized(7, struct.pack(f"<{len(values)}f", *values))
    else:
        contents = sized(5, sized(6, struct.pack(f"<{len(values)}f", *values)))
    described = sized(1, b"x") + sized(2, datatype.encode()) + packed(3, [len(rows), len(rows[0])])
    return sized(5, described + contents) + raw


def objects(rows: list[list[Any]]) -> list[dict[str, Any]]:
    return [{"x": row} for row in rows]


def csv(rows: list[list[Any]]) -> bytes:
    return b"".join(b",".join(b'"%b"' % str(value).encode() for value in row) + b"\n" for row in rows)


FORMS: dict[str, tuple[str, Callable[[str, list[list[Any]]], bytes]]] = {
    "v2, flat": ("v2", v2_flat),
    "v2, nested": ("v2", v2_nested),
    "gRPC, contents": ("v2.grpc", lambda datatype, rows: grpc(datatype, rows, is_raw=False)),
    "gRPC, raw": ("v2.grpc", lambda datatype, rows: grpc(datatype, rows, is_raw=True)),
    "v1, rows": ("v1", lambda _, rows: json.dumps({"instances": rows}).encode()),
    "v1, objects": ("v1", lambda _, rows: json.dumps({"instances": objects(rows)}).encode()),
    "v1, columns": ("v1", lambda _, rows: json.dumps({"inputs": {"x": rows}}).encode()),
    "MLflow, rows": ("invocations", lambda _, rows: json.dumps({"instances": rows}).encode()),
    "MLflow, split": (
        "invocations",
        lambda _, rows: json.dumps({"dataframe_split": {"data": rows, "index": list(range(len(rows)))}}).encode(),
    ),
    "MLflow, CSV": (WITHOUT_HEADER, lambda _, rows: csv(rows)),
    "MLflow, CSV with a header": (
        "invocations.csv",
        lambda _, rows: csv([[f"c{place}" for place in range(len(rows[0]))], *rows]),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@given(datatype=st.sampled_from(["FP32", "BYTES"]), width=st.integers(1, 5), most=st.integers(1, 9))
def test_as_many_rows_as_the_setting_says_pass_and_one_more_is_refused_by_name(
    form: str, datatype: str, width: int, most: int
) -> None:
    of = contract(TensorSpec("x", datatype, (-1, width)), max_rows=most)
    dialect, write = FORMS[form]
    row: list[Any] = ['a,"[' if datatype == "BYTES" and "CSV" not in form else 1] * width
    inputs, rows = read(dialect, write(datatype, [row] * most), of)
    assert rows == most
    assert inputs["x"].shape == (most, width)
    said = refusal(dialect, write(datatype, [row] * (most + 1)), of)
    assert f"{most} " in said
    assert "max_rows" in said
    assert "'x'" in said


@pytest.mark.parametrize("form", [form for form in FORMS if "gRPC" not in form])
def test_a_document_of_as_many_rows_as_a_request_may_have_by_default_is_not_too_large(form: str) -> None:
    dialect, write = FORMS[form]
    _, rows = read(dialect, write("FP32", [[1, 2, 3, 4]] * MAX_ROWS), TABLE)
    assert rows == MAX_ROWS
    assert "65536" in refusal(dialect, write("FP32", [[1, 2, 3, 4]] * (MAX_ROWS + 1)), TABLE)


def test_as_many_texts_as_a_request_may_have_pass_whatever_they_hold() -> None:
    text = '[{,\\"' * 40
    for dialect, name in (("openai.embeddings", "input"), ("cohere.embed", "texts"), ("tei.embed", "inputs")):
        inputs, rows = read(dialect, json.dumps({name: [text] * MAX_TEXTS}).encode(), TEXTS)
        assert rows == MAX_TEXTS
        assert inputs["text"][-1] == text.encode()
        said = refusal(dialect, json.dumps({name: [text] * (MAX_TEXTS + 1)}).encode(), TEXTS)
        assert "at most 2048" in said
        assert "max_rows" in said


def test_pairs_have_as_many_texts_on_each_side_as_a_request_may_have() -> None:
    body = json.dumps({"text_1": ["a"] * MAX_TEXTS, "text_2": ["b"] * MAX_TEXTS}).encode()
    assert read("score", body, TEXTS)[1] == 2 * MAX_TEXTS
    body = json.dumps({"text_1": "a", "text_2": ["b"] * (MAX_TEXTS + 1)}).encode()
    assert "text_2 may have at most 2048" in refusal("score", body, TEXTS)


def test_a_model_of_texts_takes_no_more_of_them_as_tensors() -> None:
    assert "at most 2048" in refusal("v2.grpc", grpc("BYTES", [["a"]] * (MAX_TEXTS + 1), is_raw=True), TEXTS)


# -- tiny elements, refused before they are read ----------------------------------------------------

MANY = 5_000_000


def json_of(before: bytes, unit: bytes, count: int = MANY) -> bytes:
    """A document that never ends: only a reader that has not begun refuses it for anything else."""
    return before + unit * count


@pytest.mark.parametrize(
    ("dialect", "of", "body"),
    [
        ("v2", TABLE, json_of(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[', b"1,")),
        ("v2", TABLE, json_of(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2,4],"data":[', b"1,")),
        ("v2", FREE, json_of(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1,9],"data":[', b"1,")),
        ("v2", FREE, json_of(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1,9],"data":[', b"[],")),
        ("v2", BYTES, json_of(b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1000000],"data":[', b'"",')),
        ("v2", TABLE, json_of(b'{"inputs":[', b'{"name":"x"},')),
        ("v1", TABLE, json_of(b'{"instances":[', b"1,")),
        ("v1", TABLE, json_of(b'{"instances":[', b"{},")),
        ("v1", FREE, json_of(b'{"instances":[', b"[[[[]]]],", MANY // 4)),
        ("v1", BYTES, json_of(b'{"inputs":[', b'"",')),
        ("invocations", TABLE, json_of(b'{"dataframe_split":{"data":[', b"[],")),
        ("invocations", TABLE, json_of(b'{"dataframe_records":[', b"{},")),
        ("openai.embeddings", TEXTS, json_of(b'{"input":[', b"1,")),
        ("openai.embeddings", TEXTS, json_of(b'{"input":[', b"[1],")),
        ("openai.embeddings", TEXTS, json_of(b'{"input":"a","user":[', b"1,")),
        ("classify", TEXTS, json_of(b'{"input":[', b'"",')),
        ("score", TEXTS, json_of(b'{"text_1":"a","text_2":[', b'"",')),
        ("cohere.embed", TEXTS, json_of(b'{"texts":["a"],"embedding_types":[', b'"float",')),
    ],
)
def test_a_document_of_tiny_values_is_refused_before_it_is_read(dialect: str, of: Contract, body: bytes) -> None:
    said = refusal(dialect, body, of)
    assert "more than this model can take in one request" in said
    assert "max_rows" in said
    assert f"{of.max_rows} rows" in said


@pytest.mark.parametrize("number", ["1e308", "4e-324", "1E+308", "0.1e0309"])
@pytest.mark.parametrize(
    ("dialect", "of", "before"),
    [
        ("v2", TABLE, '{"inputs":[{"name":"x","datatype":"FP32","shape":[4096,4],"data":['),
        ("v1", TABLE, '{"instances":['),
        ("invocations", TABLE, '{"inputs":['),
        ("openai.embeddings", TEXTS, '{"input":"a","user":['),
    ],
)
def test_numbers_that_are_slow_to_read_are_bounded_and_refused_before_they_are_read(
    dialect: str, of: Contract, before: str, number: str
) -> None:
    said = refusal(dialect, f"{before}{number}".encode() + f",{number}".encode() * MAX_EXTREMES, of)
    assert f"more than {MAX_EXTREMES} numbers with an exponent of three digits" in said
    assert "not valid JSON" in refusal(dialect, f"{before}{number}".encode() + f",{number}".encode() * 12_000, of)


def test_texts_that_look_like_slow_numbers_are_not_counted_among_them() -> None:
    text = "1e308," * (2 * MAX_EXTREMES)
    inputs, _ = read("v1", json.dumps({"instances": [text]}).encode(), BYTES)
    assert list(inputs["x"].flat) == [text.encode()]


def test_a_table_is_read_no_further_than_the_rows_and_cells_of_one_request() -> None:
    assert "more than 65536 rows" in refusal(WITHOUT_HEADER, b"1\n" * 70_000 + b'"', TABLE)
    wide = contract(TensorSpec("x", "FP32", (-1, 1000)))
    lines = b"1," * 999 + b"1\n"
    assert "values and more" in refusal(WITHOUT_HEADER, lines * (MAX_ELEMENTS // 1000 + 200) + b'"', wide)


@pytest.mark.parametrize(
    ("of", "body", "said"),
    [
        (TABLE, sized(5, sized(1, b"x") + sized(3, b"\1" * MANY)), "more than 32 dimensions"),
        (TABLE, sized(5, sized(1, b"x") + b"\x18\1" * MANY), "fields"),
        (TABLE, b"\x22\0" * MANY, "fields"),
        (TABLE, b"\x2a\0" * MANY, "fields"),
        (TABLE, sized(5, sized(1, b"x") + b"\x22\0" * MANY), "fields"),
        (TABLE, sized(6, b"\x12\0" * MANY), "fields"),
        (
            BYTES,
            sized(5, sized(1, b"x") + sized(2, b"BYTES") + packed(3, [MANY]) + sized(5, b"\x42\0" * MANY)),
            "5000000 values of BYTES; this model takes at most 65536",
        ),
        (
            BYTES,
            sized(5, sized(1, b"x") + sized(2, b"BYTES") + packed(3, [9]) + sized(5, b"\x42\0" * MANY)),
            "fields",
        ),
        (
            BYTES,
            sized(5, sized(1, b"x") + sized(2, b"BYTES") + packed(3, [MANY])) + sized(7, bytes(4 * MANY)),
            "5000000 values of BYTES; this model takes at most 65536",
        ),
        (
            FREE,
            sized(5, sized(1, b"x") + sized(2, b"FP32") + packed(3, [1, 1, 9]) + sized(5, b"\x35\0\0\0\0" * MANY)),
            "fields",
        ),
        (
            FREE,
            sized(
                5,
                sized(1, b"x") + sized(2, b"INT64") + packed(3, [1, 1, 9]) + sized(5, sized(3, b"\1" * MANY + b"\x80")),
            ),
            "takes 9 values; 5000000 came",  # and no word of the last one, which is none: they were counted, not read
        ),
    ],
)
def test_a_message_of_tiny_fields_is_refused_by_name(of: Contract, body: bytes, said: str) -> None:
    assert said in refusal("v2.grpc", body, of)


def test_numbers_in_binary_are_as_many_as_the_body_holds() -> None:
    shape = (1, 2, MAX_ELEMENTS)
    described = sized(1, b"x") + sized(2, b"FP32") + packed(3, shape)
    inputs, _ = read("v2.grpc", sized(5, described) + sized(7, bytes(8 * MAX_ELEMENTS)), FREE)
    assert inputs["x"].shape == shape


def test_a_batch_of_the_largest_size_is_never_too_large() -> None:
    of = contract(TensorSpec("x", "FP32", (-1, MAX_ELEMENTS)), batch=2)
    assert of.max_elements == 2 * MAX_ELEMENTS


def test_a_name_that_comes_twice_among_very_many_is_found_in_one_pass() -> None:
    names = [str(place) for place in range(60_000)]
    outputs = [{"name": name} for name in (*names, names[-1])]
    tensor = {"name": "x", "shape": [1, 1, 1], "datatype": "FP32", "data": [1]}
    assert "'59999' is asked for twice" in refusal(
        "v2", json.dumps({"inputs": [tensor], "outputs": outputs}).encode(), FREE
    )
    assert "column '59999' twice" in refusal("invocations.csv", csv([[*names, names[-1]], [1] * 60_001]), FREE)


# -- answers ----------------------------------------------------------------------------------------


def test_an_answer_that_json_is_too_large_for_is_refused_before_it_is_computed() -> None:
    wide = (TensorSpec("y", "FP32", (-1, MAX_ANSWERED // 2)),)
    of = msgspec.structs.replace(contract(TensorSpec("x", "FP32", (-1, 1))), outputs=wide)
    tensor = {"name": "x", "shape": [3, 1], "datatype": "FP32", "data": [1, 2, 3]}
    assert "for binary data" in refusal("v2", json.dumps({"inputs": [tensor]}).encode(), of)
    assert "for binary data" in refusal("v1", b'{"instances": [[1], [2], [3]]}', of)
    as_binary = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    assert read("v2", json.dumps(as_binary).encode(), of)[1] == 3
    assert read("v1", b'{"instances": [[1], [2]]}', of)[1] == 2


def test_two_rows_are_counted_together_before_they_are_computed() -> None:
    wide = (TensorSpec("y", "FP32", (-1, MAX_ANSWERED // 2 + 1)),)
    of = msgspec.structs.replace(contract(TensorSpec("x", "FP32", (-1, 1))), outputs=wide)
    assert "for binary data" in refusal("v1", b'{"instances": [[1], [2]]}', of)
    assert read("v1", b'{"instances": [[1]]}', of)[1] == 1


@pytest.mark.parametrize("dialect", ["v1", "v2"])
def test_an_answer_of_a_free_size_that_json_is_too_large_for_is_not_written(dialect: str) -> None:
    body = b'{"instances": [[1, 2, 3, 4]]}' if dialect == "v1" else v2_flat("FP32", [[1, 2, 3, 4]])
    request = PredictRequest(id="r-1", model="m", dialect=dialect, body=body)
    codec = codec_for(dialect)
    result = Result(outputs={"y": np.zeros((1, MAX_ANSWERED + 1), np.float32)})
    with pytest.raises(InvalidRequest, match="at most 8388608 are sent in JSON"):
        codec.encode(request, codec.decode(request, TABLE), result, info(TABLE))


# -- counting ---------------------------------------------------------------------------------------

_CHARS = st.text(st.sampled_from('"\\,[]{}:a\u00e9\n'), max_size=8)
_DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | _CHARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_CHARS, inner, max_size=4),
    max_leaves=20,
)


def separators(document: Any) -> Iterable[str]:
    """The commas and opening brackets of a document, from its values."""
    if isinstance(document, list | dict):
        yield "[" if isinstance(document, list) else "{"
        yield from "," * (len(document) - 1)
        for inner in document.values() if isinstance(document, dict) else document:
            yield from separators(inner)


@given(document=_DOCUMENTS, times=st.integers(1, 3))
def test_what_is_counted_is_what_lies_outside_of_strings(document: Any, times: int) -> None:
    found = list(separators([document] * times))
    filling = "," * 1_200_000  # a string longer than one look at the bytes
    body = json.dumps([[document] * times, filling]).encode()
    of = contract(TensorSpec("x", "FP32", (1,)), batch=0, max_rows=1)
    values, lists = found.count(","), len(found) - found.count(",")
    most_values, most_lists = most_in_json(of)
    padding = b",0" * (most_values - values - 1)
    check_values(body[:-1] + padding + b"]", of)
    with pytest.raises(InvalidRequest, match="values"):
        check_values(body[:-1] + padding + b",0]", of)
    nested = b"[" * (most_lists - lists - 1)
    check_values(body + nested, of)
    with pytest.raises(InvalidRequest, match="lists"):
        check_values(body + nested + b"{", of)
