"""huggingface_hub's InferenceClient, unmodified, against a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from tests.clients.conftest import Server
from tests.clients.scripted_model import ANSWER, HELLO, SURE

GREETING = "".join(HELLO)
ASK: list[Any] = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with InferenceClient(base_url=server.api, api_key="none", timeout=60) as client:
        yield client


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_a_chat_is_answered_whole_and_streamed(client: Any) -> None:
    whole = client.chat_completion(ASK, model="scripted", temperature=0)
    assert whole.choices[0].message.content == GREETING
    stream = client.chat_completion(
        ASK, model="scripted", temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert text_of(chunks) == GREETING
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_asynchronous_client_streams(server: Server) -> None:
    async def streamed() -> str:
        async with AsyncInferenceClient(base_url=server.api, api_key="none") as client:
            stream = await client.chat_completion(ASK, model="scripted", temperature=0, stream=True)
            return text_of([chunk async for chunk in stream])

    assert asyncio.run(streamed()) == GREETING


def test_log_probabilities_and_stops(client: Any) -> None:
    answer = client.chat_completion(ASK, model="scripted", temperature=0, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert [entry.token for entry in entries][: len(HELLO)] == list(HELLO)
    stopped = client.chat_completion(ASK, model="scripted", temperature=0, stop=[" scripted"])
    assert stopped.choices[0].message.content == "Hello from a"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called_and_its_result_answered(client: Any, choice: Any) -> None:
    first = client.chat_completion(ASK, model="scripted", temperature=0, tools=[WEATHER], tool_choice=choice)
    (call,) = first.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    made: Any = {"role": "assistant", "tool_calls": [call]}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    second = client.chat_completion([*ASK, made, result], model="scripted", temperature=0, tools=[WEATHER])
    assert second.choices[0].message.content == "".join(ANSWER)


def test_an_answer_is_valid_against_its_schema(client: Any) -> None:
    sure = {"sure": {"type": "boolean"}}
    schema = {"type": "object", "properties": sure, "required": ["sure"], "additionalProperties": False}
    answer = client.chat_completion(
        ASK,
        model="scripted",
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
    )
    assert isinstance(json.loads(answer.choices[0].message.content or "")["sure"], bool)


def test_a_refusal_has_its_status_and_reason(client: Any) -> None:
    with pytest.raises(HfHubHTTPError, match="absent") as caught:
        client.chat_completion(ASK, model="absent")
    assert caught.value.response.status_code == 404
    with pytest.raises(HfHubHTTPError, match="temperature"):
        client.chat_completion(ASK, model="scripted", temperature=3)


# -- text-generation-inference's routes -----------------------------------------------------------


@pytest.fixture(scope="module")
def tgi(server: Server) -> Iterator[InferenceClient]:
    with InferenceClient(model=f"{server.url}/generate", timeout=60) as client:
        yield client


def test_a_text_is_continued_as_by_text_generation_inference(tgi: InferenceClient) -> None:
    assert tgi.text_generation("abc", max_new_tokens=3) == "def"
    assert tgi.text_generation("abc", max_new_tokens=3, return_full_text=True) == "abcdef"
    assert tgi.text_generation("abc", max_new_tokens=20, stop=["ef"]) == "def"
    told: Any = tgi.text_generation("abc", max_new_tokens=3, details=True, top_n_tokens=2, decoder_input_details=True)
    assert (told.generated_text, told.details.finish_reason, told.details.generated_tokens) == ("def", "length", 3)
    assert [token.text for token in told.details.tokens] == ["d", "e", "f"]
    assert [token.logprob for token in told.details.tokens] == pytest.approx([SURE] * 3, abs=1e-3)
    assert told.details.top_tokens is not None
    assert [len(top) for top in told.details.top_tokens] == [2, 2, 2]
    assert [token.text for token in told.details.prefill][1:] == ["b", "c"]
    assert told.details.prefill[1].logprob == pytest.approx(SURE, abs=1e-3)


def test_a_streamed_text_is_the_whole_one_token_by_token(tgi: InferenceClient) -> None:
    assert "".join(tgi.text_generation("abc", max_new_tokens=5, stream=True)) == "defgh"
    events = list(tgi.text_generation("abc", max_new_tokens=5, stream=True, details=True))
    assert [event.index for event in events] == [1, 2, 3, 4, 5]
    assert "".join(event.token.text for event in events) == "defgh"
    assert [event.generated_text for event in events] == [None] * 4 + ["defgh"]
    assert events[-1].details is not None
    last = events[-1].details
    assert (last.finish_reason, last.generated_tokens, last.input_length) == ("length", 5, 3)
    # The bytes of a character are tokens of their own: their text comes with the last of them.
    emoji = list(tgi.text_generation("~", max_new_tokens=4, stream=True, details=True))
    assert "".join(event.token.text for event in emoji) == emoji[-1].generated_text == "😀"


def test_a_grammar_binds_a_text_and_errors_are_told(tgi: InferenceClient) -> None:
    grammar: Any = {"type": "json", "value": {"const": {"n": 7}}}
    assert json.loads(tgi.text_generation("abc", max_new_tokens=30, grammar=grammar)) == {"n": 7}
    with pytest.raises(Exception, match=r"parameters\.typical_p is not supported"):
        tgi.text_generation("abc", typical_p=0.5)
    with pytest.raises(Exception, match=r"parameters\.max_new_tokens must be at least 1"):
        tgi.text_generation("abc", max_new_tokens=0)


@pytest.mark.parametrize("path", ["", "/", "/generate"])
def test_text_generation_needs_the_address_alone(server: Server, path: str) -> None:
    with InferenceClient(model=server.url + path, token="none", timeout=60) as made:
        whole = made.text_generation("hi", max_new_tokens=5)
        assert isinstance(whole, str)
        pieces = [event.token.text for event in made.text_generation("hi", max_new_tokens=5, details=True, stream=True)]
    assert "".join(pieces) == whole
