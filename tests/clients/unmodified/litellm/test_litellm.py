"""litellm, by its prefixes for servers that speak OpenAI's or Anthropic's protocol."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest
from tests.clients.unmodified.conftest import Serve, call
from tests.scripted import Rule
from tests.scripted.serving import ScriptedServer

litellm = pytest.importorskip("litellm", reason="litellm is not installed; make test-clients installs it")

CITY = '{"name": "Oslo", "population": 700000}'
RULES = [
    Rule("which city", call("json_tool_call", CITY), given="json_tool_call"),
    Rule("which city", CITY),
    Rule("the weather", call("weather", '{"city": "Oslo"}')),
    Rule('"role": "tool".*-3 degrees', "It is cold in Oslo."),
    Rule("hello", "Hello to you."),
]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class City(pydantic.BaseModel):
    name: str
    population: int


@pytest.fixture(scope="module")
def server(serve: Serve) -> ScriptedServer:
    return serve(RULES)


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def to(request: pytest.FixtureRequest, server: ScriptedServer) -> dict[str, Any]:
    base = server.url if request.param == "anthropic" else server.api
    return {"model": f"{request.param}/scripted", "api_base": base, "api_key": "none", "num_retries": 0}


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def test_a_chat_is_answered_whole_and_streamed(to: Any) -> None:
    whole = litellm.completion(**to, messages=ask("hello"))
    assert whole.choices[0].message.content == "Hello to you."
    assert whole.usage.completion_tokens > 3
    awaited = await litellm.acompletion(**to, messages=ask("hello"))
    assert awaited.choices[0].message.content == "Hello to you."
    stream = litellm.completion(**to, messages=ask("hello"), stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello to you."
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_is_called_and_its_result_answered(to: Any, choice: Any) -> None:
    first = litellm.completion(**to, messages=ask("the weather?"), tools=[WEATHER], tool_choice=choice)
    (made,) = first.choices[0].message.tool_calls
    assert (made.function.name, json.loads(made.function.arguments)) == ("weather", {"city": "Oslo"})
    assert first.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": made.id, "content": "-3 degrees"}
    messages = [*ask("the weather?"), first.choices[0].message.model_dump(), result]
    second = litellm.completion(**to, messages=messages, tools=[WEATHER])
    assert second.choices[0].message.content == "It is cold in Oslo."
    stream = litellm.completion(**to, messages=ask("the weather?"), tools=[WEATHER], stream=True)
    whole = litellm.stream_chunk_builder(list(stream))
    assert whole.choices[0].message.tool_calls[0].function.arguments.replace(" ", "") == '{"city":"Oslo"}'


def test_an_answer_has_its_type(to: Any) -> None:
    answer = litellm.completion(**to, messages=ask("which city?"), response_format=City)
    assert City.model_validate_json(answer.choices[0].message.content) == City(name="Oslo", population=700_000)


def test_a_refusal_has_its_class(to: Any) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**to, "model": to["model"].replace("scripted", "absent")}, messages=ask("hello"))
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**to, messages=ask("hello"), temperature=-1)


async def test_a_response_is_answered_whole_and_streamed(server: ScriptedServer) -> None:
    to: Any = {"model": "openai/scripted", "api_base": server.api, "api_key": "none"}
    assert litellm.responses(**to, input="hello").output[0].content[0].text == "Hello to you."
    kinds = [event.type for event in litellm.responses(**to, input="hello", stream=True)]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
