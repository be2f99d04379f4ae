"""Structured output by openai-python, unmodified, against a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam
from tests.clients.conftest import Server

ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


class Weather(pydantic.BaseModel):
    city: Literal["Paris", "Oslo"]
    degrees: int = pydantic.Field(ge=0, le=40)
    hours: list[bool] = pydantic.Field(min_length=1, max_length=2)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_an_answer_is_parsed_into_its_model(client: openai.OpenAI) -> None:
    for seed in range(5):
        answer = client.chat.completions.parse(
            model="scripted", messages=ASK, response_format=Weather, temperature=1, seed=seed, max_tokens=300
        )
        assert isinstance(answer.choices[0].message.parsed, Weather)
        assert answer.choices[0].finish_reason == "stop"


def test_a_streamed_answer_is_parsed_into_its_model(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="scripted", messages=ASK, response_format=Weather, temperature=1, seed=3, max_tokens=300
    ) as stream:
        kinds = {event.type for event in stream}
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert "content.delta" in kinds
    whole = client.chat.completions.parse(
        model="scripted", messages=ASK, response_format=Weather, temperature=1, seed=3, max_tokens=300
    )
    assert parsed == whole.choices[0].message.parsed


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, {"7"}),
        ({"response_format": {"type": "json_object", "value": {"const": 7}}}, {"7"}),
        ({"response_format": {"type": "json", "value": {"enum": [5]}}}, {"5"}),
        ({"response_format": {"type": "regex", "value": "x{3}"}}, {"xxx"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "[ab]c"}}, {"ac", "bc"}),
        ({"structured_outputs": {"json": {"const": [1]}, "whitespace_pattern": " "}}, {"[1]", "[ 1]", "[1 ]", "[ 1 ]"}),
        ({"structured_outputs": {"json": '{"const": [1]}', "disable_any_whitespace": True}}, {"[1]"}),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, {"x", "y"}),
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"guided_regex": "x{3}"}, {"xxx"}),
        ({"guided_json": {"enum": [5]}}, {"5"}),
        ({"guided_grammar": 'start: "x" | "y"'}, {"x", "y"}),
        ({"grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
    ],
)
def test_each_field_constrains_both_endpoints(
    client: openai.OpenAI, fields: dict[str, Any], texts: set[str] | None
) -> None:
    chat = client.chat.completions.create(model="scripted", messages=ASK, temperature=1, extra_body=fields)
    text = client.completions.create(model="scripted", prompt="hi", temperature=1, max_tokens=99, extra_body=fields)
    for said in (chat.choices[0].message.content, text.choices[0].text):
        assert texts is None or said in texts


def test_an_object_is_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted",
        messages=ASK,
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=300,
        logit_bias={str(ord("}") - ord("!") + 7): 50},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"guided_regex": "a(?=b)"}, "guided_regex", "look-ahead"),
        ({"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs.grammar", "foo"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_choice", "guided_regex"),
        ({"response_format": {"type": "json_object"}, "grammar": "x"}, "grammar", "response_format"),
        (
            {"response_format": {"type": "json_object", "response_schema": {}}},
            "response_format.response_schema",
            "response_schema",
        ),
        ({"response_format": {"type": "json", "value": {}, "schema": {}}}, "response_format.value", "schema"),
        ({"response_format": {"type": "regex", "value": {}}}, "response_format.value", "text"),
        ({"guided_choice": ["a"], "use_beam_search": True, "n": 2}, "use_beam_search", "guided_choice"),
        ({"guided_choice": ["abc"], "allowed_token_ids": [9]}, "allowed_token_ids", "form of the answer"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str, told: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=ASK, extra_body=fields)
    assert caught.value.param == param
    assert told in caught.value.message


def test_a_request_behind_bombs_is_answered(client: openai.OpenAI, server: Server) -> None:
    """Each is refused or bounded; none stops the worker."""

    def nested(levels: int) -> dict[str, Any]:
        return {"type": "array", "items": nested(levels - 1)} if levels else {}

    bombs: list[dict[str, Any]] = [
        {"guided_json": nested(200)},
        {"guided_json": nested(400)},
        {"guided_json": {"enum": [f"x{i}" for i in range(50_000)]}},
        {"guided_json": {"properties": {f"p{i}": {"type": "string"} for i in range(8_000)}, "type": "object"}},
        {"guided_json": {"$ref": "#"}},
        {"guided_regex": "((a{1,300}){1,300}){1,300}"},
        {"guided_regex": "(" * 2_000 + ")" * 2_000},
        {"guided_choice": ["x" * 60_000]},
        {"grammar": "root ::= root"},
        {"guided_grammar": "start: start start"},
    ]
    for bomb in bombs:
        reply = httpx.post(f"{server.api}/completions", json={"prompt": "hi", "max_tokens": 3, **bomb}, timeout=60)
        # On busy cores a long trial may be given up. A body of too many levels is refused before its fields are read.
        error = {} if reply.status_code in (200, 503) else reply.json()["error"]
        assert not error or error["param"] in bomb or error["code"] == "invalid_json", reply.text
        assert client.completions.create(model="scripted", prompt="a", max_tokens=2, temperature=0).choices[0].text


# -- complete within max_tokens ----------------------------------------------------------------

MOST = 64
FITTING = {"type": "json_schema", "json_schema": {"name": "weather", "schema": Weather.model_json_schema()}}


def test_an_answer_that_must_fit_is_parsed_at_any_length(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.parse(
            model="scripted",
            messages=ASK,
            response_format=Weather,
            temperature=1,
            seed=seed,
            max_tokens=MOST + seed,
            extra_body={"fit": True},
        )
        assert isinstance(answer.choices[0].message.parsed, Weather)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= MOST + seed
        with client.chat.completions.stream(
            model="scripted",
            messages=ASK,
            response_format=Weather,
            temperature=1,
            seed=seed,
            max_tokens=MOST + seed,
            extra_body={"fit": True},
        ) as stream:
            last = stream.get_final_completion()
        assert last.choices[0].message.parsed == answer.choices[0].message.parsed


def test_the_error_of_a_budget_that_is_too_small_names_one_that_suffices(client: openai.OpenAI) -> None:
    def ask(max_tokens: int) -> str:
        answer = client.chat.completions.create(
            model="scripted",
            messages=ASK,
            temperature=1,
            max_tokens=max_tokens,
            extra_body={"response_format": FITTING, "fit": True},
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content or ""

    with pytest.raises(openai.BadRequestError) as caught:
        ask(3)
    assert caught.value.param == "max_tokens"
    found = re.search(r"max_tokens is 3, .* has (\d+) tokens", caught.value.message)
    assert found is not None
    Weather.model_validate_json(ask(int(found[1])))


def test_answers_of_each_dialect_fit(client: openai.OpenAI, server: Server) -> None:
    schema = Weather.model_json_schema()
    texts = []
    completion = client.completions.create(
        model="scripted",
        prompt="hi",
        temperature=1,
        n=2,
        max_tokens=MOST,
        extra_body={"response_format": FITTING, "fit": True},
    )
    texts += [choice.text for choice in completion.choices]
    response = client.responses.create(
        model="scripted",
        input="hi",
        max_output_tokens=MOST,
        text={"format": {"type": "json_schema", "name": "weather", "schema": schema}},
        extra_body={"fit": True},
    )
    assert response.status == "completed"
    texts.append(response.output_text)
    message = httpx.post(
        f"{server.api}/messages",
        json={
            "model": "scripted",
            "max_tokens": MOST,
            "messages": ASK,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
            "fit": True,
        },
        timeout=60,
    ).json()
    assert message["stop_reason"] == "end_turn"
    texts.append(message["content"][0]["text"])
    generated = httpx.post(
        f"{server.url}/v2/models/scripted/generate",
        json={"text_input": "hi", "parameters": {"guided_json": schema, "fit": True, "max_tokens": MOST}},
        timeout=60,
    ).json()
    texts.append(generated["text_output"])
    for text in texts:
        Weather.model_validate_json(text)


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"fit": True}, "fit", "may be any text"),
        ({"fit": "yes", "guided_choice": ["a"]}, "fit", "bool"),
        ({"fit": True, "guided_choice": ["a"], "allowed_token_ids": [9]}, "fit", "allowed_token_ids"),
        ({"fit": True, "grammar": 'start: TEXT "<end>"\nTEXT: /.*/'}, "fit", "not available for grammar"),
    ],
)
def test_a_fit_that_cannot_be_had_is_refused_by_its_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str, told: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=ASK, extra_body=fields)
    assert caught.value.param == param
    assert told in caught.value.message
