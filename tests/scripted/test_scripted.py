"""The scripted model says what its script says."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest
from tests.scripted import Rule
from tests.scripted.conftest import Serve
from tests.tiers import THOROUGH


def test_a_conversation_follows_its_script(serve: Serve) -> None:
    url = serve(
        [
            Rule("weather", "It is sunny; 21 °C.", times=1),
            Rule("weather", "Still sunny."),
            Rule('"role": "user"', 'Ask "about"\nthe weather.'),
        ]
    )
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:

        def say(text: str) -> str | None:
            answer = client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": text}], temperature=1
            )
            assert answer.choices[0].finish_reason == "stop"
            return answer.choices[0].message.content

        assert say("hi") == 'Ask "about"\nthe weather.'
        assert say("the weather?") == "It is sunny; 21 °C."
        assert say("the weather?") == "Still sunny."
        stream = client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(pieces) == 'Ask "about"\nthe weather.'
        assert len(pieces) > 1


@THOROUGH
def test_a_script_answers_within_the_requests_form(serve: Serve) -> None:
    url = serve(
        [
            Rule("number", "[3, 4]", given='"json_schema"'),
            Rule("call", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', 2, given='"add"'),
            Rule("call", "all calls were made", given='"add"'),
            Rule("call", "no tools"),
            Rule("own", None),
        ]
    )
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:

        def say(text: str, **more: Any) -> Any:
            messages: Any = [{"role": "user", "content": text}]
            return client.chat.completions.create(model="scripted", messages=messages, **more).choices[0].message

        def ask(schema: object) -> Any:
            return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

        numbers = {"type": "array", "items": {"type": "integer"}}
        assert say("numbers", response_format=ask(numbers)).content == "[3, 4]"
        with pytest.raises(openai.BadRequestError, match=r"does not allow the script's answer"):
            say("numbers", response_format=ask({"type": "array", "items": {"type": "string"}}))
        with pytest.raises(openai.BadRequestError, match="no rule of the script"):
            say("numbers")
        # A schema with a pattern is tried apart: the request is resolved twice, and its rule counts once.
        properties = {"a": {"type": "integer"}, "b": {"type": "string", "pattern": "^b+$"}}
        add = {"name": "add", "parameters": {"type": "object", "properties": properties}}
        for choice in ("auto", "required"):
            (call,) = say("call", tools=[{"type": "function", "function": add}], tool_choice=choice).tool_calls
            assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
        assert say("call", tools=[{"type": "function", "function": add}]).content == "all calls were made"
        assert say("call").content == "no tools"
        assert say("own", response_format=ask({"enum": [5]})).content == "5"


def test_text_around_calls_keeps_its_place_whole_and_streamed(serve: Serve) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
    url = serve([Rule("weather", f"First Paris.\n{call % 'Paris'}\nThen Rome.\n{call % 'Rome'}\nThat is all.")])
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    asked: dict[str, Any] = {
        "model": "scripted",
        "max_tokens": 400,
        "messages": [{"role": "user", "content": "the weather?"}],
        "tools": [{"name": "get_weather", "input_schema": schema}],
        "stop_sequences": ["a text that does not come, and that holds text back: <"],
    }

    def shown(message: anthropic.types.Message) -> list[tuple[str, object]]:
        return [(one.type, one.text if one.type == "text" else getattr(one, "input", None)) for one in message.content]

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        whole = shown(client.messages.create(**asked))
        with client.messages.stream(**asked) as stream:
            streamed = shown(stream.get_final_message())
    assert whole == streamed
    assert [said.strip() if isinstance(said, str) else said for _, said in whole] == [
        *("First Paris.", {"city": "Paris"}, "Then Rome.", {"city": "Rome"}, "That is all."),
    ]
    body = {
        "model": "scripted",
        "input": "the weather?",
        "tools": [{"type": "function", "name": "get_weather", "parameters": schema}],
    }
    kinds = [item["type"] for item in httpx.post(f"{url}/v1/responses", json=body, timeout=60).json()["output"]]
    assert kinds == ["message", "function_call", "message", "function_call", "message"]
