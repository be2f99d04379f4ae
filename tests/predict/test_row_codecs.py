"""KServe v1 and MLflow: rows, columns and frames become the model's inputs, and its outputs rows."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.predict.test_v2_codec import info

from inferd.errors import InvalidRequest
from inferd.predict.check import Checker
from inferd.predict.codecs.invocations import InvocationsCodec
from inferd.predict.codecs.invocations_csv import WITHOUT_HEADER, InvocationsCsvCodec
from inferd.predict.codecs.port import Codec
from inferd.predict.codecs.v1 import V1Codec
from inferd.predict.contract import Array, Contract
from inferd.predict.runtime import Result
from inferd.types import PredictRequest, TensorSpec

TABLE = Contract(
    inputs=(TensorSpec("input-0", "FP32", (-1, 2)),),
    outputs=(TensorSpec("y", "FP32", (-1,)),),
    max_batch_size=8,
    because="declared",
)
TWO = Contract(
    inputs=(TensorSpec("age", "INT64", (-1, 1)), TensorSpec("name", "BYTES", (-1,))),
    outputs=(TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "BYTES", (-1,))),
    max_batch_size=8,
    because="declared",
)
NAMED = Contract(
    inputs=(TensorSpec("input-0", "FP64", (-1, 2), labels=("width", "height")),),
    outputs=(TensorSpec("label", "INT64", (-1,)), TensorSpec("probabilities", "FP64", (-1, 2))),
    max_batch_size=8,
    because="declared",
)
IMAGE = Contract(inputs=(TensorSpec("image", "FP32", (2, 2)),), outputs=(TensorSpec("y", "FP32", (3,)),))
TEXT = Contract(inputs=(TensorSpec("text", "BYTES", (-1,)),), outputs=(TensorSpec("e", "FP32", (-1, 2)),))


def checked(codec: Codec, body: object, contract: Contract) -> dict[str, Array]:
    """The inputs as a runtime would get them."""
    decoded = codec.decode(asked(body), contract)
    return dict(Checker(contract).check(decoded)[0])


def asked(body: object) -> PredictRequest:
    return PredictRequest(id="r", model="m", dialect="d", body=json.dumps(body).encode())


def said(codec: Codec, body: object, contract: Contract, **outputs: Array) -> Any:
    request = asked(body)
    result = Result(outputs=outputs)
    return json.loads(codec.encode(request, codec.decode(request, contract), result, info(contract)).body)


V1, MLFLOW = V1Codec(), InvocationsCodec()
ROWS = [[1, 2.5], [3, 4]]


@pytest.mark.parametrize(
    ("codec", "body"),
    [
        (V1, {"instances": ROWS}),
        (V1, {"inputs": ROWS}),
        (V1, {"inputs": {"input-0": ROWS}}),
        (V1, {"instances": [{"input-0": row} for row in ROWS], "signature_name": "serving_default"}),
        (MLFLOW, {"instances": ROWS}),
        (MLFLOW, {"inputs": ROWS}),
        (MLFLOW, {"dataframe_split": {"columns": ["w", "h"], "index": [0, 1], "data": ROWS}}),
        (MLFLOW, {"dataframe_split": {"data": ROWS}}),
        (MLFLOW, {"dataframe_records": [{"w": 1, "h": 2.5}, {"w": 3, "h": 4}]}),
    ],
)
def test_one_table_in_every_form(codec: Codec, body: object) -> None:
    inputs = checked(codec, body, TABLE)
    assert inputs["input-0"].dtype == np.float32
    np.testing.assert_array_equal(inputs["input-0"], np.array(ROWS, np.float32))


@pytest.mark.parametrize(
    ("codec", "body"),
    [
        (V1, {"instances": [{"age": 1, "name": "a"}, {"age": 2, "name": {"b64": "Yg=="}}]}),
        (V1, {"inputs": {"age": [[1], [2]], "name": ["a", "b"]}}),
        (MLFLOW, {"dataframe_split": {"columns": ["name", "age"], "data": [["a", 1], ["b", 2]]}}),
        (MLFLOW, {"dataframe_records": [{"age": 1, "name": "a"}, {"age": 2, "name": "b"}]}),
    ],
)
def test_columns_are_inputs_by_name(codec: Codec, body: object) -> None:
    inputs = checked(codec, body, TWO)
    assert inputs["age"].tolist() == [[1], [2]]
    assert inputs["name"].tolist() == [b"a", b"b"]


def test_a_frame_s_columns_are_put_into_the_model_s_order() -> None:
    body = {"dataframe_split": {"columns": ["height", "width"], "data": [[2, 1], [None, 3]]}}
    found = checked(MLFLOW, body, NAMED)["input-0"]
    np.testing.assert_array_equal(found, [[1, 2], [3, np.nan]])
    with pytest.raises(InvalidRequest, match=r"missing are 'width'; unknown are 'depth'"):
        checked(MLFLOW, {"dataframe_records": [{"height": 1, "depth": 2}]}, NAMED)


def test_bytes_alone_are_a_row() -> None:
    assert checked(V1, {"instances": [{"b64": "AP8="}, "ü"]}, TEXT)["text"].tolist() == [b"\x00\xff", "ü".encode()]
    assert checked(MLFLOW, {"dataframe_split": {"data": [["a"], ["b"]], "columns": ["t"]}}, TEXT)["text"].tolist() == [
        b"a",
        b"b",
    ]


def test_a_model_without_rows_takes_one_instance_and_gives_one_prediction() -> None:
    body = {"instances": [[[1, 2], [3, 4]]]}
    assert checked(V1, body, IMAGE)["image"].shape == (2, 2)
    assert said(V1, body, IMAGE, y=np.array([1, 2, 3], np.float32)) == {"predictions": [[1, 2, 3]]}
    with pytest.raises(InvalidRequest, match=r"\[2, 2, 2\]"):
        checked(V1, {"instances": body["instances"] * 2}, IMAGE)


def test_predictions_are_rows_of_one_output_or_objects_of_several() -> None:
    y = np.array([0.5, np.nan], np.float32)
    assert said(V1, {"instances": ROWS}, TABLE, y=y) == {"predictions": [0.5, None]}
    assert said(V1, {"inputs": ROWS}, TABLE, y=y) == {"outputs": [0.5, None]}
    assert said(MLFLOW, {"inputs": ROWS}, TABLE, y=y) == {"predictions": [0.5, None]}
    body = {"instances": [{"age": 1, "name": "a"}, {"age": 2, "name": "b"}]}
    outputs: dict[str, Array] = {"a": np.array([[1, 2], [3, 4]], np.float32), "b": np.array([b"x", b"y"], object)}
    assert said(V1, body, TWO, **outputs) == {"predictions": [{"a": [1, 2], "b": "x"}, {"a": [3, 4], "b": "y"}]}
    columns = {"inputs": {"age": [[1], [2]], "name": ["a", "b"]}}
    assert said(MLFLOW, columns, TWO, **outputs) == {"predictions": {"a": [[1, 2], [3, 4]], "b": ["x", "y"]}}


def test_a_classifier_tells_its_classes_as_these_dialects_own_servers_do() -> None:
    assert V1.decode(asked({"instances": ROWS}), NAMED).wanted == ("label",)
    outputs: dict[str, Array] = {"label": np.array([1, 0]), "probabilities": np.ones((2, 2))}
    assert said(V1, {"instances": ROWS}, NAMED, **outputs) == {"predictions": [1, 0]}


@pytest.mark.parametrize(
    ("codec", "contract", "body", "message"),
    [
        (V1, TABLE, {}, "either instances or inputs"),
        (V1, TABLE, {"instances": ROWS, "inputs": ROWS}, "either instances or inputs"),
        (V1, TABLE, {"instances": []}, "instances is empty"),
        (V1, TABLE, {"instances": [[1, 2], [3]]}, "different lengths (1 and 2)"),
        (V1, TABLE, {"instances": [[1, "2"]]}, "takes FP32, and got numbers and texts"),
        (V1, TABLE, {"instances": [[1, {"b64": ""}]]}, "got numbers and objects"),
        (V1, TABLE, {"instances": [[1, 1e300]]}, "too large"),
        (V1, TABLE, {"instances": [[1, 2, 3]]}, "got the shape [1, 3]"),
        (V1, TABLE, {"instances": [{"x": 1}]}, "no input 'x'; this model has: input-0"),
        (V1, TABLE, {"instances": "x"}, "instances"),
        (V1, TABLE, {"instances": ROWS, "signature_name": "other"}, "serving_default"),
        (V1, TABLE, {"instances": ROWS, "more": 1}, "'more' is not known"),
        (V1, TWO, {"instances": ROWS}, "2 inputs (age, name)"),
        (V1, TWO, {"instances": [{"age": 1, "name": "a"}, {"age": 1}]}, "instances[1] has other fields"),
        (V1, TWO, {"instances": [{"age": 2**70, "name": "a"}]}, "more than 64 bits"),
        (V1, TWO, {"instances": [{"age": 1.5, "name": "a"}]}, "fractions"),
        (V1, TWO, {"instances": [{"age": 1, "name": 5}]}, "takes texts, and got numbers"),
        (V1, TEXT, {"instances": [{"b64": "?"}]}, "not base64"),
        (MLFLOW, TABLE, {}, "needs one of dataframe_split"),
        (MLFLOW, TABLE, {"instances": ROWS, "inputs": ROWS}, "got instances, inputs"),
        (MLFLOW, TABLE, {"dataframe_split": {"data": []}}, "data is empty"),
        (MLFLOW, TABLE, {"dataframe_split": {"columns": ["a", "b"], "data": [[1]]}}, "data[0] has 1 values; 2"),
        (MLFLOW, TABLE, {"dataframe_split": {"columns": ["a", "a"], "data": [[1, 2]]}}, "a name twice"),
        (MLFLOW, TABLE, {"dataframe_records": []}, "dataframe_records is empty"),
        (MLFLOW, TABLE, {"dataframe_records": [{"a": 1}, {"b": 1}]}, "dataframe_records[1] has other columns"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(codec: Codec, contract: Contract, body: object, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked(codec, body, contract)
    assert message in refused.value.message


def test_deep_nesting_and_repeated_keys_are_refused() -> None:
    for body, message in (
        (b'{"instances":' + b"[" * 200 + b"]" * 200 + b"}", "more than 32 deep"),
        (b'{"instances":' + b"[" * 100_000, "too deeply"),
        (b'{"instances":[{"input-0":[1,2],"input-0":[3,4]}]}', "'input-0' appears twice"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            V1.decode(PredictRequest(id="r", model="m", dialect="v1", body=body), TABLE)


# -- tables as text/csv --------------------------------------------------------------------------

CSV = InvocationsCsvCodec()


def of_table(text: str | bytes, contract: Contract, dialect: str = "invocations.csv") -> dict[str, list[object]]:
    body = text if isinstance(text, bytes) else text.encode()
    decoded = CSV.decode(PredictRequest(id="r", model="m", dialect=dialect, body=body), contract)
    return {name: array.tolist() for name, array in Checker(contract).check(decoded)[0].items()}


@pytest.mark.parametrize(
    ("text", "contract", "wanted"),
    [
        ("w,h\n1,2.5\n3,4\n", TABLE, {"input-0": [[1, 2.5], [3, 4]]}),
        ("\ufeffw,h\r\n1,2.5\r\n\r\n3,4", TABLE, {"input-0": [[1, 2.5], [3, 4]]}),
        ("height,width\n1,2\n", NAMED, {"input-0": [[2, 1]]}),
        ('name,age\n"Ann, the first",30\n"",31.0\n', TWO, {"age": [[30], [31]], "name": [b"Ann, the first", b""]}),
        ("text\n12\n", TEXT, {"text": [b"12"]}),
    ],
)
def test_a_table_is_a_line_of_columns_and_its_rows(text: str, contract: Contract, wanted: dict[str, object]) -> None:
    assert of_table(text, contract) == wanted


def test_a_table_may_have_no_line_of_columns_and_missing_values() -> None:
    assert of_table("1,2.5\n3,4\n", TABLE, WITHOUT_HEADER) == {"input-0": [[1, 2.5], [3, 4]]}
    (row,) = of_table("w,h\n1,\n", TABLE)["input-0"]
    assert str(row) == "[1.0, nan]"


@pytest.mark.parametrize(
    ("text", "contract", "said"),
    [
        (b"", TABLE, "The table has no rows"),
        (b"w,h\n", TABLE, "The table has no rows"),
        (b"w,h\n1\n", TABLE, "Line 2 of the table has 1 values; 2 are expected"),
        (b"w,h\n1,x\n", TABLE, "Line 2 of the table has 'x' where a number is expected"),
        (b"w,h\n1,1_000\n", TABLE, "'1_000' where a number is expected"),
        ("w,h\n1,\u0663\n".encode(), TABLE, "where a number is expected"),
        (b"age,name\n1e400,a\n", TWO, "got FP64 values that are no numbers"),
        (b"w,w\n1,2\n", TABLE, "the column 'w' twice"),
        (b'w,h\n1,"2\n', TABLE, "of the table is no CSV"),
        (b"w,h\n1,\xff\n", TABLE, "not valid UTF-8"),
        (b"age,other\n1,2\n", TWO, "There is no input 'other'"),
        (b"width,depth\n1,2\n", NAMED, "missing are 'height'; unknown are 'depth'"),
        (b"age,name\n,a\n", TWO, "Line 2 of the table has '' where a number is expected"),
    ],
)
def test_a_table_that_is_none_is_refused_by_its_line(text: bytes, contract: Contract, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        of_table(text, contract)
    assert said in caught.value.message


def test_the_answer_to_a_table_is_its_rows() -> None:
    request = PredictRequest(id="r", model="m", dialect="invocations.csv", body=b"w,h\n1,2\n3,4\n")
    result = Result(outputs={"y": np.array([1, 2], np.float32)})
    answer = CSV.encode(request, CSV.decode(request, TABLE), result, info(TABLE))
    assert json.loads(answer.body) == {"predictions": [1, 2]}


@pytest.mark.parametrize("codec", [V1, MLFLOW])
@pytest.mark.parametrize("form", ["instances", "inputs"])
def test_what_is_nan_in_an_answer_is_nan_in_a_request(codec: Codec, form: str) -> None:
    values = np.array([[1.5, np.nan], [np.nan, np.nan]], np.float32)
    both = msgspec.structs.replace(TABLE, outputs=(TensorSpec("y", "FP32", (-1, 2)),))
    told = next(iter(said(codec, {form: ROWS}, both, y=values).values()))
    assert told == [[1.5, None], [None, None]]
    np.testing.assert_array_equal(checked(codec, {form: told}, both)["input-0"], values)


def test_null_is_refused_where_an_input_has_no_floats() -> None:
    with pytest.raises(InvalidRequest, match="null"):
        checked(V1, {"instances": [{"age": [None], "name": "a"}]}, TWO)
