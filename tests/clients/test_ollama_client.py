"""Ollama's client for Python, unmodified, against a scripted model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from tests.clients.conftest import Server
from tests.clients.scripted_model import ANSWER, ELSE, HELLO, SURE

GREETING = "".join(HELLO)
ASK: Any = [{"role": "user", "content": "hi"}]
GREEDY: Any = {"temperature": 0}


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
      city: Its name.
    """
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, timeout=60) as made:
        yield made


def test_a_chat_is_answered_whole_and_streamed(client: ollama.Client) -> None:
    whole = client.chat("scripted", ASK, options=GREEDY)
    assert (whole.message.role, whole.message.content) == ("assistant", GREETING)
    assert (whole.done, whole.done_reason) == (True, "stop")
    assert whole.eval_count == len(HELLO) + 1  # the end counts
    assert whole.prompt_eval_count == len("hi") + 2
    assert whole.total_duration is not None
    assert whole.eval_duration is not None
    assert whole.total_duration >= whole.eval_duration > 0
    lines = list(client.chat("scripted:latest", ASK, options=GREEDY, stream=True))
    assert "".join(line.message.content or "" for line in lines) == GREETING
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert len(lines) >= 2
    assert (lines[-1].done_reason, lines[-1].eval_count) == ("stop", whole.eval_count)


def test_a_text_is_answered_through_the_template_or_raw(client: ollama.Client) -> None:
    answer = client.generate("scripted", "hi", options=GREEDY)
    assert (answer.response, answer.done_reason) == (GREETING, "stop")
    lines = list(client.generate("scripted", "hi", options=GREEDY, stream=True))
    assert "".join(line.response or "" for line in lines) == GREETING
    raw = client.generate("scripted", "abc", raw=True, options={**GREEDY, "num_predict": 3})
    assert (raw.response, raw.done_reason, raw.prompt_eval_count) == ("def", "length", 3)
    assert client.generate("scripted", "").done_reason == "load"


def test_stops_and_log_probabilities(client: ollama.Client) -> None:
    stopped = client.generate("scripted", "hi", options={**GREEDY, "stop": [" scripted"], "num_ctx": 4096})
    assert stopped.response == "Hello from a"
    told = client.generate("scripted", "hi", options=GREEDY, logprobs=True, top_logprobs=2)
    assert told.logprobs is not None
    first = told.logprobs[0]
    assert first.token == HELLO[0]
    assert first.logprob == pytest.approx(SURE, abs=1e-3)
    assert first.top_logprobs is not None
    assert [one.logprob for one in first.top_logprobs] == pytest.approx([SURE, ELSE], abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_answered(client: ollama.Client, stream: bool) -> None:
    way: Any = stream
    answer: Any = client.chat("scripted", ASK, tools=[get_weather], options=GREEDY, stream=way)
    messages = [line.message for line in answer] if stream else [answer.message]
    (call,) = [call for message in messages for call in message.tool_calls or []]
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    history = [*ASK, next(message for message in messages if message.tool_calls)]
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather("Paris")}
    second = client.chat("scripted", [*history, result], tools=[get_weather], options=GREEDY)
    assert second.message.content == "".join(ANSWER)


def test_an_answer_keeps_to_a_schema(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"], "additionalProperties": False}
    answer = client.chat("scripted", ASK, format=schema, options={**GREEDY, "num_predict": 30})
    assert answer.message.content is not None
    assert answer.message.content.replace(" ", "") == '{"n":7}'


def test_the_models_are_listed_and_shown(client: ollama.Client) -> None:
    (listed,) = client.list().models
    assert listed.model == "scripted"
    assert listed.details is not None
    assert listed.details.family == "LlamaForCausalLM"
    shown = client.show("scripted")
    assert shown.capabilities is not None
    assert {"completion", "tools"} <= set(shown.capabilities)
    assert shown.modelinfo is not None
    assert shown.modelinfo["LlamaForCausalLM.context_length"] == 65536
    assert [one.model for one in client.ps().models] == ["scripted"]
    assert client.pull("scripted").status == "success"
    assert [one.status for one in client.pull("scripted", stream=True)][-1] == "success"


def test_errors_are_sentences(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match='The model "other" does not exist') as absent:
        client.chat("other", ASK)
    assert absent.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature must be") as wrong:
        client.chat("scripted", ASK, options={"temperature": 9})
    assert wrong.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="add it there"):
        client.pull("llama3.2")
    with pytest.raises(ollama.ResponseError, match="cannot embed"):
        client.embed("scripted", "a text")
