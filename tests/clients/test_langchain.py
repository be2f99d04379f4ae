"""langchain-openai, unmodified, against a real server."""

from __future__ import annotations

import asyncio

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.messages.ai import add_ai_message_chunks
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import SecretStr
from tests.clients.conftest import Server
from tests.clients.scripted_model import ANSWER, HELLO, SURE

GREETING = "".join(HELLO)


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def chat(server: Server) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=server.api, api_key=SecretStr("none"), model="scripted", temperature=0, max_retries=0, timeout=60
    )


def test_invoke_answers_with_usage_and_reason(chat: ChatOpenAI) -> None:
    answer = chat.invoke([SystemMessage("Be brief."), HumanMessage("hi")])
    assert answer.content == GREETING
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == "scripted"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == len(HELLO) + 1
    assert answer.usage_metadata["input_tokens"] == len("Be brief.hi") + 3


def test_stream_is_the_answer_in_pieces_with_usage_at_the_end(chat: ChatOpenAI) -> None:
    whole = None
    for chunk in chat.stream("hi", stream_usage=True):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.content == GREETING
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == len(HELLO) + 1


def test_batch_answers_each_and_async_too(chat: ChatOpenAI) -> None:
    answers = chat.batch(["a", "b", "c", "d"], config={"max_concurrency": 4})
    assert [answer.content for answer in answers] == [GREETING] * 4

    async def main() -> list[str]:
        pieces = [chunk.text async for chunk in chat.astream("hi")]
        return ["".join(pieces), (await chat.ainvoke("hi")).text]

    assert asyncio.run(main()) == [GREETING] * 2


def test_a_bound_tool_is_called_and_its_result_answered(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([get_weather])
    question = HumanMessage("What is the weather in Paris?")
    asked = bound.invoke([question])
    assert isinstance(asked, AIMessage)
    (call,) = asked.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.content == "sunny in Paris"
    assert bound.invoke([question, asked, result]).content == "".join(ANSWER)


def test_a_bound_tools_call_is_put_together_from_a_stream(chat: ChatOpenAI) -> None:
    chunks = [chunk for chunk in chat.bind_tools([get_weather]).stream("weather?") if isinstance(chunk, AIMessageChunk)]
    whole = add_ai_message_chunks(*chunks)
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})


def test_a_chain_of_prompt_model_and_parser_runs(chat: ChatOpenAI) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "You are {who}."), ("user", "{text}")])
    chain = prompt | chat | StrOutputParser()
    assert chain.invoke({"who": "a clock", "text": "hi"}) == GREETING
    stopped = prompt | chat.bind(stop=[" scripted"]) | StrOutputParser()
    assert stopped.invoke({"who": "a clock", "text": "hi"}) == "Hello from a"


def test_log_probabilities_are_in_the_metadata(chat: ChatOpenAI) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=1).invoke("hi")
    entries = answer.response_metadata["logprobs"]["content"]
    assert [entry["token"] for entry in entries][: len(HELLO)] == list(HELLO)
    assert [entry["logprob"] for entry in entries] == pytest.approx([SURE] * len(entries), abs=1e-4)


def test_the_completions_model_invokes_and_streams(server: Server) -> None:
    model = OpenAI(
        base_url=server.api, api_key=SecretStr("none"), model="scripted", temperature=0, max_tokens=4, max_retries=0
    )
    assert model.invoke("abc") == "defg"
    assert "".join(model.stream("abc")) == "defg"
    assert model.batch(["a", "0"]) == ["bcde", "1234"]


def test_a_tool_that_must_be_called_is_called(chat: ChatOpenAI) -> None:
    for choice in ("any", "get_weather"):
        bound = chat.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
        (call,) = bound.invoke("hi").tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})


def test_a_refusal_is_the_sdks_error(chat: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tools is empty"):
        chat.bind(tool_choice="required").invoke("hi")
    with pytest.raises(openai.NotFoundError, match="gpt-99"):
        chat.bind(model="gpt-99").invoke("hi")
