"""The parts that are read from the bodies of dialects."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.gateway.grpc.messages import message_type

from inferd.compare.answers import Label, Numbers, Part, Text, compare
from inferd.compare.reading import ChoiceText, answer_of_body, answer_of_choices, answer_of_json
from inferd.compare.tensors import UnreadableAnswer, numbers_of

NUMPY = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}


def one(value: Any, **labels: Any) -> Part:
    (part,) = answer_of_json(value, **labels)
    return part


@given(st.sampled_from(sorted(NUMPY)), st.binary(max_size=64))
def test_the_bytes_of_every_datatype_are_numpys_numbers(datatype: str, data: bytes) -> None:
    dtype = np.dtype(NUMPY[datatype])
    data = data[: len(data) // dtype.itemsize * dtype.itemsize]
    if datatype == "BOOL":
        data = bytes(byte & 1 for byte in data)
    np.testing.assert_array_equal(numbers_of(datatype, data), np.frombuffer(data, dtype))


@given(st.lists(st.floats(width=32), max_size=9))
def test_bfloat16_is_the_upper_half_of_a_float32(values: list[float]) -> None:
    whole = np.array(values, "<f4").view("<u4") & 0xFFFF0000
    upper = (whole >> 16).astype("<u2").tobytes()
    np.testing.assert_array_equal(numbers_of("BF16", upper), whole.view("<f4"))


def test_a_chats_answer_is_its_text_and_its_end() -> None:
    body = {
        "id": "chatcmpl-1",
        "created": 1,
        "model": "m@2",
        "usage": {"total_tokens": 3},
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
    }
    assert answer_of_json(body) == (
        Numbers("choices[0].index", (0,)),
        Label("choices[0].message.role", "assistant"),
        Text("choices[0].message.content", "Hello"),
        Label("choices[0].finish_reason", "stop"),
    )


def test_generated_choices_have_texts_calls_and_ends() -> None:
    choice = ChoiceText(text="a", reasoning="b", calls=(("find", '{"x":1}'),), finish_reason="stop")
    assert answer_of_choices([choice]) == (
        Text("choices[0].text", "a"),
        Text("choices[0].reasoning", "b"),
        Label("choices[0].calls[0].name", "find"),
        Text("choices[0].calls[0].arguments", '{"x":1}'),
        Label("choices[0].finish_reason", "stop"),
    )


def test_a_classified_text_is_its_label_whatever_the_probabilities() -> None:
    def body(probability: float, label: str) -> Any:
        return {"id": "x", "data": [{"index": 0, "label": label, "probs": [probability, 1 - probability]}]}

    assert compare(answer_of_json(body(0.9, "a")), answer_of_json(body(0.8, "a"))).is_equal
    assert not compare(answer_of_json(body(0.9, "a")), answer_of_json(body(0.4, "b"))).is_equal


def test_of_scored_labels_the_best_one_is_the_answer() -> None:
    assert one([{"score": 0.2, "label": "b"}, {"score": 0.8, "label": "a"}]) == Label("[0].label", "a")


def test_a_ranking_is_compared_by_index() -> None:
    results = [{"index": 1, "relevance_score": 0.5}, {"index": 0, "relevance_score": 0.5}]
    assert one({"results": results}) == one({"results": results[::-1]}) == Numbers("results", [0, 0.5, 1, 0.5], (2, 2))


def test_an_embedding_in_base64_is_its_numbers() -> None:
    data = base64.b64encode(np.array([1.5, -2.0], "<f4").tobytes()).decode()
    found = answer_of_json({"data": [{"index": 0, "embedding": data, "object": "embedding"}]})
    assert Numbers("data[0].embedding", [1.5, -2.0], (2,)) in found


def test_tensors_are_parts_by_their_names() -> None:
    body = {
        "model_name": "m@2",
        "outputs": [
            {"name": "p", "datatype": "FP32", "shape": [1, 2], "data": [[0.25, 0.75]]},
            {"name": "c", "datatype": "INT64", "shape": [1], "data": [1]},
            {"name": "w", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]},
        ],
    }
    assert answer_of_json(body) == (
        Numbers("p", [0.25, 0.75], (1, 2)),
        Numbers("c", [1], (1,), True),
        Label("w", "a\nb"),
    )
    assert answer_of_json(body, labels={"p": ["no", "yes"]})[0] == Label("p", "yes")


def test_the_binary_form_of_tensors_is_read() -> None:
    header = msgspec.json.encode(
        {
            "outputs": [
                {"name": "p", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}},
                {"name": "w", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}},
                {"name": "q", "datatype": "FP64", "shape": [1], "data": [0.5]},
            ]
        }
    )
    body = header + np.array([1.5, 2.5], "<f4").tobytes() + b"\x02\0\0\0ab"
    assert answer_of_body(body, header_bytes=len(header)) == (
        Numbers("p", [1.5, 2.5], (2,)),
        Label("w", "ab"),
        Numbers("q", [0.5], (1,)),
    )
    for cut in range(len(body)):
        with pytest.raises(UnreadableAnswer):
            answer_of_body(body[:cut], header_bytes=len(header))


def test_answers_of_grpc_are_read_as_the_reference_writes_them() -> None:
    answer: Any = message_type("ModelInferResponse")(
        model_name="m",
        id="1",
        outputs=[
            {"name": "p", "datatype": "FP32", "shape": [1, 2]},
            {"name": "w", "datatype": "BYTES", "shape": [1]},
        ],
        raw_output_contents=[np.array([0.25, 0.75], "<f4").tobytes(), b"\x02\0\0\0ab"],
    )
    body = answer.SerializeToString()
    assert answer_of_body(body, is_grpc=True) == (Numbers("p", [0.25, 0.75], (1, 2)), Label("w", "ab"))
    del answer.raw_output_contents[1]
    with pytest.raises(UnreadableAnswer):
        answer_of_body(answer.SerializeToString(), is_grpc=True)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_answer_is_said_to_be_none(body: bytes) -> None:
    with pytest.raises(UnreadableAnswer):
        answer_of_body(body)


_json: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["index", "score", "label", "data", "embedding", "name"]), inner, max_size=4)
    ),
    max_leaves=9,
)


@given(_json)
@example([{"index": 0, "score": 1.0}, None])
@example([{"label": "a", "score": 1.0}, {"label": "b", "score": "high"}])
@example([{"index": 0, "score": None}])
def test_whatever_json_an_answer_is_it_equals_itself(value: Any) -> None:
    body = msgspec.json.encode(value)
    assert compare(answer_of_body(body), answer_of_body(body)).is_equal
