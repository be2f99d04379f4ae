"""The Responses API with a whole server and OpenAI's client: masks, calls, streams and stored state of a scripted model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel
from tests.gateway.responses.test_grammars import PATCH
from tests.scripted import Rule
from tests.scripted.serving import ScriptedServer, serving

CHANGE = '*** Begin Patch\n*** Add File: é "a".py\n+x = 1\n*** End Patch'


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


RULES = [
    Rule("between", "First. " + call("get_weather", '{"city": "Oslo"}') + "\nThen this.", given="get_weather"),
    Rule("the weather", "Let me look. " + call("get_weather", '{"city": "Paris"}')),
    Rule("change the file", call("files__apply_patch", json.dumps({"input": CHANGE}, ensure_ascii=False))),
    Rule("change it wrongly", call("files__apply_patch", '{"input": "no patch"}')),
    Rule('"role": "tool".*sunny', "It is sunny."),
    Rule('"role": "tool".*Done', "The file is changed."),
    Rule("which city", '{"name":"Oslo","size":"large"}'),
    Rule("what did I say", "You said hello.", given="hello"),
    Rule("hello", "Hello to you."),
]
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
FILES: Any = {
    "type": "namespace",
    "name": "files",
    "description": "Files.",
    "tools": [
        {
            "type": "custom",
            "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
        }
    ],
}
TOOLS: Any = [WEATHER, FILES, {"type": "web_search"}]


class City(BaseModel):
    name: str
    size: Literal["small", "large"]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder: Path = tmp_path_factory.mktemp("responses")
    with serving(folder / "served", RULES, data_dir=folder / "data") as server:
        yield server


@pytest.fixture
def client(scripted: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=scripted.api, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, text: Any, *, streams: bool, **fields: Any) -> Response:
    if not streams:
        answer = client.responses.create(model="scripted", input=text, **fields)
        assert isinstance(answer, Response)
        return answer
    with client.responses.stream(model="scripted", input=text, **fields) as stream:
        numbers = [event.sequence_number for event in stream]
        assert numbers == sorted(numbers)
        return stream.get_final_response()


@pytest.mark.parametrize("streams", [False, True])
def test_a_loop_with_tools_goes_on_from_stored_responses(client: openai.OpenAI, streams: bool) -> None:
    first = ask(client, "the weather?", streams=streams, tools=TOOLS)
    said, called = first.output
    assert first.output_text.strip() == "Let me look."
    assert said.type == "message"
    assert called.type == "function_call"
    assert (called.name, json.loads(called.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "sunny"}
    second = ask(client, [result], streams=streams, tools=TOOLS, previous_response_id=first.id)
    assert second.output_text == "It is sunny."
    assert second.usage is not None
    assert second.usage.input_tokens > (first.usage.input_tokens if first.usage else 0)


@pytest.mark.parametrize("streams", [False, True])
def test_a_loop_without_state_sends_all_items_back(client: openai.OpenAI, streams: bool) -> None:
    items: list[Any] = [{"role": "user", "content": "change the file"}]
    first = ask(client, items, streams=streams, tools=TOOLS, store=False)
    (called,) = first.output
    assert called.type == "custom_tool_call"
    assert (called.namespace, called.name, called.input) == ("files", "apply_patch", CHANGE)
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"type": "custom_tool_call_output", "call_id": called.call_id, "output": "Done."})
    assert ask(client, items, streams=streams, tools=TOOLS, store=False).output_text == "The file is changed."


@pytest.mark.parametrize("streams", [False, True])
def test_items_come_in_the_order_in_which_the_model_wrote_them(client: openai.OpenAI, streams: bool) -> None:
    answer = ask(client, "between", streams=streams, tools=TOOLS, include=["message.output_text.logprobs"])
    before, called, after = answer.output
    assert called.type == "function_call"
    for item, text in ((before, "First."), (after, "Then this.")):
        assert item.type == "message"
        assert item.content[0].type == "output_text"
        assert item.content[0].text.strip() == text
        told = b"".join(bytes(one.bytes) for one in item.content[0].logprobs or ()).decode()
        assert text in told
        assert "<tool_call>" not in told or item is before


def test_the_grammar_of_a_custom_tool_binds_the_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError):
        ask(client, "change it wrongly", streams=False, tools=TOOLS)


@pytest.mark.parametrize("streams", [False, True])
def test_structured_output_is_parsed(client: openai.OpenAI, streams: bool) -> None:
    if streams:
        with client.responses.stream(model="scripted", input="which city?", text_format=City) as stream:
            parsed = stream.get_final_response().output_parsed
    else:
        parsed = client.responses.parse(model="scripted", input="which city?", text_format=City).output_parsed
    assert parsed == City(name="Oslo", size="large")


def test_a_stored_response_remembers_and_one_without_store_does_not(client: openai.OpenAI) -> None:
    first = ask(client, "hello", streams=False)
    again = ask(client, "what did I say?", streams=False, previous_response_id=first.id)
    assert again.output_text == "You said hello."
    lost = ask(client, "hello", streams=False, store=False)
    with pytest.raises(openai.NotFoundError, match="no response"):
        ask(client, "what did I say?", streams=False, previous_response_id=lost.id)


def test_log_probabilities_and_limits(client: openai.OpenAI) -> None:
    answer = ask(client, "hello", streams=False, include=["message.output_text.logprobs"], top_logprobs=2)
    (message,) = answer.output
    assert message.type == "message"
    (text,) = message.content
    assert text.type == "output_text"
    assert text.logprobs is not None
    assert b"".join(bytes(one.bytes) for one in text.logprobs).decode() == "Hello to you."
    assert all(len(one.top_logprobs) == 2 for one in text.logprobs)
    cut = ask(client, "hello", streams=False, max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_the_tokens_of_the_input_are_counted_exactly(client: openai.OpenAI) -> None:
    count = client.responses.input_tokens.count(model="scripted", input="hello", tools=TOOLS).input_tokens
    answer = ask(client, "hello", streams=False, tools=TOOLS)
    assert answer.usage is not None
    assert answer.usage.input_tokens == count


def test_compaction_is_refused_with_what_to_do_instead(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="ask the model for a summary") as caught:
        client.responses.compact(model="scripted", input="hello")
    assert caught.value.code == "unsupported_endpoint"
    for item in ({"type": "compaction_trigger"}, {"type": "compaction", "encrypted_content": "x"}):
        items: Any = [{"role": "user", "content": "hello"}, item]
        with pytest.raises(openai.BadRequestError, match="ask the model for a summary") as refused:
            client.responses.create(model="scripted", input=items)
        assert refused.value.param == "input[1].type"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"pattern": "(?=a)b"}}}},
            "text.format.schema",
        ),
        (
            {"tools": [{"type": "function", "name": "f", "strict": True, "parameters": {"pattern": "(?=a)b"}}]},
            "tools[0].parameters",
        ),
        ({"input": "x" * 70_000}, "input"),
    ],
)
def test_what_the_model_cannot_take_is_refused_by_its_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "scripted", "input": "hello", **fields})
    assert str(caught.value.param).startswith(param), caught.value
