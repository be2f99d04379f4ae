"""anthropic's client for Python, unmodified, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import pydantic
import pytest
from tests.clients.conftest import Server
from tests.clients.scripted_model import ANSWER, HELLO
from tests.worker.watching import until_now

GREETING = "".join(HELLO)
GREEDY: Any = {"temperature": 0}
BLOCK = 16  # tokens of a block of the prefix cache


def ask(text: str = "hi") -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_is_answered(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="scripted", max_tokens=50, messages=ask(), extra_body=GREEDY)
    assert text_of(message) == GREETING
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == len(HELLO) + 1  # the end counts
    counted = client.messages.count_tokens(model="scripted", messages=ask())
    cached = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + cached == counted.input_tokens == len("hi") + 2


def test_a_streamed_message_is_the_answer_in_pieces(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="scripted", max_tokens=50, messages=ask(), extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(pieces) == text_of(message) == GREETING
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == len("hi") + 2


def test_a_limit_above_the_context_is_lowered(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="scripted", max_tokens=10_000_000, messages=ask(), extra_body=GREEDY) as stream:
        assert stream.get_final_message().stop_reason == "end_turn"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model="scripted", max_tokens=5, messages=ask("x" * 70_000))


def test_stop_sequences_and_limits_end_the_answer(client: anthropic.Anthropic) -> None:
    stopped = client.messages.create(
        model="scripted", max_tokens=50, messages=ask(), stop_sequences=[" scripted"], extra_body=GREEDY
    )
    assert (text_of(stopped), stopped.stop_reason, stopped.stop_sequence) == (
        "Hello from a",
        "stop_sequence",
        " scripted",
    )
    cut = client.messages.create(model="scripted", max_tokens=2, messages=ask(), extra_body=GREEDY)
    assert (text_of(cut), cut.stop_reason) == ("Hello from", "max_tokens")


def test_a_second_turn_computes_its_new_tokens_only(client: anthropic.Anthropic) -> None:
    """As Claude Code asks: a line for billing that differs, and marks that move with the conversation."""

    def turn(number: int, messages: list[Any]) -> anthropic.types.Usage:
        line = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number * 7919:05x};"
        system: Any = [
            {"type": "text", "text": line},
            {"type": "text", "text": "You are a helper.", "cache_control": {"type": "ephemeral"}},
        ]
        return client.messages.create(
            model="scripted", max_tokens=5, system=system, messages=messages, extra_body=GREEDY
        ).usage

    long = "y" * 24_000
    first = turn(
        1, [{"role": "user", "content": [{"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}]}]
    )
    second = turn(
        2,
        [
            {"role": "user", "content": long},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": [{"type": "text", "text": "more", "cache_control": {"type": "ephemeral"}}]},
        ],
    )
    assert first.input_tokens > 24_000
    assert first.cache_read_input_tokens == 0
    whole = second.input_tokens + (second.cache_read_input_tokens or 0)
    assert whole > first.input_tokens
    assert second.input_tokens <= whole - first.input_tokens + BLOCK  # a block that was not full is computed again


WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_is_called_and_its_result_answered(client: anthropic.Anthropic, choice: Any) -> None:
    with client.messages.stream(
        model="scripted", max_tokens=100, messages=ask(), tools=[WEATHER], tool_choice=choice, extra_body=GREEDY
    ) as stream:
        first = stream.get_final_message()
    (call,) = first.content
    assert call.type == "tool_use"
    assert (call.name, call.input, first.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages = [*ask(), first.to_param(), {"role": "user", "content": [result]}]
    second = client.messages.create(
        model="scripted", max_tokens=100, messages=messages, tools=[WEATHER], extra_body=GREEDY
    )
    assert (text_of(second), second.stop_reason) == ("".join(ANSWER), "end_turn")


class City(pydantic.BaseModel):
    size: Literal["small", "large"]
    is_capital: bool


def test_a_parsed_answer_is_valid(client: anthropic.Anthropic) -> None:
    message = client.messages.parse(
        model="scripted", max_tokens=200, messages=ask(), output_format=City, extra_body=GREEDY
    )
    assert isinstance(message.parsed_output, City)


def test_a_schema_that_cannot_be_enforced_is_refused_by_its_place(client: anthropic.Anthropic) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"$ref": "https://example.com/schema"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema"):
        client.messages.create(
            model="scripted",
            max_tokens=50,
            messages=ask(),
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )


def test_a_stream_that_is_closed_cancels_its_request(server: Server, client: anthropic.Anthropic) -> None:
    before = server.metric("inferd_requests_total", outcome="cancelled")
    endless = [*ask(), {"role": "assistant", "content": "a"}]  # the alphabet, again and again
    stream = client.messages.create(
        model="scripted", max_tokens=60_000, messages=endless, stream=True, extra_body=GREEDY
    )
    next(iter(stream))
    stream.close()
    until_now(lambda: server.metric("inferd_requests_total", outcome="cancelled") > before, "it is cancelled", 10)


def test_models_are_listed_in_the_clients_form(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.max_input_tokens) == ("scripted", 65_536)
    assert client.models.retrieve("scripted").id == "scripted"


def test_an_agent_needs_no_setting_but_the_address(server: Server) -> None:
    assert httpx.head(server.url + "/").status_code == 200
    assert httpx.head(server.url + "/api/hello").status_code == 200
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(model="claude-opus-5-5", max_tokens=50, messages=ask(), extra_body=GREEDY)
    assert (message.model, text_of(message)) == ("scripted", GREETING)
