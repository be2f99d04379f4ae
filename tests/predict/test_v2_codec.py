"""KServe v2 over REST: what is written is read back, and every lie is refused by name before it takes memory."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import struct
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.errors import InvalidRequest
from inferd.predict.codecs.port import DecodedRequest
from inferd.predict.codecs.v2 import BINARY_TYPE, HEADER_LENGTH, V2Codec
from inferd.predict.contract import NUMPY, Array, Contract
from inferd.predict.runtime import Result
from inferd.types import ModelInfo, Prediction, PredictRequest, TensorSpec

CODEC = V2Codec()
NUMBERS = [name for name in NUMPY if name not in ("BYTES", "BOOL", "FP16", "BF16")]


def contract(*inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = (), max_batch_size: int = 8) -> Contract:
    return Contract(
        inputs=inputs or (TensorSpec("x", "FP32", (-1, 2)),),
        outputs=outputs,
        max_batch_size=max_batch_size,
        because="declared",
    )


def info(of: Contract) -> ModelInfo:
    return ModelInfo(
        name="m",
        source="m",
        architecture="",
        dtype="float32",
        max_model_len=0,
        vocab_size=0,
        num_parameters=0,
        num_blocks=0,
        block_size=0,
        max_num_seqs=0,
        kind="predict",
        inputs=of.inputs,
        outputs=of.outputs,
        max_batch_size=of.max_batch_size,
    )


def request(body: bytes, header_bytes: int = -1, model: str = "m", version: str = "1") -> PredictRequest:
    return PredictRequest(id="r", model=model, dialect="v2", body=body, header_bytes=header_bytes, version=version)


def decode(body: object, tail: bytes | None = None, of: Contract | None = None) -> DecodedRequest:
    head = body if isinstance(body, bytes) else json.dumps(body).encode()
    whole = head if tail is None else head + tail
    return CODEC.decode(request(whole, -1 if tail is None else len(head)), of or contract())


def tensor(data: Any = None, *, name: str = "x", shape: Any = (1, 2), datatype: str = "FP32", **more: Any) -> Any:
    return {"name": name, "shape": shape, "datatype": datatype, **({} if data is None else {"data": data}), **more}


def refusal(body: object, tail: bytes | None = None, of: Contract | None = None) -> str:
    with pytest.raises(InvalidRequest) as refused:
        decode(body, tail, of)
    return refused.value.message


def answer(
    outputs: dict[str, Array], of: Contract, wire: dict[str, Any] | None = None
) -> tuple[dict[str, Any], bytes, Prediction]:
    """The answer's JSON, what follows it, and the whole."""
    body = json.dumps({"inputs": [tensor([1, 2])], **(wire or {})}).encode()
    asked = request(body)
    said = CODEC.encode(asked, CODEC.decode(asked, of), Result(outputs=outputs), info(of))
    length = dict(said.headers).get(HEADER_LENGTH)
    end = len(said.body) if length is None else int(length)
    return json.loads(said.body[:end]), said.body[end:], said


# -- what is written is read ---------------------------------------------------------------------


@pytest.mark.parametrize("datatype", NUMBERS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_numbers_come_through_json_nested_or_flat_and_through_bytes(datatype: str, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    dtype = NUMPY[datatype]
    element: st.SearchStrategy[Any]
    if dtype.kind == "f":
        element = st.floats(allow_nan=False, allow_infinity=False, width=32 if datatype == "FP32" else 64)
    else:
        limits = np.iinfo(dtype)  # type: ignore[type-var]
        element = st.integers(int(limits.min), int(limits.max))
    count = int(np.prod(shape))
    values = data.draw(st.lists(element, min_size=count, max_size=count))
    wanted = np.array(values, dtype).reshape(shape)
    for said in (wanted.ravel().tolist(), wanted.tolist()):
        decoded = decode({"inputs": [tensor(said, shape=shape, datatype=datatype)]})
        assert decoded.inputs["x"].dtype == dtype
        np.testing.assert_array_equal(decoded.inputs["x"], wanted)
    raw = wanted.tobytes()
    head = {"inputs": [tensor(shape=shape, datatype=datatype, parameters={"binary_data_size": len(raw)})]}
    np.testing.assert_array_equal(decode(head, raw).inputs["x"], wanted)


def test_many_numbers_are_the_same_as_few() -> None:
    many = np.linspace(-1, 1, 70_000, dtype=np.float32)
    decoded = decode({"inputs": [tensor(many.tolist(), shape=[1, 70_000])]})
    np.testing.assert_array_equal(decoded.inputs["x"], many.reshape(1, -1))
    assert "out of the range of FP32" in refusal({"inputs": [tensor([1e39, *many.tolist()], shape=[1, 70_001])]})


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "BOOL"])
def test_half_precision_and_truth_values_come_through_bytes(datatype: str) -> None:
    wanted = np.array([[0, 1]], NUMPY[datatype])
    raw = wanted.tobytes()
    head = {"inputs": [tensor(datatype=datatype, parameters={"binary_data_size": len(raw)})]}
    decoded = decode(head, raw)
    np.testing.assert_array_equal(decoded.inputs["x"], wanted)
    assert decoded.datatypes == {"x": datatype}


@settings(max_examples=30, deadline=None)
@given(elements=st.lists(st.binary(max_size=6), max_size=4))
def test_bytes_come_through_with_whatever_they_hold(elements: list[bytes]) -> None:
    raw = b"".join(struct.pack("<I", len(element)) + element for element in elements)
    head = {
        "inputs": [tensor(shape=[len(elements)], datatype="BYTES", parameters={"binary_data_size": len(raw)})],
        "parameters": {"binary_data_output": True},
    }
    of = contract(TensorSpec("x", "BYTES", (-1,)), outputs=(TensorSpec("y", "BYTES", (-1,)),))
    decoded = decode(head, raw, of)
    assert decoded.inputs["x"].tolist() == elements
    said = CODEC.encode(request(b""), decoded, Result(outputs={"y": decoded.inputs["x"]}), info(of))
    length = int(dict(said.headers)[HEADER_LENGTH])
    assert said.body[length:] == raw
    texts = [base64.b64encode(element).decode() for element in elements]
    sixty_four = tensor(texts, shape=[len(texts)], datatype="BYTES", parameters={"content_type": "base64"})
    assert decode({"inputs": [sixty_four]}).inputs["x"].tolist() == elements


def test_texts_are_utf8_in_json_and_back() -> None:
    of = contract(outputs=(TensorSpec("y", "BYTES", (-1,)),))
    decoded = decode({"inputs": [tensor(["grün", "\x00"], shape=[2, 1], datatype="BYTES")]})
    assert decoded.inputs["x"].tolist() == [["grün".encode()], [b"\x00"]]
    assert answer({"y": decoded.inputs["x"]}, of)[0]["outputs"][0]["data"] == ["grün", "\x00"]


def test_binary_and_json_inputs_mix_and_lie_behind_each_other() -> None:
    a, b = np.array([[1, 2]], np.float32), np.array([[True, False, True]])
    head = {
        "inputs": [
            tensor(name="a", parameters={"binary_data_size": a.nbytes}),
            tensor([7, 8], name="listed", datatype="INT64"),
            tensor(name="b", shape=[1, 3], datatype="BOOL", parameters={"binary_data_size": b.nbytes}),
        ]
    }
    decoded = decode(head, a.tobytes() + b.tobytes())
    np.testing.assert_array_equal(decoded.inputs["a"], a)
    np.testing.assert_array_equal(decoded.inputs["b"], b)
    np.testing.assert_array_equal(decoded.inputs["listed"], [[7, 8]])


def test_unaligned_bytes_are_read_as_well_as_aligned_ones() -> None:
    flag, numbers = np.array([True]), np.arange(3, dtype=np.float64)
    for pad in range(8):
        head = {
            "id": "i" * pad,
            "inputs": [
                tensor(name="flag", shape=[1], datatype="BOOL", parameters={"binary_data_size": 1}),
                tensor(name="numbers", shape=[3], datatype="FP64", parameters={"binary_data_size": 24}),
            ],
        }
        found = decode(head, flag.tobytes() + numbers.tobytes()).inputs["numbers"]
        assert found.flags.aligned
        np.testing.assert_array_equal(found, numbers)


def test_a_body_without_json_is_the_only_input() -> None:
    of = contract(TensorSpec("x", "FP32", (-1, 3, -1)))
    raw = np.arange(6, dtype=np.float32).tobytes()
    decoded = CODEC.decode(request(raw, 0), of)
    np.testing.assert_array_equal(decoded.inputs["x"], np.arange(6, dtype=np.float32).reshape(1, 3, 2))
    said = CODEC.encode(request(raw, 0), decoded, Result(outputs={"y": np.ones((1, 2), np.float32)}), info(of))
    assert said.content_type == BINARY_TYPE
    text = CODEC.decode(request(b"any \xff bytes", 0), contract(TensorSpec("t", "BYTES", (-1, 1))))
    assert text.inputs["t"].tolist() == [[b"any \xff bytes"]]


@pytest.mark.parametrize(
    ("inputs", "raw", "said"),
    [
        ((TensorSpec("a", "FP32", (-1, 1)), TensorSpec("b", "FP32", (-1, 1))), b"1234", "models with one input"),
        ((TensorSpec("a", "FP32", (-1, -1, -1)),), b"1234", "2 variable dimensions"),
        ((TensorSpec("a", "FP32", (-1, 3, -1)),), b"12345", "takes 0 bytes; 5 came"),
        ((TensorSpec("a", "BYTES", (-1, 2)),), b"x", "one element"),
    ],
)
def test_a_body_without_json_that_cannot_be_read_one_way_is_refused(
    inputs: tuple[TensorSpec, ...], raw: bytes, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        CODEC.decode(request(raw, 0), contract(*inputs))


# -- answers -------------------------------------------------------------------------------------


def test_an_answer_names_model_version_and_request() -> None:
    of = contract(outputs=(TensorSpec("y", "FP32", (-1, 2)),))
    asked = request(json.dumps({"id": "7", "inputs": [tensor([1, 2])]}).encode(), model="digits@3", version="3")
    known = msgspec.structs.replace(info(of), version="3")
    said = CODEC.encode(asked, CODEC.decode(asked, of), Result(outputs={"y": np.ones((1, 2), np.float32)}), known)
    assert json.loads(said.body) == {
        "model_name": "digits",
        "model_version": "3",
        "id": "7",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 1.0]}],
    }
    assert said.content_type == "application/json"


def test_a_body_may_repeat_the_model_s_name_and_not_name_another() -> None:
    for named, message in (
        ({"model_name": "digits", "model_version": "3"}, None),
        ({"model_name": "digits@3"}, "model_name is 'digits@3', and the path asks for 'digits'"),
        ({"model_name": None, "model_version": ""}, None),
        ({"model_name": "letters"}, "model_name is 'letters', and the path asks for 'digits'"),
        ({"model_version": "4"}, "model_version is '4', and the path asks for '3'"),
    ):
        body = json.dumps({**named, "inputs": [tensor([1, 2])]}).encode()
        asked = request(body, model="digits@3", version="3")
        if message is None:
            assert CODEC.decode(asked, contract()).inputs
        else:
            with pytest.raises(InvalidRequest, match=message):
                CODEC.decode(asked, contract())


def test_each_output_comes_as_it_was_asked_for() -> None:
    specs = (TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "INT32", (-1, 1)), TensorSpec("c", "FP16", (-1, 1)))
    outputs: dict[str, Array] = {
        "a": np.array([[0.5, 1]], np.float32),
        "b": np.array([[3]], np.int32),
        "c": np.array([[2]], np.float16),
    }
    wanted = [{"name": "c", "parameters": {"binary_data": True}}, {"name": "b"}]
    head, tail, said = answer(outputs, contract(outputs=specs), {"outputs": wanted})
    assert [output["name"] for output in head["outputs"]] == ["c", "b"]
    assert head["outputs"][0]["parameters"] == {"binary_data_size": 2}
    assert head["outputs"][1]["data"] == [3]
    assert tail == outputs["c"].tobytes()
    assert said.content_type == BINARY_TYPE
    both = {"parameters": {"binary_data_output": True}, "outputs": [*wanted, {"name": "a"}]}
    both["outputs"][1]["parameters"] = {"binary_data": False}  # type: ignore[index]
    head, tail, _ = answer(outputs, contract(outputs=specs), both)
    assert tail == outputs["c"].tobytes() + outputs["a"].tobytes()
    assert head["outputs"][1]["data"] == [3]


def test_half_precision_in_json_is_refused_with_the_way_to_get_it() -> None:
    with pytest.raises(InvalidRequest, match="binary_data: true"):
        answer({"y": np.ones((1, 1), np.float16)}, contract(outputs=(TensorSpec("y", "FP16", (-1, 1)),)))
    with pytest.raises(InvalidRequest, match="binary_data: true"):
        answer({"y": np.array([b"\xff"], object)}, contract(outputs=(TensorSpec("y", "BYTES", (-1,)),)))


def test_classes_are_the_best_places_with_their_labels_for_each_row() -> None:
    spec = TensorSpec("y", "FP32", (-1, 3), labels=("cat", "dog"))
    wanted = {"outputs": [{"name": "y", "parameters": {"classification": 2}}]}
    head, _, _ = answer({"y": np.array([[1, 3, 2], [9, 8, 7]], np.float32)}, contract(outputs=(spec,)), wanted)
    [output] = head["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [2, 2])
    assert output["data"] == ["3.000000:1:dog", "2.000000:2", "9.000000:0:cat", "8.000000:1:dog"]


def test_more_classes_than_there_are_places_are_all_of_them() -> None:
    wanted = {"outputs": [{"name": "y", "parameters": {"classification": 9, "binary_data": True}}]}
    of = contract(outputs=(TensorSpec("y", "INT32", (2,)),), max_batch_size=0)
    head, tail, _ = answer({"y": np.array([5, 6], np.int32)}, of, wanted)
    assert head["outputs"][0]["shape"] == [2]
    assert tail == b"\x03\x00\x00\x006:1\x03\x00\x00\x005:0"


def test_the_model_s_own_parameters_go_to_it_and_the_protocol_s_do_not() -> None:
    given = {"binary_data_output": False, "sequence_id": 3, "priority": 1, "timeout": 5, "temperature": 0.5}
    assert decode({"inputs": [tensor([1, 2])], "parameters": given}).parameters == {"temperature": 0.5}


# -- lies ----------------------------------------------------------------------------------------

BINARY: dict[str, Any] = {"parameters": {"binary_data_size": 8}}


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([tensor([1, 2, 3])], "takes 2 values; 3 came"),
        ([tensor([1])], "takes 2 values; 1 came"),
        ([tensor([[1], [2, 3]], shape=[2, 1])], "different lengths"),
        ([tensor([[1, 2, 3], [4, 5, 6]], shape=[3, 2])], "nested as [2, 3]"),
        ([tensor([1, 2], shape=[-1, 2])], "dimension of -1"),
        ([tensor([1, 2], shape=[2**63])], "dimension of 9223372036854775808"),
        ([tensor([1, 2], shape=[10**400])], "integer of 1329 bits"),
        ([tensor([1, 2], shape=[2**40, 2**40])], "has 1099511627776 rows; this model takes at most 65536"),
        ([tensor([1, 2], shape=[1] * 40)], "40 dimensions"),
        ([tensor([1, 2], shape=-1)], "inputs[0].shape"),
        ([tensor([1, 2], shape=[1.5, 2])], "inputs[0].shape"),
        ([tensor([1, 2], datatype="FP99")], "the datatype 'FP99'; expected one of BOOL"),
        ([tensor(datatype="FP99")], "the datatype 'FP99'"),
        ([tensor([1, 2], datatype="FP16")], "send it as binary data"),
        ([tensor([1, 2], datatype="BF16")], "send it as binary data"),
        ([tensor([300, 2], datatype="INT8")], "out of the range of INT8"),
        ([tensor([-1, 2], datatype="UINT64")], "out of the range of UINT64"),
        ([tensor([1e39, 2])], "out of the range of FP32"),
        ([tensor([1.5, 2], datatype="INT32")], "whole numbers"),
        ([tensor([1, 0], datatype="BOOL")], "true or false"),
        ([tensor(["1", "2"])], "numbers"),
        ([tensor([None, 2], datatype="INT64")], "whole numbers"),
        ([tensor([None, True])], "numbers or null"),
        ([tensor([[None, 2], [3]], shape=[2, 2])], "different lengths"),
        ([tensor([1, 2], datatype="BYTES")], "texts"),
        ([tensor(["=", "="], datatype="BYTES", parameters={"content_type": "base64"})], "not base64"),
        ([tensor("1,2")], "has a text as its data"),
        ([tensor({"a": 1})], "has an object as its data"),
        ([tensor()], "has no data"),
        ([tensor([1, 2]), tensor([1, 2])], "'x' comes twice"),
        ([], "no inputs"),
        ([tensor([1, 2], **BINARY)], "both data and binary_data_size"),
        ([tensor(**BINARY)], "0 bytes are left"),
        ([tensor([1, 2], parameters={"binary_data_size": -1})], "'-1'; a number of bytes"),
        ([tensor([1, 2], parameters={"binary_data_size": True})], "'True'; a number of bytes"),
        ([tensor([1, 2], parameters={"shared_memory_region": "r"})], "shared memory"),
        ([tensor([1, 2], colour="red")], "inputs[0].colour"),
        ([{"name": "x"}], "inputs[0].shape"),
        ("x", "inputs"),
    ],
)
def test_a_lie_is_refused_by_name(inputs: object, said: str) -> None:
    assert said in refusal({"inputs": inputs})


@pytest.mark.parametrize(
    ("given", "tail", "said"),
    [
        (tensor(parameters={"binary_data_size": 8}), b"1234", "has 8 bytes of binary data; 4 bytes are left"),
        (tensor(parameters={"binary_data_size": 8}), b"123456789", "1 bytes of the body belong to no input"),
        (tensor(parameters={"binary_data_size": 4}), b"1234", "takes 8 bytes; 4 came"),
        (
            tensor(shape=[1, 2**62, 2**62], parameters={"binary_data_size": 4}),
            b"1234",
            "more than 2**126 bytes; 4 came",
        ),
        (tensor(datatype="BOOL", parameters={"binary_data_size": 2}), b"\x01\x02", "neither 0 nor 1"),
        (tensor(datatype="FP1", parameters={"binary_data_size": 2}), b"\x01\x02", "the datatype 'FP1'"),
        (tensor(datatype="BYTES", parameters={"binary_data_size": 4}), b"\0\0\0\0", "at least 8 bytes; 4 came"),
        (
            tensor(datatype="BYTES", parameters={"binary_data_size": 9}),
            b"\x01\0\0\0a\0\0\0\x09",
            "element 1 has a length of 150994944 bytes; 0 are left",
        ),
        (tensor(datatype="BYTES", parameters={"binary_data_size": 9}), b"\0\0\0\0\0\0\0\0x", "1 bytes are left over"),
        (
            tensor(datatype="BYTES", parameters={"binary_data_size": 8}),
            b"\x02\0\0\0ab\0\0",
            "ends within the length of element 1",
        ),
        (
            tensor(shape=[1, 2**15], datatype="BYTES", parameters={"binary_data_size": 4}),
            b"\0\0\0\0",
            "131072 bytes; 4 came",
        ),
    ],
)
def test_bytes_that_are_not_what_the_shape_says_are_refused(given: Any, tail: bytes, said: str) -> None:
    assert said in refusal({"inputs": [given]}, tail)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"\xff\xfe", "not valid"),
        (b'{"inputs":[],"id":"\xff"}', "not valid UTF-8"),
        (b'{"inputs":[],"parameters":{"\xff":1}}', "not valid UTF-8"),
        (b'{"inputs":[],"inputs":[]}', "'inputs' appears twice"),
        (b'{"inputs":[{"name":"x","name":"y","shape":[1],"datatype":"FP32","data":[1]}]}', "'name' appears twice"),
        (b'{"inputs":[],"\\u0069nputs":[]}', "'inputs' appears twice"),
        (b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[NaN]}]}', "not valid JSON"),
        (b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1e400]}]}', "out of range"),
        (b'{"inputs":' + b"[" * 100_000, "Expected `object`, got `array`"),
        (b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":' + b"[" * 90 + b"]" * 90 + b"}]}", "90 deep"),
        (b'{"inputs":[],"priority":1}', "'priority' is not known"),
        (b'{"inputs":[],"parameters":{"a":{}}}', "parameters"),
        (b'{"inputs":[],"parameters":{"binary_data_output":1}}', "no inputs"),
    ],
)
def test_what_is_no_request_is_refused(body: bytes, said: str) -> None:
    found = refusal(body)
    assert said in found


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([{"name": "y"}, {"name": "y"}], "asked for twice"),
        ([{"name": "y", "parameters": {"classification": 0}}], "number of classes from 1"),
        ([{"name": "y", "parameters": {"classification": 2**31}}], "number of classes from 1 to 2147483647"),
        ([{"name": "y", "parameters": {"classification": True}}], "number of classes from 1"),
        ([{"name": "y", "parameters": {"binary_data": "yes"}}], "true or false"),
        ([{"name": "y", "parameters": {"shared_memory_region": "r"}}], "shared memory"),
    ],
)
def test_outputs_that_cannot_be_given_are_refused(outputs: object, said: str) -> None:
    assert said in refusal({"inputs": [tensor([1, 2])], "outputs": outputs})


def test_a_header_longer_than_the_body_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="is 99, and the body has 2 bytes"):
        CODEC.decode(request(b"{}", 99), contract())


def test_no_memory_is_taken_for_what_a_shape_promises() -> None:
    lies = [
        tensor(shape=[2**40], datatype="FP32", parameters={"binary_data_size": 4}),
        tensor(shape=[2**30], datatype="BYTES", parameters={"binary_data_size": 4}),
    ]
    tracemalloc.start()
    for lie in lies:
        refusal({"inputs": [lie]}, b"\0\0\0\0")
    refusal({"inputs": [tensor([1] * 4, shape=[2**33])]})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


VALID = json.dumps(
    {
        "id": "1",
        "inputs": [tensor([1, 2]), tensor(["a", "b"], name="t", datatype="BYTES"), tensor(name="b", **BINARY)],
        "outputs": [{"name": "y", "parameters": {"classification": 1}}],
        "parameters": {"binary_data_output": True},
    }
).encode()


@settings(max_examples=300, deadline=None)
@given(cuts=st.lists(st.tuples(st.integers(0, len(VALID)), st.integers(0, 9), st.binary(max_size=4)), max_size=3))
def test_a_mutated_request_is_read_or_refused_and_nothing_else(cuts: list[tuple[int, int, bytes]]) -> None:
    head = VALID
    for at, length, instead in cuts:
        head = head[:at] + instead + head[at + length :]
    for body, end in ((head + b"\0" * 8, len(head)), (head, -1), (head + b"\0" * 8, len(VALID)), (head, 0)):
        with contextlib.suppress(InvalidRequest):
            CODEC.decode(request(body, end), contract(TensorSpec("t", "BYTES", (-1, 1))))


@given(size=st.integers(), shape=st.lists(st.integers(), max_size=3), datatype=st.sampled_from(list(NUMPY)))
def test_no_size_and_no_shape_reads_past_the_body(size: int, shape: list[int], datatype: str) -> None:
    given_ = tensor(shape=shape, datatype=datatype, parameters={"binary_data_size": size})
    try:
        found = decode({"inputs": [given_]}, b"\1\0\0\0a\0\0\0").inputs["x"]
    except InvalidRequest:
        return
    assert list(found.shape) == shape
    assert size == 8


def test_names_of_any_length_make_short_messages() -> None:
    assert len(refusal({"inputs": [tensor([1], name="n" * 100_000)]})) < 500
    assert len(refusal({"inputs": [tensor([1, 2], datatype="D" * 100_000)]})) < 500


@given(
    st.lists(st.floats(width=32, allow_infinity=False) | st.just(math.nan), min_size=1, max_size=12),
    st.sampled_from(["FP32", "FP64"]),
    st.booleans(),
)
def test_what_is_nan_in_an_answer_is_nan_in_a_request(values: list[float], datatype: str, nested: bool) -> None:
    array = np.array(values, NUMPY[datatype]).reshape(-1, 1)
    of = contract(TensorSpec("x", datatype, (-1, 1)), outputs=(TensorSpec("x", datatype, (-1, 1)),))
    (told,) = answer({"x": array}, of)[0]["outputs"]
    data = [[value] for value in told["data"]] if nested else told["data"]
    asked = tensor(data, shape=told["shape"], datatype=told["datatype"])
    np.testing.assert_array_equal(decode({"inputs": [asked]}, of=of).inputs["x"], array)
