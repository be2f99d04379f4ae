"""llama-index with its client for servers like OpenAI's."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
from tests.clients.unmodified.conftest import Serve, call
from tests.scripted import Rule
from tests.scripted.serving import ScriptedServer

openai_like = pytest.importorskip(
    "llama_index.llms.openai_like",
    reason="llama-index-llms-openai-like is not installed; make test-clients installs it",
)
from llama_index.core.agent.workflow import FunctionAgent  # noqa: E402
from llama_index.core.llms import ChatMessage  # noqa: E402
from llama_index.core.prompts import PromptTemplate  # noqa: E402
from llama_index.core.tools import FunctionTool  # noqa: E402

CITY = '{"name": "Oslo", "population": 700000}'
RULES = [
    Rule("which city", call("City", CITY), given='"name": "City"'),
    Rule("which city", CITY),
    Rule("the weather", call("weather", '{"city": "Oslo"}')),
    Rule('"role": "tool".*-3 degrees', "It is cold in Oslo."),
    Rule("hello", "Hello to you."),
]


class City(pydantic.BaseModel):
    """A city."""

    name: str
    population: int


@pytest.fixture(scope="module")
def server(serve: Serve) -> ScriptedServer:
    return serve(RULES)


@pytest.fixture
def model(server: ScriptedServer) -> Any:
    return openai_like.OpenAILike(
        model="scripted",
        api_base=server.api,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )


def weather(city: str) -> str:
    """The weather in a city."""
    return f"-3 degrees in {city}"


def test_a_chat_is_answered_whole_and_streamed(model: Any) -> None:
    ask = [ChatMessage(role="user", content="hello")]
    assert model.chat(ask).message.content == "Hello to you."
    assert "".join(part.delta for part in model.stream_chat(ask)) == "Hello to you."
    assert model.complete("hello").text == "Hello to you."


async def test_a_chat_is_answered_by_its_asynchronous_methods(model: Any) -> None:
    ask = [ChatMessage(role="user", content="hello")]
    assert (await model.achat(ask)).message.content == "Hello to you."
    pieces = [part.delta async for part in await model.astream_chat(ask)]
    assert "".join(pieces) == "Hello to you."


def test_a_tool_is_called(model: Any) -> None:
    tool = FunctionTool.from_defaults(weather)
    for required in (False, True):
        answer = model.chat_with_tools([tool], user_msg="the weather?", tool_required=required)
        (made,) = model.get_tool_calls_from_response(answer)
        assert (made.tool_name, made.tool_kwargs) == ("weather", {"city": "Oslo"})
    assert model.predict_and_call([tool], user_msg="the weather?").response == "-3 degrees in Oslo"


async def test_an_agent_calls_its_tool_and_answers(model: Any) -> None:
    agent = FunctionAgent(tools=[weather], llm=model)
    assert str(await agent.run("the weather?")) == "It is cold in Oslo."


@pytest.mark.parametrize("structured", [False, True])
def test_an_answer_has_its_type(model: Any, structured: bool) -> None:
    """By a call, and by ``response_format``."""
    model.should_use_structured_outputs = structured
    city = model.structured_predict(City, PromptTemplate("which city?"))
    assert city == City(name="Oslo", population=700_000)
    parts = list(model.stream_structured_predict(City, PromptTemplate("which city?")))
    assert parts[-1] == City(name="Oslo", population=700_000)
