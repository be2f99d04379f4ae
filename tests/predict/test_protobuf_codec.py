"""KServe v2 over gRPC, byte by byte: our reader of protobuf against the reference, tensors there and back."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.gateway.grpc.messages import message_type

from inferd.errors import InvalidRequest
from inferd.gateway.grpc.envelope import read_envelope
from inferd.predict.codecs.v2_grpc import V2GrpcCodec, _known, varints
from inferd.predict.codecs.v2_parameters import parameter, parameter_entry
from inferd.predict.contract import NUMPY, Array, Contract
from inferd.predict.runtime import Result
from inferd.protowire import fields, number, sized
from inferd.types import ModelInfo, PredictRequest, TensorSpec

MANY = 300
CODEC = V2GrpcCodec()
REQUEST: Any = message_type("ModelInferRequest")
RESPONSE: Any = message_type("ModelInferResponse")
CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def request_of(body: bytes) -> PredictRequest:
    return PredictRequest(id="r", model="m", dialect="v2.grpc", body=body)


def decode(body: bytes) -> Any:
    return CODEC.decode(request_of(body), Contract(inputs=(), outputs=()))


def info(*outputs: TensorSpec, max_batch_size: int = 0) -> ModelInfo:
    return ModelInfo(
        name="m",
        source="",
        architecture="",
        dtype="float32",
        max_model_len=0,
        vocab_size=0,
        num_parameters=0,
        num_blocks=0,
        block_size=0,
        max_num_seqs=0,
        fingerprint="",
        kind="predict",
        outputs=outputs,
        max_batch_size=max_batch_size,
    )


texts = st.text(max_size=12)
values = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**64 - 1), texts, st.floats(allow_nan=False, allow_infinity=False)
)


def put(choice: Any, value: bool | int | str | float) -> None:
    if isinstance(value, bool):
        choice.bool_param = value
    elif isinstance(value, int):
        if value < 2**63:
            choice.int64_param = value
        else:
            choice.uint64_param = value
    elif isinstance(value, str):
        choice.string_param = value
    else:
        choice.double_param = value


@st.composite
def tensors(draw: st.DrawFn, datatypes: list[str]) -> tuple[str, Array]:
    datatype = draw(st.sampled_from(datatypes))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    if datatype == "BYTES":
        array = np.empty(shape, np.object_)
        for place in np.ndindex(*shape):
            array[place] = draw(st.binary(max_size=9))
        return datatype, array
    return datatype, draw(arrays.arrays(NUMPY[datatype], shape))


def same(left: Array, right: Array) -> bool:
    """Bit by bit, NaN included."""
    if left.dtype.kind == "O":
        return left.shape == right.shape and left.tolist() == right.tolist()
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def raw(array: Array) -> bytes:
    if array.dtype.kind == "O":
        return b"".join(struct.pack("<I", len(element)) + element for element in array.ravel().tolist())
    return array.tobytes()


@settings(max_examples=60)
@given(
    texts,
    texts,
    texts,
    st.dictionaries(texts, values, max_size=4),
    st.lists(tensors(list(NUMPY)), min_size=1, max_size=3),
)
def test_raw_tensors_are_read_as_they_were_written(
    model: str, version: str, request_id: str, parameters: dict[str, Any], inputs: list[tuple[str, Array]]
) -> None:
    message = REQUEST(model_name=model, model_version=version, id=request_id)
    for key, value in parameters.items():
        put(message.parameters[key], value)
    for index, (datatype, array) in enumerate(inputs):
        message.inputs.add(name=f"input {index}", datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(raw(array))
    body = message.SerializeToString()
    decoded = decode(body)
    assert list(decoded.inputs) == [f"input {index}" for index in range(len(inputs))]
    for index, (datatype, array) in enumerate(inputs):
        assert decoded.datatypes[f"input {index}"] == datatype
        assert same(decoded.inputs[f"input {index}"], array)
    envelope = read_envelope(body)
    assert envelope == (model, version, request_id, parameters)


@settings(max_examples=100)
@given(tensors(list(CONTENTS)), st.booleans())
def test_values_are_read_from_the_field_of_their_datatype(tensor: tuple[str, Array], in_two: bool) -> None:
    datatype, array = tensor
    flat = array.ravel().tolist()
    parts = (
        [flat[:1], flat[1:]] if in_two else [flat]
    )  # a message that comes twice is merged: one half behind the other
    message = REQUEST.InferInputTensor(name="x", datatype=datatype, shape=array.shape).SerializeToString()
    for part in parts:
        half = REQUEST.InferInputTensor()
        getattr(half.contents, CONTENTS[datatype]).extend(part)
        message += half.SerializeToString()
    body = sized(1, b"m") + sized(5, message)
    assert list(getattr(REQUEST.FromString(body).inputs[0].contents, CONTENTS[datatype])) == flat or any(
        value != value for value in flat
    )
    assert same(decode(body).inputs["x"], array)


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [("BOOL", 1, [1, 0]), ("INT16", 2, [300, 7]), ("INT64", 3, [1 << 40, 7]), ("UINT8", 4, [255, 7])],
)
def test_whole_numbers_may_come_one_by_one(datatype: str, field: int, values: list[int]) -> None:
    contents = b"".join(number(field << 3) + number(value) for value in values)
    message = REQUEST.InferInputTensor(name="x", datatype=datatype, shape=[2]).SerializeToString() + sized(5, contents)
    body = sized(1, b"m") + sized(5, message)
    assert list(getattr(REQUEST.FromString(body).inputs[0].contents, CONTENTS[datatype])) == values
    assert decode(body).inputs["x"].tolist() == values


@settings(max_examples=MANY)
@given(st.binary(max_size=60))
def test_any_bytes_are_fields_for_us_where_they_are_for_the_reference(body: bytes) -> None:
    reference: Any = message_type("ModelTransactionPolicy")  # one field, which any number fits into
    try:
        reference.FromString(body)
    except DecodeError:
        with pytest.raises(InvalidRequest):
            fields(body, 0, len(body))
    else:
        fields(body, 0, len(body))


@pytest.mark.parametrize("datatype", ["", "FP31", "int64"])
def test_a_datatype_that_there_is_not_is_refused_with_those_that_there_are(datatype: str) -> None:
    message = REQUEST(model_name="m")
    message.inputs.add(name="x", datatype=datatype, shape=[1])
    message.raw_input_contents.append(bytes(8))
    with pytest.raises(InvalidRequest, match=r"x'? has the datatype .* expected one of .*INT64"):
        decode(message.SerializeToString())


@pytest.mark.parametrize("wish", [None, False, True])
def test_times_of_steps_are_told_to_requests_that_ask(wish: bool | None) -> None:
    message = REQUEST(model_name="m")
    message.inputs.add(name="x", datatype="INT64", shape=[1])
    message.raw_input_contents.append(bytes(8))
    put(message.parameters["another"], True)
    if wish is not None:
        put(message.parameters["return_step_times"], wish)
    assert decode(message.SerializeToString()).wants_times is bool(wish)


@settings(max_examples=MANY)
@given(st.data())
def test_a_damaged_request_is_read_as_by_the_reference_or_refused(data: st.DataObject) -> None:
    message = REQUEST(model_name="model", model_version="1", id="id")
    put(message.parameters["sequence_id"], 300)
    put(message.parameters["x"], 0.5)
    message.inputs.add(name="x", datatype="INT64", shape=[2]).contents.int64_contents.extend([-1, 2**40])
    body = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(body) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "add"])):
            case "flip":
                body[place] = data.draw(st.integers(0, 255))
            case "cut":
                del body[place:]
            case "add":
                body[place:place] = data.draw(st.binary(min_size=1, max_size=3))
        if not body:
            return
    sent = bytes(body)
    try:
        envelope = read_envelope(sent)
    except InvalidRequest:
        envelope = None
    try:
        decoded = decode(sent)
    except InvalidRequest:
        decoded = None
    try:
        read = REQUEST.FromString(sent)
    except DecodeError:
        assert envelope is None or decoded is None, "the reference refuses it"
        return
    if envelope is not None:
        assert envelope[:3] == (read.model_name, read.model_version, read.id)
        # Of an entry with unknown fields the reference for Python keeps nothing, the one for C++ key and value.
        assert set(envelope.parameters) >= set(read.parameters)
        for key in read.parameters:
            value = envelope.parameters[key]
            choice = read.parameters[key].WhichOneof("parameter_choice")
            said = None if choice is None else getattr(read.parameters[key], choice)
            assert value == said or (value != value and said != said)
    if decoded is not None:
        assert list(decoded.inputs) == [tensor.name for tensor in read.inputs]
        for tensor in read.inputs:
            assert decoded.inputs[tensor.name].shape == tuple(tensor.shape)


@given(st.lists(st.sampled_from((b"\x08\x01", b"\x12\x01x", b"\x1d1234", b"\x2b\x08\x01\x2c")), max_size=40))
def test_a_bound_refuses_messages_of_more_fields_and_no_others(pieces: list[bytes]) -> None:
    """A group counts as one field and each field within it as one more, and so does what ends it."""
    body = b"".join(pieces)
    count = sum(3 if piece[:1] == b"\x2b" else 1 for piece in pieces)
    assert fields(body, 0, len(body), count) == fields(body, 0, len(body))
    if count:
        with pytest.raises(InvalidRequest) as refused:
            fields(body, 0, len(body), count - 1)
        assert refused.value.code == "too_many_fields"


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40))
def test_many_varints_are_read_like_one(numbers: list[int]) -> None:
    body = b"--" + b"".join(number(value) for value in numbers)
    assert varints(body, 2, len(body)).tolist() == numbers


@pytest.mark.parametrize("body", [b"\x80" * 11, b"\x01" * 20 + b"\x80", b"\x80" * 10 + b"\x01" * 20])
def test_varints_that_never_end_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="protobuf"):
        varints(body, 0, len(body))


@given(texts, values)
def test_parameters_survive_the_way_there_and_back(key: str, value: Any) -> None:
    entry = parameter_entry(key, value)
    assert parameter(entry, 0, len(entry)) == (key, value)
    message = RESPONSE.FromString(sized(4, entry))
    choice = message.parameters[key]
    assert getattr(choice, choice.WhichOneof("parameter_choice")) == value


@settings(max_examples=60)
@given(st.lists(tensors(list(NUMPY)), min_size=1, max_size=3), texts)
def test_answers_are_read_by_the_reference_as_they_were_computed(
    outputs: list[tuple[str, Array]], request_id: str
) -> None:
    specs = [TensorSpec(f"out {i}", datatype, array.shape) for i, (datatype, array) in enumerate(outputs)]
    message = REQUEST(model_name="m", id=request_id)
    message.inputs.add(name="x", datatype="INT32", shape=[1]).contents.int_contents.append(1)
    request = request_of(message.SerializeToString())
    decoded = CODEC.decode(request, Contract(inputs=(), outputs=()))
    result = Result(outputs={spec.name: array for spec, (_, array) in zip(specs, outputs, strict=True)})
    answer = RESPONSE.FromString(CODEC.encode(request, decoded, result, info(*specs)).body)
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", request_id)
    assert [output.name for output in answer.outputs] == [spec.name for spec in specs]
    for described, content, (datatype, array) in zip(answer.outputs, answer.raw_output_contents, outputs, strict=True):
        assert (described.datatype, tuple(described.shape)) == (datatype, array.shape)
        assert content == raw(array)


def test_the_best_classes_come_as_texts_with_their_labels() -> None:
    message = REQUEST(model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    put(message.outputs.add(name="p").parameters["classification"], 2)
    request = request_of(message.SerializeToString())
    decoded = CODEC.decode(request, Contract(inputs=(), outputs=()))
    spec = TensorSpec("p", "FP32", (-1, 3), labels=("cat", "dog", "fox"))
    result = Result(outputs={"p": np.array([[0.25, 0.5, 0.125]], np.float32)})
    answer = RESPONSE.FromString(CODEC.encode(request, decoded, result, info(spec, max_batch_size=4)).body)
    assert (answer.outputs[0].datatype, list(answer.outputs[0].shape)) == ("BYTES", [1, 2])
    first, second = b"0.500000:1:dog", b"0.250000:0:cat"
    assert answer.raw_output_contents[0] == struct.pack("<I", 14) + first + struct.pack("<I", 14) + second


def described(datatype: str, shape: list[int], **contents: list[Any]) -> Any:
    message = REQUEST(model_name="m")
    tensor = message.inputs.add(name="x", datatype=datatype, shape=shape)
    for name, given_values in contents.items():
        getattr(tensor.contents, name).extend(given_values)
    return message


def with_raw(message: Any, *contents: bytes) -> Any:
    message.raw_input_contents.extend(contents)
    return message


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (described("FP33", [1]), "FP33"),
        (described("FP32", [-1]), "dimension of -1"),
        (described("FP32", [2**62, 2**62]), "too many values"),
        (described("FP32", [2], fp32_contents=[1.0]), "takes 2 values; 1 came"),
        (described("FP32", [1], int_contents=[1]), "fp32_contents"),
        (described("FP16", [1]), "raw_input_contents"),
        (described("INT8", [1], int_contents=[128]), "out of the range of INT8"),
        (described("UINT8", [1], uint_contents=[256]), "out of the range of UINT8"),
        (with_raw(described("FP32", [2]), b"\0" * 7), "8 bytes; 7 came"),
        (with_raw(described("FP32", [1]), b"\0" * 4, b""), "has 2 entries and inputs has 1"),
        (with_raw(described("FP32", [1], fp32_contents=[1.0]), b"\0" * 4), "send one of the two"),
        (with_raw(described("BYTES", [2]), struct.pack("<I", 9) + b"ab"), "x"),
        (with_raw(described("BOOL", [1]), b"\2"), "neither 0 nor 1"),
        (REQUEST(model_name="m"), "no inputs"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(message: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        decode(message.SerializeToString())


def test_shared_memory_is_refused_by_its_name() -> None:
    message = described("FP32", [1])
    put(message.inputs[0].parameters["shared_memory_region"], "region")
    with pytest.raises(InvalidRequest, match="shared memory"):
        decode(message.SerializeToString())


def test_an_input_that_comes_twice_is_refused() -> None:
    message = described("INT32", [1], int_contents=[1])
    message.inputs.append(message.inputs[0])
    with pytest.raises(InvalidRequest, match="comes twice"):
        decode(message.SerializeToString())


def test_large_tensors_are_views_of_the_request() -> None:
    """Whatever their place in it, aligned or copied, they can be computed with."""
    array = np.arange(1000, dtype=np.float64)
    for pad in range(8):
        message = with_raw(described("FP64", [1000]), array.tobytes())
        message.id = "i" * pad
        found = decode(message.SerializeToString()).inputs["x"]
        assert found.flags.aligned
        assert same(found, array)


def test_what_a_tensor_holds_is_not_kept_for_the_next_request() -> None:
    """Descriptions of small tensors are, and have nothing of their contents: those are one client's alone."""
    message: Any = REQUEST(model_name="m")
    message.inputs.add(name="x", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"my canary")
    message.inputs.add(name="y", datatype="FP32", shape=[0])
    decode(message.SerializeToString())
    assert any(tensor.name == "y" for tensor in _known.values())
    assert not any(b"canary" in described for described in _known)
    assert not any(tensor.contents for tensor in _known.values())
