"""The OpenAI Agents SDK: a loop with tools, typed output, a handoff and a session, on chat and on responses."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
from tests.clients.unmodified.conftest import Serve, call
from tests.scripted import Rule
from tests.scripted.serving import ScriptedServer

agents = pytest.importorskip("agents", reason="openai-agents is not installed; make test-clients installs it")
import openai  # noqa: E402

RULES = [
    Rule("the weather", call("weather", '{"city": "Oslo"}')),
    Rule('"role": "tool".*-3 degrees', "It is cold in Oslo."),
    Rule("a refund", call("transfer_to_refunds", "{}"), given="transfer_to_refunds"),
    Rule('"role": "tool".*assistant', "Your refund is on its way."),
    Rule("which city", '{"name": "Oslo", "population": 700000}'),
    Rule("what did I say", "You said hello.", given="hello"),
    Rule("hello", "Hello to you."),
]


class City(pydantic.BaseModel):
    name: str
    population: int


@pytest.fixture(scope="module")
def server(serve: Serve) -> ScriptedServer:
    return serve(RULES)


@pytest.fixture(params=["chat", "responses"])
def model(request: pytest.FixtureRequest, server: ScriptedServer) -> Any:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=server.api, api_key="none", max_retries=0)
    kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[request.param]
    return kind(model="scripted", openai_client=client)


@pytest.fixture
def weather() -> Any:
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"-3 degrees in {city}"

    return agents.function_tool(weather)


async def test_an_agent_calls_its_tool_and_answers(model: Any, weather: Any) -> None:
    agent = agents.Agent(name="Forecaster", instructions="Be brief.", model=model, tools=[weather])
    assert (await agents.Runner.run(agent, "the weather?")).final_output == "It is cold in Oslo."
    streamed = agents.Runner.run_streamed(agent, "the weather?")
    kinds = {event.type async for event in streamed.stream_events()}
    assert streamed.final_output == "It is cold in Oslo."
    assert {"raw_response_event", "run_item_stream_event"} <= kinds


async def test_output_has_its_type(model: Any) -> None:
    agent = agents.Agent(name="Guide", model=model, output_type=City)
    assert (await agents.Runner.run(agent, "which city?")).final_output == City(name="Oslo", population=700_000)


async def test_an_agent_hands_over_to_another(model: Any) -> None:
    refunds = agents.Agent(name="Refunds", model=model)
    triage = agents.Agent(name="Triage", model=model, handoffs=[refunds])
    result = await agents.Runner.run(triage, "I want a refund")
    assert (result.last_agent.name, result.final_output) == ("Refunds", "Your refund is on its way.")


async def test_a_session_remembers_the_turn_before(model: Any) -> None:
    session = agents.SQLiteSession("one")
    agent = agents.Agent(name="Listener", model=model)
    assert (await agents.Runner.run(agent, "hello", session=session)).final_output == "Hello to you."
    assert (await agents.Runner.run(agent, "what did I say?", session=session)).final_output == "You said hello."


async def test_a_turn_goes_on_from_a_response(server: ScriptedServer) -> None:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=server.api, api_key="none", max_retries=0)
    agent = agents.Agent(name="Listener", model=agents.OpenAIResponsesModel(model="scripted", openai_client=client))
    first = await agents.Runner.run(agent, "hello")
    second = await agents.Runner.run(agent, "what did I say?", previous_response_id=first.last_response_id)
    assert second.final_output == "You said hello."


async def test_a_loop_goes_on_from_the_response_before(server: ScriptedServer, weather: Any) -> None:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=server.api, api_key="none", max_retries=0)
    model = agents.OpenAIResponsesModel(model="scripted", openai_client=client)
    agent = agents.Agent(name="Forecaster", model=model, tools=[weather])
    result = await agents.Runner.run(agent, "the weather?", auto_previous_response_id=True)
    assert result.final_output == "It is cold in Oslo."


async def test_a_conversation_of_the_server_remembers_the_turn_before(server: ScriptedServer) -> None:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=server.api, api_key="none", max_retries=0)
    agent = agents.Agent(name="Listener", model=agents.OpenAIResponsesModel(model="scripted", openai_client=client))
    session = agents.OpenAIConversationsSession(openai_client=client)
    assert (await agents.Runner.run(agent, "hello", session=session)).final_output == "Hello to you."
    assert (await agents.Runner.run(agent, "what did I say?", session=session)).final_output == "You said hello."
    assert len(await session.get_items()) == 4
    assert len(await session.get_items(limit=1)) == 1
    last = await session.pop_item()
    assert last["content"][0]["text"] == "You said hello."
    assert len(await session.get_items()) == 3
    await session.clear_session()

    conversation = await client.conversations.create()
    for text, answer in (("hello", "Hello to you."), ("what did I say?", "You said hello.")):
        result = await agents.Runner.run(agent, text, conversation_id=conversation.id)
        assert result.final_output == answer


async def test_a_loop_in_a_conversation_sends_new_items_only(server: ScriptedServer, weather: Any) -> None:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=server.api, api_key="none", max_retries=0)
    model = agents.OpenAIResponsesModel(model="scripted", openai_client=client)
    agent = agents.Agent(name="Forecaster", model=model, tools=[weather])
    conversation = await client.conversations.create()
    result = await agents.Runner.run(agent, "the weather?", conversation_id=conversation.id)
    assert result.final_output == "It is cold in Oslo."
    kinds = [item.type async for item in client.conversations.items.list(conversation.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output", "message"]
