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
from tests.clients.scripted_model import ANSWER, HELLO

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
