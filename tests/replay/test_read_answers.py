"""Answers of every dialect in one form: what differs each time does not count, and neither do the cuts of a stream."""

from __future__ import annotations

import base64
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.replay.answers import Answer, read_answer

CHAT, INFER = "/v1/chat/completions", "/v2/models/{model}/infer"


def body(document: Any) -> bytes:
    return json.dumps(document).encode()


def sse(*events: Any) -> bytes:
    return b"".join([b"data: " + body(event) + b"\n\n" for event in events]) + b"data: [DONE]\n\n"


def read(route: str, data: bytes, *, stream: bool = False, status: int = 200) -> Answer:
    return read_answer(route, status, data, is_stream=stream)


def chat(text: str, **changes: Any) -> bytes:
    return body(
        {
            "id": "chatcmpl-1",
            "created": 1,
            "model": "m",
            "system_fingerprint": "fp",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
            **changes,
        }
    )


def test_ids_times_names_and_cached_tokens_do_not_count() -> None:
    one = read(CHAT, chat("hello"))
    other = read(CHAT, chat("hello", id="chatcmpl-2", created=2, model="m@2", usage={"prompt_tokens": 3}))
    assert one.exact == other.exact
    assert one.exact != read(CHAT, chat("hello!")).exact
    assert (one.text, one.finish, one.usage, one.error) == ("hello", ("stop",), (3, 2), "")


@given(st.text(max_size=30), st.lists(st.integers(0, 30), max_size=5), st.lists(st.integers(0, 30), max_size=5))
def test_the_places_where_a_stream_is_cut_do_not_count(text: str, one: list[int], other: list[int]) -> None:
    def streamed(cuts: list[int]) -> bytes:
        places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        pieces = [text[start:stop] for start, stop in itertools.pairwise(places)]
        events = [{"id": str(cuts), "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
        events += [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
        return sse(*events, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})

    first, second = read(CHAT, streamed(one), stream=True), read(CHAT, streamed(other), stream=True)
    assert first.exact == second.exact
    assert first.text == text
    assert first.finish == ("stop",)


def test_choices_and_calls_of_a_stream_are_put_together_by_their_index() -> None:
    def call(choice: int, index: int, **function: str) -> dict[str, Any]:
        return {"choices": [{"index": choice, "delta": {"tool_calls": [{"index": index, "function": function}]}}]}

    found = read(
        CHAT,
        sse(
            call(1, 0, name="a", arguments='{"x"'),
            {"choices": [{"index": 0, "delta": {"content": "Se"}, "logprobs": {"content": [{"token": "Se"}]}}]},
            call(1, 1, name="b", arguments="{}"),
            call(1, 0, arguments=":1}"),
            {"choices": [{"index": 0, "delta": {"content": "e."}, "logprobs": {"content": [{"token": "e."}]}}]},
        ),
        stream=True,
    )
    document = json.loads(found.exact)
    assert document["choices"]["000000"]["delta"]["content"] == "See."
    assert [one["token"] for one in document["choices"]["000000"]["logprobs"]["content"]] == ["Se", "e."]
    calls = document["choices"]["000001"]["delta"]["tool_calls"]
    assert [calls[place]["function"] for place in sorted(calls)] == [
        {"name": "a", "arguments": '{"x":1}'},
        {"name": "b", "arguments": "{}"},
    ]


def test_a_message_and_a_response_are_put_together_from_their_events() -> None:
    message = sse(
        {"type": "message_start", "message": {"id": "msg_1", "content": [], "usage": {"input_tokens": 4}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    )
    found = read("/v1/messages", message, stream=True)
    assert (found.text, found.finish, found.usage) == ("Hello", ("end_turn",), (4, 2))
    whole = {"id": "r", "output": [{"id": "m", "content": [{"type": "output_text", "text": "Hello"}]}], "error": None}
    streamed = sse({"type": "response.created", "response": {}}, {"type": "response.completed", "response": whole})
    assert read("/v1/responses", streamed, stream=True).exact == read("/v1/responses", body(whole)).exact


def test_errors_are_equal_by_their_kind_and_have_a_sentence() -> None:
    failed = body({"error": {"message": "max_tokens is 0", "code": "invalid", "type": "bad"}})
    found = read(CHAT, failed, status=400)
    assert (found.error, found.exact) == ("400: max_tokens is 0", b"400 invalid")
    late = read(CHAT, sse({"choices": []}, {"error": {"message": "the worker died"}}), stream=True)
    assert late.error == "200: the worker died"
    assert read(CHAT, b"<html>").error == "the answer is no JSON"
    assert read(INFER, body({"outputs": [{"name": "y"}]})).error.startswith("the answer is not understood")


def test_tensors_are_the_same_in_json_and_in_binary() -> None:
    values = np.array([[0.1, 0.7], [1e-30, -2.5]], np.float32)
    listed = {"name": "y", "datatype": "FP32", "shape": [2, 2], "data": [float(str(one)) for one in values.ravel()]}
    header = {"name": "y", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}}
    one = read(INFER, body({"model_name": "m", "outputs": [listed]}))
    other = read(INFER, body({"model_name": "m", "outputs": [header]}) + values.tobytes())
    assert one.tensors["y"].tobytes() == other.tensors["y"].tobytes() == values.tobytes()
    assert one.labels == other.labels == ("1", "0")
    changed = read(INFER, body({"outputs": [header]}) + (values + np.float32(1)).tobytes())
    assert changed.exact != read(INFER, body({"outputs": [header]}) + values.tobytes()).exact


def test_labels_are_texts_integers_best_classes_and_first_ranks() -> None:
    words = {"name": "label", "datatype": "BYTES", "shape": [2], "data": ["cat", "dog"]}
    scores = {"name": "p", "datatype": "FP32", "shape": [2, 2], "data": [0.1, 0.9, 0.8, 0.2]}
    assert read(INFER, body({"outputs": [words, scores]})).labels == ("cat", "dog")
    assert read("/predict", body([{"label": "a", "score": 0.2}, {"label": "b", "score": 0.8}])).labels == ("b",)
    classes = {"data": [{"label": "x", "probs": [0.9, 0.1]}, {"label": "y", "probs": [0.2, 0.8]}]}
    assert read("/classify", body(classes)).labels == ("x", "y")
    ranks = {"results": [{"index": 2, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]}
    assert read("/v1/rerank", body(ranks)).labels == ("2",)
    assert read(CHAT, chat("x")).labels == ()


@pytest.mark.parametrize("as_base64", [False, True])
def test_vectors_are_float32_in_both_forms(as_base64: bool) -> None:
    vector = np.array([0.25, -1.5], np.float32)
    value: Any = base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
    found = read("/v1/embeddings", body({"data": [{"index": 0, "embedding": value}]}))
    assert [array.tobytes() for array in found.tensors.values()] == [vector.tobytes()]
