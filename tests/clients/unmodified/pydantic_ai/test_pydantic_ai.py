"""pydantic-ai: tools, and typed output in each mode, on the Chat Completions, Responses and Messages APIs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from tests.clients.unmodified.conftest import Serve, call
from tests.scripted import Rule
from tests.scripted.serving import ScriptedServer

ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed; make test-clients installs it")
from pydantic_ai.models.anthropic import AnthropicModel  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.anthropic import AnthropicProvider  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

CITY = '{"name": "Oslo", "population": 700000}'
RULES = [
    Rule("which city", call("final_result", CITY), given="final_result"),
    Rule("which city", CITY),
    Rule("the weather", call("weather", '{"city": "Oslo"}')),
    Rule('"role": "tool".*-3 degrees', "It is cold in Oslo."),
    Rule("two places", call("weather", '{"city": "Oslo"}') + "\n" + call("weather", '{"city": "Rome"}')),
    Rule('"role": "tool".*21 degrees', "Oslo is colder than Rome."),
    Rule("hello", "Hello to you."),
]


class City(pydantic.BaseModel):
    name: str
    population: int


@pytest.fixture(scope="module")
def server(serve: Serve) -> ScriptedServer:
    return serve(RULES)


@pytest.fixture(params=["chat", "responses", "messages"])
def model(request: pytest.FixtureRequest, server: ScriptedServer) -> Iterator[Any]:
    openai = OpenAIProvider(base_url=server.api, api_key="none")
    match request.param:
        case "chat":
            yield OpenAIChatModel("scripted", provider=openai)
        case "responses":
            yield OpenAIResponsesModel("scripted", provider=openai)
        case _:
            import anthropic

            client = anthropic.AsyncAnthropic(base_url=server.url, api_key="none")
            yield AnthropicModel("claude-opus-5-5", provider=AnthropicProvider(anthropic_client=client))


def degrees(city: str) -> str:
    return {"Oslo": "-3 degrees", "Rome": "21 degrees"}[city]


async def test_a_text_is_answered_whole_and_streamed(model: Any) -> None:
    agent = ai.Agent(model)
    answer = await agent.run("hello")
    assert answer.output == "Hello to you."
    assert answer.usage.output_tokens > 3
    async with agent.run_stream("hello") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True)]
    assert "".join(pieces) == "Hello to you."


@pytest.mark.parametrize("mode", ["ToolOutput", "NativeOutput", "PromptedOutput"])
async def test_output_has_its_type_in_each_mode(model: Any, mode: str) -> None:
    agent = ai.Agent(model, output_type=getattr(ai, mode)(City))
    assert (await agent.run("which city?")).output == City(name="Oslo", population=700_000)
    async with agent.run_stream("which city?") as stream:
        outputs = [output async for output in stream.stream_output()]
    assert outputs[-1] == City(name="Oslo", population=700_000)


async def test_tools_are_called_until_the_answer(model: Any) -> None:
    asked: list[str] = []

    def weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return degrees(city)

    agent = ai.Agent(model, tools=[weather])
    assert (await agent.run("the weather in Oslo?")).output == "It is cold in Oslo."
    assert asked == ["Oslo"]
    both = await agent.run("two places")
    assert both.output == "Oslo is colder than Rome."
    assert sorted(asked) == ["Oslo", "Oslo", "Rome"]
    again = await agent.run("hello", message_history=both.all_messages())
    assert again.output == "Hello to you."
    async with agent.run_stream("the weather in Oslo?") as stream:
        assert await stream.get_output() == "It is cold in Oslo."
