"""Ollama's API over real sockets, with answers by script: lines, calls, thinking, policies and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.fakes import Running, post, running, words

from inferd.answer_form import JsonSchema, ToolUse
from inferd.cache.memory import MemoryCache
from inferd.config import CacheConfig, Config, ModelCacheConfig, ModelConfig, ServerConfig
from inferd.errors import QuotaExceeded, WorkerDied
from inferd.tenancy.idempotency import IdempotencyStore
from inferd.types import CallDelta, Chat, Delta, End, GenerateRequest, Output, PromptReport, TextPrompt, Timings, Usage

JSON = dict[str, Any]
HI: list[JSON] = [{"role": "user", "content": "hi"}]
SCHEMA: JSON = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: JSON = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
CALLED: JSON = {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "P"}}}]}
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
ENDED = Timings(dispatched=0.5, scheduled=0.75, first_token=1.0, finished=3.0)


def says(*deltas: Delta, reason: str = "stop", by: str | None = None) -> Any:
    """A script that says the parts, one output each."""

    def script(request: GenerateRequest) -> list[Output]:
        last = Delta(0, finish_reason=reason, stop_reason=by)  # type: ignore[arg-type]
        outputs = [Output(request.id, (delta,)) for delta in deltas]
        return [
            Output(request.id, (), PromptReport(10, 4)),
            *outputs,
            Output(request.id, (last,), None, End("done", Usage(10, 20, 4), ENDED)),
        ]

    return script


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running() as started:
        yield started


@pytest.fixture
def server(shared: Running) -> Running:
    return shared.reset()


def ask(server: Running, body: JSON, path: str = "/api/chat", **headers: str) -> httpx.Response:
    given = {"messages": HI} if path == "/api/chat" else {"prompt": "hi"}
    return post(server, path, {"model": "tiny", "stream": False, **given, **body}, **headers)


def lines_of(reply: httpx.Response) -> list[JSON]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.text.endswith("\n")
    return [json.loads(line) for line in reply.text[:-1].split("\n")]


def joined(lines: list[JSON]) -> JSON:
    """The message that the lines of a chat make."""
    message: JSON = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
    for line in lines:
        message["content"] += line["message"]["content"]
        message["thinking"] += line["message"].get("thinking", "")
        message["tool_calls"] += line["message"].get("tool_calls", [])
    return message


_TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
_CALL = st.dictionaries(_TEXT, st.integers() | _TEXT, max_size=3)


@given(
    st.lists(st.tuples(st.just("text") | st.just("reasoning"), _TEXT) | st.tuples(st.just("call"), _CALL), max_size=6),
    st.sampled_from(["stop", "length"]),
    st.data(),
)
def test_the_lines_of_a_stream_make_the_whole_answer(
    shared: Running, parts: list[tuple[str, Any]], reason: str, data: st.DataObject
) -> None:
    deltas: list[Delta] = []
    calls = 0
    for kind, value in parts:
        if kind != "call":
            deltas.append(Delta(0, **{kind: value}))
            continue
        text = json.dumps(value)
        cut = data.draw(st.integers(0, len(text)))
        deltas.append(Delta(0, calls=(CallDelta(calls, "f", text[:cut]),)))
        deltas.append(Delta(0, calls=(CallDelta(calls, None, text[cut:]),)))
        calls += 1
    shared.reset().router.script = says(*deltas, reason=reason)
    whole = ask(shared, {}).json()
    lines = lines_of(ask(shared, {"stream": True}))
    message = joined(lines)
    assert message["content"] == whole["message"]["content"] == "".join(v for k, v in parts if k == "text")
    assert message["thinking"] == whole["message"].get("thinking", "")
    assert message["tool_calls"] == whole["message"].get("tool_calls", [])
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [v for k, v in parts if k == "call"]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["done_reason"] == whole["done_reason"] == reason
    assert not any(name in line for line in lines[:-1] for name in (*TIMES, "eval_count", "done_reason"))


def test_the_end_tells_times_and_tokens(server: Running) -> None:
    server.router.script = says(Delta(0, "a"))
    answer = ask(server, {}).json()
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (10, 20)
    assert [answer[name] for name in TIMES[1:]] == [500_000_000, 250_000_000, 2_000_000_000]
    assert server.served().finish_reasons == ("stop",)
    assert lines_of(ask(server, {"stream": True}))[-1]["load_duration"] == 500_000_000


def test_a_call_that_was_cut_off_is_left_out(server: Running) -> None:
    server.router.script = says(Delta(0, calls=(CallDelta(0, "f", '{"a": '),)), reason="length")
    assert "tool_calls" not in ask(server, {}).json()["message"]
    assert joined(lines_of(ask(server, {"stream": True})))["tool_calls"] == []
    server.router.script = says(Delta(0, calls=(CallDelta(0, "f", '{"a": '),)))
    reply = ask(server, {})  # the worker promises an object
    assert (reply.status_code, list(reply.json())) == (500, ["error"])
    *_, last = lines_of(ask(server, {"stream": True}))
    assert list(last) == ["error"]


def test_options_are_sampling_and_the_others_are_listed(server: Running) -> None:
    options = {
        "num_predict": 9,
        "temperature": 0.5,
        "top_k": 0,
        "top_p": 0,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": -1,
        "stop": ["x"],
        "mirostat": 0,
        "tfs_z": 1,
        "typical_p": 1,
        "num_ctx": 2048,
        "num_thread": 4,
    }
    server.router.script = words("a")
    reply = ask(server, {"options": options, "keep_alive": "5m", "of_tomorrow": 1})
    assert reply.headers["x-inferd-ignored-params"] == "options.num_ctx,options.num_thread,keep_alive,of_tomorrow"
    request = server.router.last
    found = request.sampling
    assert (found.max_tokens, found.temperature, found.top_k, found.top_p) == (9, 0.5, 0, 1e-9)
    assert (found.min_p, found.repetition_penalty) == (0.1, 1.1)
    assert (found.presence_penalty, found.frequency_penalty, found.stop) == (0.2, 0.3, ("x",))
    assert found.seed == 2**63 - 1
    assert request.lowers_max_tokens
    assert set(request.explicit) == {
        *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "seed", "stop"),
    }
    ask(server, {"options": {"num_predict": -1}})
    assert server.router.last.sampling.max_tokens is None


@pytest.mark.parametrize(
    ("think", "kwargs"),
    [
        (None, {}),
        (True, {"enable_thinking": True, "thinking": True}),
        (False, {"enable_thinking": False, "thinking": False}),
        ("low", {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
    ],
)
def test_thinking_reaches_the_template_and_is_a_field_of_its_own(server: Running, think: object, kwargs: JSON) -> None:
    server.router.script = says(Delta(0, reasoning="hm"), Delta(0, "a"))
    message = ask(server, {"think": think}).json()["message"]
    assert message == {"role": "assistant", "content": "a"} | ({} if think is False else {"thinking": "hm"})
    prompt = server.router.last.prompt
    assert isinstance(prompt, Chat)
    assert prompt.template_kwargs == kwargs
    text = ask(server, {"think": think}, "/api/generate").json()
    assert (text["response"], text.get("thinking")) == ("a", None if think is False else "hm")


def test_a_conversation_with_calls_is_rendered(server: Running) -> None:
    server.router.script = words("a")
    results = [
        {"role": "tool", "tool_name": "get_time", "content": "12"},
        {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
    ]
    two = [*CALLED["tool_calls"], {"function": {"name": "get_time", "arguments": {}}}]
    messages = [{"role": "system", "content": "s"}, *HI, {**CALLED, "thinking": "hm", "tool_calls": two}, *results]
    assert ask(server, {"messages": messages, "tools": [WEATHER, {"type": "of_tomorrow"}]}).status_code == 200
    request = server.router.last
    prompt, form = request.prompt, request.form
    assert isinstance(prompt, Chat)
    assert prompt.messages[2]["reasoning_content"] == "hm"
    ids = {call["function"]["name"]: call["id"] for call in prompt.messages[2]["tool_calls"]}
    assert [(m["tool_call_id"], m["content"]) for m in prompt.messages[3:]] == [
        (ids["get_time"], "12"),
        (ids["get_weather"], "sunny"),
    ]
    assert prompt.tools == [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
    assert form is not None
    assert form.tools == ToolUse()


def test_a_last_message_of_the_assistant_begins_the_answer(server: Running) -> None:
    server.router.script = words("a")
    ask(server, {"messages": [*HI, {"role": "assistant", "content": "It is"}]})
    prompt = server.router.last.prompt
    assert isinstance(prompt, Chat)
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)


def test_a_prompt_goes_through_the_template_unless_it_is_raw(server: Running) -> None:
    server.router.script = words("a")
    ask(server, {"system": "s"}, "/api/generate")
    prompt = server.router.last.prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    ask(server, {"raw": True}, "/api/generate")
    assert server.router.last.prompt == TextPrompt(text="hi")


def test_formats_bind_the_answer(server: Running) -> None:
    server.router.script = words("a")
    for asked, schema in (("json", {"type": "object"}), (SCHEMA, SCHEMA)):
        ask(server, {"format": asked})
        form = server.router.last.form
        assert form is not None
        assert form.constraint == JsonSchema(schema=schema, at="format")
    ask(server, {"format": ""})
    assert server.router.last.form is not None
    assert server.router.last.form.constraint is None


@pytest.mark.parametrize(
    ("path", "body", "words_of_error"),
    [
        ("/api/chat", {"options": {"temperature": 9}}, "options.temperature must be"),
        ("/api/chat", {"options": {"temperature": "warm"}}, "options.temperature"),
        ("/api/chat", {"options": {"num_predict": 0}}, "options.num_predict must be at least 1"),
        ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ("/api/chat", {"options": {"stop": [""]}}, "options.stop[0] is empty"),
        ("/api/chat", {"format": "xml"}, "format must be 'json' or a JSON Schema"),
        ("/api/chat", {"think": "deeply"}, "think must be true, false or one of low, medium, high"),
        ("/api/chat", {"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role must be one of"),
        ("/api/chat", {"messages": [{**HI[0], "images": ["aGk="]}]}, "messages[0].images has images"),
        ("/api/chat", {"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1] is the result of a tool"),
        ("/api/chat", {"messages": [{**HI[0], "tool_calls": CALLED["tool_calls"]}]}, "only allowed in assistant"),
        ("/api/chat", {"messages": [{"role": "assistant", "content": ""}]}, "no message with text"),
        ("/api/chat", {"tools": [WEATHER, WEATHER]}, "names must differ"),
        ("/api/chat", {"tools": [{"type": "function"}]}, "tools[0].function.name must have"),
        ("/api/generate", {"suffix": "end"}, "suffix is not supported"),
        ("/api/generate", {"context": [1, 2]}, "context is not supported. Send the earlier turns as 'messages'"),
        ("/api/generate", {"template": "{{ x }}"}, "template is not supported"),
        ("/api/generate", {"images": ["aGk="]}, "images is not supported"),
        ("/api/generate", {"raw": True, "system": "s"}, "system has no place in a raw prompt"),
        ("/api/show", {"model": ""}, "model is missing"),
    ],
)
def test_what_is_wrong_is_named(server: Running, path: str, body: JSON, words_of_error: str) -> None:
    reply = ask(server, body, path)
    assert reply.status_code == 400
    assert list(reply.json()) == ["error"]
    assert words_of_error in reply.json()["error"]
    assert not server.router.streams


def test_an_unknown_model_is_a_404_and_latest_is_no_other_model(server: Running) -> None:
    server.router.script = words("a")
    assert ask(server, {"model": "other"}).status_code == 404
    assert ask(server, {"model": "other:latest"}).status_code == 404
    assert ask(server, {"model": "tiny:latest"}).json()["model"] == "tiny"
    assert ask(server, {"name": "tiny:latest", "model": None}, "/api/show").status_code == 200


def test_no_prompt_loads_the_model_and_asks_it_nothing(server: Running) -> None:
    for path, body in (("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""})):
        answer = ask(server, body, path).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        (line,) = lines_of(ask(server, {**body, "stream": True}, path))
        assert line["done_reason"] == "load"
    assert not server.router.streams


def test_a_failure_after_the_first_line_is_the_last_line(server: Running) -> None:
    def script(request: GenerateRequest) -> list[Any]:
        return [Output(request.id, (Delta(0, "a"),), PromptReport(1)), WorkerDied("The worker died; try again.")]

    server.router.script = script
    first, last = lines_of(ask(server, {"stream": True}))
    assert first["message"]["content"] == "a"
    assert last == {"error": "The worker died; try again."}
    server.router.refusal = QuotaExceeded("The quota is used up; try again later.")
    assert ask(server, {"stream": True}).status_code == 429


def test_a_stream_is_repeated_and_cached_as_lines() -> None:
    model = ModelConfig(source="tiny", cache=ModelCacheConfig(enabled=True))
    settings = Config(models={"tiny": model}, server=ServerConfig(port=0, grace_s=1), cache=CacheConfig())
    with running(config=settings, cache=MemoryCache(settings.cache), idempotency=IdempotencyStore(60)) as server:
        server.router.script = words("a", "b")
        greedy = {"stream": True, "options": {"temperature": 0}}
        first = ask(server, greedy)
        again = ask(server, greedy)
        assert again.headers["x-inferd-cache"] == "hit"
        assert lines_of(again) == lines_of(first)
        drawn = {"stream": True, "options": {"temperature": 1}}
        one, two = (ask(server, drawn, **{"idempotency-key": "k"}) for _ in range(2))
        assert two.headers["idempotent-replayed"] == "true"
        assert lines_of(one) == lines_of(two)
        assert len(server.router.streams) == 2


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/show", "/api/pull"])
def test_a_bare_curl_is_answered(server: Running, path: str) -> None:
    reply = ask(server, {}, path, **{"content-type": FORM, "user-agent": "curl/8.5.0"})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "headers",
    [
        {"user-agent": "Mozilla/5.0 (X11; Linux x86_64)"},
        {"user-agent": "curl/8.5.0", "origin": "http://localhost"},
        {"user-agent": "curl/8.5.0", "sec-fetch-site": "cross-site"},
        {"user-agent": "curl/8.5.0", "referer": "http://evil.example/"},
        {"user-agent": "curl/8.5.0", "content-encoding": "gzip"},
        {"user-agent": "curl/8.5.0", "content-type": "text/plain"},
    ],
)
def test_a_form_of_a_web_page_is_refused(server: Running, headers: dict[str, str]) -> None:
    reply = ask(server, {}, **{"content-type": FORM, **headers})
    assert reply.status_code in (403, 415)
    assert not server.router.streams


def test_other_dialects_take_no_forms(server: Running) -> None:
    reply = post(server, "/v1/completions", {"prompt": "a"}, **{"content-type": FORM, "user-agent": "curl/8.5.0"})
    assert reply.status_code == 415
