"""The Messages API over real sockets, with answers by script: blocks, events, usage, policies and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.fakes import FakeDoor, FakeRouter, FakeStatus, Running, post, running

from inferd.answer_form import AnswerForm, JsonSchema, ToolUse
from inferd.cache.memory import MemoryCache
from inferd.config import CacheConfig, Config, ModelCacheConfig, ModelConfig, ServerConfig
from inferd.errors import InternalError, Overloaded, QuotaExceeded, WorkerDied
from inferd.tenancy.idempotency import IdempotencyStore
from inferd.tenancy.principal import Principal
from inferd.types import CallDelta, Chat, Delta, End, GenerateRequest, Output, PromptReport, Usage

JSON = dict[str, Any]
HI: list[JSON] = [{"role": "user", "content": "hi"}]
PLACES = ("tools[0].input_schema",)
SCHEMA: JSON = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: JSON = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
ASKED = Usage(prompt_tokens=10, completion_tokens=20, cached_tokens=4, reasoning_tokens=5)
CALLED: JSON = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}


def says(*deltas: Delta, usage: Usage = ASKED, reason: str = "stop", by: str | int | None = None) -> Any:
    """A script that says the parts, one output each."""

    def script(request: GenerateRequest) -> list[Output]:
        report = PromptReport(usage.prompt_tokens, usage.cached_tokens)
        last = Delta(0, finish_reason=reason, stop_reason=by)  # type: ignore[arg-type]
        outputs = [Output(request.id, (delta,)) for delta in deltas]
        outputs.append(Output(request.id, (last,), None, End("done", usage)))
        first = outputs[0]
        outputs[0] = Output(first.request_id, first.deltas, report, first.end)
        return outputs

    return script


def ask(server: Running, body: JSON, path: str = "/v1/messages", **headers: str) -> httpx.Response:
    return post(server, path, {"model": "tiny", "max_tokens": 50, "messages": HI} | body, **headers)


def events(reply: httpx.Response) -> list[tuple[str, JSON]]:
    """Names and data of a stream's events; each frame has these two lines and no other."""
    found = []
    for frame in reply.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


def accumulated(found: list[tuple[str, JSON]]) -> JSON:
    """The message that a stream's events make. Checks their order."""
    (first, start), *middle, (last_but_one, delta), (last, _) = [one for one in found if one[0] != "ping"]
    assert (first, last_but_one, last) == ("message_start", "message_delta", "message_stop")
    message: JSON = start["message"]
    content: list[JSON] = message["content"]
    open_index = None
    for name, data in middle:
        if name == "content_block_start":
            assert open_index is None
            assert data["index"] == len(content)
            open_index = data["index"]
            content.append(data["content_block"] | {"json": ""})
            continue
        assert data["index"] == open_index
        block = content[-1]
        if name == "content_block_stop":
            open_index = None
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["json"] or "{}")
            del block["json"]
            continue
        part = data["delta"]
        match part["type"]:
            case "text_delta":
                block["text"] += part["text"]
            case "thinking_delta":
                block["thinking"] += part["thinking"]
            case "signature_delta":
                block["signature"] += part["signature"]
            case "input_json_delta":
                block["json"] += part["partial_json"]
    assert open_index is None
    end: JSON = delta["delta"]
    return message | end | {"usage": delta["usage"]}


def without_ids(message: JSON) -> JSON:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return message | {"id": "", "content": content}


# -- answers -----------------------------------------------------------------------------------


THOUGHT = (
    Delta(0, reasoning="I thi"),
    Delta(0, reasoning="nk"),
    Delta(0, "Let me"),
    Delta(0, " see.", calls=(CallDelta(0, "get_weather"),)),
    Delta(0, calls=(CallDelta(0, None, '{"city":'),)),
    Delta(0, calls=(CallDelta(0, None, '"Paris"}'), CallDelta(1, "now"))),
)


@pytest.mark.parametrize("arguments", ["", '{"city":"Par'])
@pytest.mark.parametrize(("reason", "by", "said"), [("length", None, "max_tokens"), ("stop", "P", "stop_sequence")])
def test_a_call_in_which_the_answer_was_cut_off_is_left_out(
    server: Running, arguments: str, reason: str, by: str | None, said: str
) -> None:
    usage = Usage(prompt_tokens=10, completion_tokens=50)
    calls = (CallDelta(0, "now", "{}"), CallDelta(1, "get_weather", arguments))
    server.router.script = says(Delta(0, "Let me see.", calls=calls), usage=usage, reason=reason, by=by)
    reply = ask(server, {"tools": [WEATHER, {"name": "now", "input_schema": {"type": "object"}}]})
    assert reply.status_code == 200, reply.text
    message = reply.json()
    assert [block.get("name") for block in message["content"]] == [None, "now"]
    assert message["stop_reason"] == said


def test_a_whole_answer_with_a_call_that_is_no_object_is_an_error(server: Running) -> None:
    server.router.script = says(Delta(0, calls=(CallDelta(0, "get_weather", '{"city":"Par'),)))
    assert ask(server, {"tools": [WEATHER]}).status_code == 500


def test_reasoning_text_and_calls_are_blocks(server: Running) -> None:
    server.router.script = says(*THOUGHT)
    message = ask(server, {"tools": [WEATHER], "thinking": {"type": "adaptive"}}).json()
    thinking, text, first, second = message["content"]
    assert thinking["type"] == "thinking"
    assert thinking["thinking"] == "I think"
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Let me see."}
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "get_weather", {"city": "Paris"})
    assert (second["name"], second["input"]) == ("now", {})
    assert first["id"].startswith("toolu_")
    assert first["id"] != second["id"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {
        "input_tokens": 6,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "output_tokens": 20,
        "output_tokens_details": {"thinking_tokens": 5},
    }


def test_a_stream_says_its_usage_first_and_its_end_last(server: Running) -> None:
    server.router.script = says(*THOUGHT)
    found = events(ask(server, {"tools": [WEATHER], "stream": True}))
    assert found[0][1]["message"]["usage"]["input_tokens"] == 6
    assert found[0][1]["message"]["usage"]["cache_read_input_tokens"] == 4
    names = [name for name, _ in found]
    assert names.count("content_block_start") == names.count("content_block_stop") == 4
    assert found[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2][1]["usage"]["output_tokens"] == 20


PIECES = st.lists(st.text(alphabet='ab {}"\\é😀\n', min_size=1, max_size=4), max_size=4)


@given(reasoning=PIECES, text=PIECES, city=st.text(max_size=8), cut=st.integers(0, 30), shows=st.booleans())
def test_a_stream_equals_the_whole_answer(
    shared_server: Running, reasoning: list[str], text: list[str], city: str, cut: int, shows: bool
) -> None:
    arguments = json.dumps({"city": city})
    parts = [Delta(0, reasoning=piece) for piece in reasoning] + [Delta(0, piece) for piece in text]
    parts += [Delta(0, calls=(CallDelta(0, "get_weather", arguments[:cut]), CallDelta(0, None, arguments[cut:])))]
    server = shared_server.reset()
    server.router.script = says(*parts)
    body = {"tools": [WEATHER], "thinking": {"type": "adaptive", "display": "summarized" if shows else "omitted"}}
    whole = ask(server, body).json()
    streamed = accumulated(events(ask(server, body | {"stream": True})))
    assert without_ids(streamed) == without_ids(whole)
    sent_back = [*HI, {"role": "assistant", "content": [*whole["content"][:-1], CALLED]}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}]}
    assert ask(server, {"messages": [*sent_back, result]}).status_code == 200
    assistant = chat_of(server).messages[1]
    assert assistant.get("reasoning_content", "") == "".join(reasoning)
    assert assistant["content"] == "".join(text)


SEGMENTS = st.lists(
    st.tuples(
        st.sampled_from(["reasoning", "text", "call"]), st.lists(st.text("ab\n", min_size=1), min_size=1, max_size=3)
    ),
    max_size=6,
)


@given(segments=SEGMENTS, shows=st.booleans())
def test_a_stream_has_the_blocks_of_the_whole_answer_in_the_same_order(
    shared_server: Running, segments: list[tuple[str, list[str]]], shows: bool
) -> None:
    parts: list[Delta] = []
    for kind, pieces in segments:
        if kind == "call":
            number = sum(call.name is not None for part in parts for call in part.calls)
            city = json.dumps({"city": "".join(pieces)})
            parts += [
                Delta(0, calls=(CallDelta(number, "get_weather", city[:5]),)),
                Delta(0, calls=(CallDelta(number, None, city[5:]),)),
            ]
        else:
            parts += [Delta(0, reasoning=piece) if kind == "reasoning" else Delta(0, piece) for piece in pieces]
    server = shared_server.reset()
    server.router.script = says(*parts)
    body = {"tools": [WEATHER], "thinking": {"type": "adaptive", "display": "summarized" if shows else "omitted"}}
    whole = ask(server, body).json()
    streamed = accumulated(events(ask(server, body | {"stream": True})))
    assert without_ids(streamed) == without_ids(whole)
    kinds = {"reasoning": "thinking", "text": "text", "call": "tool_use"}
    expected = [kinds[kind] for kind, _ in segments]
    merged = [kind for at, kind in enumerate(expected) if kind == "tool_use" or at == 0 or expected[at - 1] != kind]
    assert [block["type"] for block in whole["content"]] == merged


def chat_of(server: Running) -> Chat:
    prompt = server.router.last.prompt
    assert isinstance(prompt, Chat)
    return prompt


@pytest.mark.parametrize(
    ("reason", "by", "completion_tokens", "expected", "sequence"),
    [
        ("stop", None, 7, "end_turn", None),
        ("stop", 2, 7, "end_turn", None),
        ("stop", "END", 7, "stop_sequence", "END"),
        ("length", None, 50, "max_tokens", None),
        ("length", None, 49, "model_context_window_exceeded", None),
    ],
)
def test_the_reason_of_the_end(
    server: Running, reason: str, by: str | int | None, completion_tokens: int, expected: str, sequence: str | None
) -> None:
    server.router.script = says(Delta(0, "x"), usage=Usage(3, completion_tokens), reason=reason, by=by)
    whole = ask(server, {"stop_sequences": ["END"]}).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (expected, sequence)
    streamed = accumulated(events(ask(server, {"stop_sequences": ["END"], "stream": True})))
    assert (streamed["stop_reason"], streamed["stop_sequence"]) == (expected, sequence)
    assert server.router.last.sampling.stop == ("END",)


def test_an_answer_without_content_has_no_blocks(server: Running) -> None:
    server.router.script = says()
    assert ask(server, {}).json()["content"] == []
    assert accumulated(events(ask(server, {"stream": True})))["content"] == []
    assert ask(server, {"messages": [*HI, {"role": "assistant", "content": []}, *HI]}).status_code == 200


def test_an_error_after_the_first_event_is_an_event_and_the_last(server: Running) -> None:
    def script(request: GenerateRequest) -> list[Any]:
        return [Output(request.id, (Delta(0, "x"),), PromptReport(3)), WorkerDied("The worker died.")]

    server.router.script = script
    reply = ask(server, {"stream": True})
    name, data = events(reply)[-1]
    assert reply.status_code == 200
    assert name == "error"
    assert data["error"]["type"] == "overloaded_error"
    assert data["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]


def test_a_ping_is_sent_while_the_first_token_is_awaited(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from inferd.gateway.generation import sse

    monkeypatch.setattr(sse, "HEARTBEAT_S", 0.05)
    server.router.script = None
    with server.http.stream(
        "POST", server.url + "/v1/messages", json={"max_tokens": 5, "messages": HI, "stream": True}
    ) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "event: ping"
        assert json.loads(next(lines).removeprefix("data: ")) == {"type": "ping"}
        for item in says(Delta(0, "late"))(server.router.last):
            server.put(server.router.streams[-1], item)
        rest = [line for line in lines if line.startswith("event: ") and line != "event: ping"]
    assert rest[0] == "event: message_start"
    assert rest[-1] == "event: message_stop"


def test_a_client_that_leaves_cancels_its_request(server: Running) -> None:
    server.router.script = None
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/messages", json={"max_tokens": 5, "messages": HI, "stream": True}, timeout=0.3)
    assert server.router.streams[-1].closed.wait(10)


# -- the prompt --------------------------------------------------------------------------------


def test_a_conversation_becomes_the_templates_messages(server: Running) -> None:
    messages: list[JSON] = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "of another server"},
                {"type": "redacted_thinking", "data": "xxx"},
                {"type": "text", "text": "calling"},
                CALLED,
                CALLED | {"id": "t2"},
                CALLED | {"id": "t3"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "go on"},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": "no network"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {
                    "type": "tool_result",
                    "tool_use_id": "t3",
                    "content": [{"type": "tool_reference", "tool_name": "get_weather"}],
                },
            ],
        },
        {"role": "system", "content": "be brief"},
    ]
    reply = ask(server, {"system": [{"type": "text", "text": "s"}], "tools": [WEATHER], "messages": messages})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-inferd-ignored-params"].split(",") == [
        "messages.content.cache_control",
        "messages.content.data",
        "messages.redacted_thinking",
    ]

    def call(name: str) -> JSON:
        return {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}

    chat = chat_of(server)
    assert chat.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\n<system>\nbe kind\n</system>\nb"},
        {
            "role": "assistant",
            "content": "calling",
            "reasoning_content": "hm",
            "tool_calls": [call("t1"), call("t2"), call("t3")],
        },
        {"role": "tool", "tool_call_id": "t2", "name": "get_weather", "content": "Error: no network"},
        {"role": "tool", "tool_call_id": "t1", "name": "get_weather", "content": "sunny"},
        {"role": "tool", "tool_call_id": "t3", "name": "get_weather", "content": "get_weather"},
        {"role": "user", "content": "go on\n<system>\nbe brief\n</system>"},
    ]
    function = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.add_generation_prompt
    assert not chat.continue_final_message


def test_a_last_message_of_the_assistant_begins_the_answer(server: Running) -> None:
    begun = [*HI, {"role": "assistant", "content": "The best answer is ("}]
    assert ask(server, {"messages": begun}).status_code == 200
    assert (chat_of(server).add_generation_prompt, chat_of(server).continue_final_message) == (False, True)
    for excluded in (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        {"tools": [WEATHER], "tool_choice": {"type": "any"}},
    ):
        reply = ask(server, {"messages": begun} | excluded)
        assert (reply.status_code, "messages[1]" in reply.text) == (400, True)


@pytest.mark.parametrize("separate", [True, False])
def test_marks_and_the_billing_line_never_change_the_prompt(server: Running, separate: bool) -> None:
    prompts = []
    for number in (1, 2):
        line = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number * 7919:x};"
        mark = {"cache_control": {"type": "ephemeral"}} if number == 2 else {}
        rest: list[JSON] = [{"type": "text", "text": "You are a helper."} | mark]
        system: Any = [{"type": "text", "text": line}, *rest] if separate else f"{line}\nYou are a helper."
        messages = [{"role": "user", "content": [{"type": "text", "text": "hi"} | mark]}]
        reply = ask(server, {"system": system, "messages": messages, "tools": [WEATHER | mark]} | mark)
        assert "system.x-anthropic-billing-header" in reply.headers["x-inferd-ignored-params"]
        prompts.append(msgspec.json.encode(chat_of(server)))
    assert prompts[0] == prompts[1]
    assert chat_of(server).messages[0] == {"role": "system", "content": "You are a helper."}


def test_a_system_message_may_have_an_effort_and_no_text(server: Running) -> None:
    """As Claude Code sends it when it compacts a conversation."""
    effort = {"role": "system", "content": [], "output_config": {"effort": "medium"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "1"}
    messages = [
        *({"role": "user", "content": "[earlier conversation truncated for compaction retry]"}, effort),
        {"role": "assistant", "content": [CALLED]},
        *({"role": "user", "content": [result]}, effort),
        {"role": "user", "content": "Write a summary."},
    ]
    reply = ask(server, {"messages": messages, "tools": [WEATHER]})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-inferd-ignored-params"] == "messages.output_config"
    told = [(message["role"], message["content"]) for message in chat_of(server).messages]
    assert told == [
        ("user", "[earlier conversation truncated for compaction retry]"),
        ("assistant", ""),
        ("tool", "1"),
        ("user", "Write a summary."),
    ]


@pytest.mark.parametrize(
    ("thinking", "thinks", "budget"),
    [
        (None, False, None),
        ({"type": "disabled"}, False, None),
        ({"type": "adaptive"}, True, None),
        ({"type": "between_tools"}, True, None),
        ({"type": "enabled", "budget_tokens": 1024}, True, 1024),
    ],
)
def test_thinking_reaches_the_template_and_its_budget_the_worker(
    server: Running, thinking: JSON | None, thinks: bool, budget: int | None
) -> None:
    reply = ask(server, {"thinking": thinking, "max_tokens": 2000, "output_config": {"effort": "high"}})
    assert reply.status_code == 200, reply.text
    arguments = chat_of(server).template_kwargs
    assert arguments == {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": "high"}
    assert server.router.last.form == AnswerForm(reasoning_budget=budget)


# -- the form ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        (None, ToolUse(places=PLACES)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolUse(is_parallel=False, places=PLACES)),
        ({"type": "any"}, ToolUse(mode="required", places=PLACES)),
        ({"type": "tool", "name": "get_weather"}, ToolUse(mode="required", names=("get_weather",), places=PLACES)),
        ({"type": "none"}, None),
    ],
)
def test_a_choice_of_tools_is_the_form_of_the_answer(server: Running, choice: JSON | None, use: ToolUse | None) -> None:
    assert ask(server, {"tools": [WEATHER], "tool_choice": choice}).status_code == 200
    form = server.router.last.form
    assert form is not None
    assert form.tools == use
    assert chat_of(server).tools  # the prompt keeps its prefix


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_format_is_a_constraint_that_names_its_field(server: Running, field: str) -> None:
    schema = {"type": "json_schema", "schema": SCHEMA}
    body = {"output_config": {"format": schema}} if field == "output_config" else {"output_format": schema}
    assert ask(server, body).status_code == 200
    form = server.router.last.form
    assert form is not None
    at = "output_config.format.schema" if field == "output_config" else "output_format.schema"
    assert form.constraint == JsonSchema(schema=SCHEMA, at=at)


def test_sampling_reaches_the_worker(server: Running) -> None:
    ask(server, {"temperature": 0.5, "top_p": 0.25, "top_k": 7})
    sampling = server.router.last.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.25, 7, 50)
    assert set(server.router.last.explicit) == {"temperature", "top_p", "top_k", "max_tokens"}
    assert server.router.last.lowers_max_tokens


# -- what is dropped and refused ---------------------------------------------------------------


def test_what_has_no_effect_is_dropped_and_listed(server: Running) -> None:
    servers_tool = {"type": "web_search_20250305", "name": "web_search"}
    reply = ask(
        server,
        {
            "service_tier": "auto",
            "container": "c",
            "cache_control": {"type": "ephemeral"},
            "mcp_servers": [{"url": "http://x"}],
            "of_tomorrow": {"a": 1},
            "bad, name\r\nx: y": 1,
            "empty": None,
            "tools": [servers_tool, WEATHER],
            "metadata": {"user_id": "u"},
        },
    )
    assert reply.status_code == 200, reply.text
    listed = reply.headers["x-inferd-ignored-params"].split(",")
    assert listed == [
        *("service_tier", "container", "cache_control", "mcp_servers", "of_tomorrow", "bad??name??x??y"),
        "tools.web_search_20250305",
    ]
    assert [tool["function"]["name"] for tool in chat_of(server).tools or ()] == ["get_weather"]


def test_the_list_of_dropped_fields_is_bounded(server: Running) -> None:
    reply = ask(server, {f"field{i}" + "x" * 500: 1 for i in range(5000)})
    assert reply.status_code == 200
    assert len(reply.headers["x-inferd-ignored-params"]) <= 32 * 65


NESTED: JSON = {"type": "object"}
for _ in range(40):
    NESTED = {"type": "object", "properties": {"a": NESTED}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
REFUSED: list[tuple[JSON, str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "system", "content": []}]}, "messages"),
    # Claude Code finds these words, and asks again without the file.
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "Could not process image: messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        "Could not process PDF or other document: messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "of_tomorrow"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [CALLED]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "x"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    ({"messages": [*HI, {"role": "assistant", "content": [CALLED]}]}, "messages[1].content[0]"),
    ({"messages": [*HI, {"role": "assistant", "content": [CALLED]}, *HI]}, "messages[1].content[0]"),
    ({"messages": [*HI, {"role": "assistant", "content": [CALLED, CALLED]}]}, "messages[1].content[1].id"),
    ({"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]}, "content[0].name"),
    (
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": [CALLED]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [IMAGE]}]},
            ]
        },
        "Could not process image: messages[2].content[0].content[0]",
    ),
    (
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": [CALLED]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}] * 2},
            ]
        },
        "messages[2].content[1].tool_use_id",
    ),
    (
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": "inferd-text:?"}]},
            ]
        },
        "messages[1].content[0].signature",
    ),
    ({"system": [IMAGE]}, "system[0]"),
    ({"system": 7}, "system"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
    ({"tools": [WEATHER | {"name": f"t{i}"} for i in range(513)]}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "no"}, "tools": [WEATHER]}, "tool_choice.name"),
    (
        {
            "tool_choice": {"type": "tool", "name": "web_search"},
            "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
        },
        "tool_choice.name",
    ),
    ({"tool_choice": {"type": "sometimes"}, "tools": [WEATHER]}, "tool_choice.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (
        {
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "output_format": {"type": "json_schema", "schema": {}},
        },
        "output_format",
    ),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stream": "yes"}, "stream"),
    ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
    ({"compaction": {"type": "summarize"}}, "compaction"),
]


@pytest.mark.parametrize(("body", "named"), REFUSED)
def test_a_wrong_field_is_named(server: Running, body: JSON, named: str) -> None:
    reply = ask(server, body)
    error = reply.json()
    assert reply.status_code == 400, reply.text
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert named in error["error"]["message"]
    assert error["request_id"] == reply.headers["request-id"]
    assert error["error"]["details"]["error_code"]
    assert not server.router.streams


def test_long_conversations_and_deep_schemas_are_no_harm(server: Running) -> None:
    turns = [*HI, {"role": "assistant", "content": "x"}] * 9000
    assert ask(server, {"messages": turns}).json()["error"]["type"] == "invalid_request_error"
    assert ask(server, {"tools": [WEATHER | {"input_schema": NESTED}]}).status_code == 200
    bomb = b'{"model":"tiny","max_tokens":5,"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    reply = server.http.post(server.url + "/v1/messages", content=bomb, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


# -- models, keys, limits ----------------------------------------------------------------------


def test_a_name_of_anthropics_means_the_only_model(server: Running) -> None:
    reply = ask(server, {"model": "claude-of-tomorrow"})
    assert (reply.status_code, reply.json()["model"]) == (200, "tiny")
    assert reply.headers["x-inferd-ignored-params"] == "model"
    other = ask(server, {"model": "gpt"})
    assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")


def test_a_name_of_anthropics_means_none_of_several_models(five_models: Running) -> None:
    assert ask(five_models, {"model": "claude-of-tomorrow"}).status_code == 404


def test_a_model_elsewhere_is_not_asked_in_this_dialect(server: Running) -> None:
    server.router.statuses = [FakeStatus("tiny", has_local=False, has_remote=True)]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        reply = ask(server, {}, path)
        assert (reply.status_code, "OpenAI" in reply.text) == (400, True)
    assert not server.router.streams


def test_a_prompts_tokens_are_counted(server: Running) -> None:
    reply = ask(
        server, {"messages": [{"role": "user", "content": "hello"}], "system": "abc"}, "/v1/messages/count_tokens"
    )
    assert reply.json() == {"input_tokens": 8}
    assert reply.headers["x-inferd-ignored-params"] == "max_tokens"
    assert ask(server, {"messages": []}, "/v1/messages/count_tokens").status_code == 400
    assert not server.router.streams


@pytest.fixture
def five_models() -> Iterator[Running]:
    with running(FakeRouter(*"abcde")) as started:
        yield started


def test_models_are_listed_in_pages_of_their_form(five_models: Running) -> None:
    server = five_models

    def listed(**query: Any) -> JSON:
        reply = server.http.get(server.url + "/v1/models", params=query, headers={"anthropic-version": "2023-06-01"})
        assert reply.status_code == 200, reply.text
        page: JSON = reply.json()
        return page

    assert [entry["id"] for entry in listed()["data"]] == list("abcde")
    page = listed(limit=2)
    assert ([e["id"] for e in page["data"]], page["first_id"], page["last_id"], page["has_more"]) == (
        ["a", "b"], "a", "b", True,
    )  # fmt: skip
    assert [entry["id"] for entry in listed(limit=3, after_id="b")["data"]] == ["c", "d", "e"]
    before = listed(limit=2, before_id="d")
    assert ([entry["id"] for entry in before["data"]], before["has_more"]) == (["b", "c"], True)
    for query in ({"limit": 0}, {"limit": "x"}, {"after_id": "z"}):
        reply = server.http.get(server.url + "/v1/models", params=query, headers={"anthropic-version": "x"})
        assert (reply.status_code, reply.json()["type"]) == (400, "error")
    assert "object" in server.http.get(server.url + "/v1/models").json()  # OpenAI's clients get theirs
    one = server.http.get(server.url + "/v1/models/c", headers={"anthropic-version": "x"}).json()
    assert (one["id"], one["type"], one["max_input_tokens"]) == ("c", "model", 128)


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_keys_models_and_quotas_hold(header: str) -> None:
    def with_key(key: str) -> dict[str, str]:
        return {header: f"Bearer {key}" if header == "authorization" else key}

    keys = {
        "sk-a": Principal(key_id="a", tenant="team-a", models=("a",)),
        "sk-none": Principal(key_id="n", tenant="n", scopes=frozenset(("models",))),
    }
    door = FakeDoor(keys)
    with running(FakeRouter("a", "b"), door=door) as server:
        for key, status, kind in (("wrong", 401, "authentication_error"), ("sk-none", 403, "permission_error")):
            reply = ask(server, {"model": "a"}, **with_key(key))
            assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
            assert reply.json()["request_id"] == reply.headers["request-id"]
        assert ask(server, {"model": "a"}, **with_key("sk-a")).status_code == 200
        assert server.router.last.tenant == "team-a"
        hidden = ask(server, {"model": "b"}, **with_key("sk-a"))
        assert (hidden.status_code, hidden.json()["error"]["type"]) == (404, "not_found_error")
        assert ask(server, {"model": "claude-x"}, **with_key("sk-a")).json()["model"] == "a"  # the only one it may use
        door.refusal = QuotaExceeded("Too many requests.", retry_after_s=7)
        refused = ask(server, {"model": "a"}, **with_key("sk-a"))
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert refused.headers["retry-after"] == "7"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(Overloaded("Full."), 503, "overloaded_error"), (InternalError("Broken."), 500, "api_error")],
)
def test_refusals_of_the_router_have_the_dialects_types(
    server: Running, error: Exception, status: int, kind: str
) -> None:
    server.router.refusal = error  # type: ignore[assignment]
    for stream in (False, True):
        reply = ask(server, {"stream": stream})
        assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)


def test_a_body_that_is_too_large_has_the_dialects_type() -> None:
    with running(config=ServerConfig(port=0, grace_s=1, max_body_bytes=10_000)) as server:
        reply = ask(server, {"system": "x" * 20_000})
        assert (reply.status_code, reply.json()["error"]["type"]) == (413, "request_too_large")


# -- repetitions -------------------------------------------------------------------------------


@pytest.fixture
def repeating() -> Iterator[Running]:
    model = ModelConfig(source="tiny", cache=ModelCacheConfig(enabled=True))
    settings = Config(models={"tiny": model}, server=ServerConfig(port=0, grace_s=1), cache=CacheConfig())
    with running(config=settings, cache=MemoryCache(settings.cache), idempotency=IdempotencyStore(60)) as started:
        yield started


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_repeated_and_cached_byte_for_byte(repeating: Running, stream: bool) -> None:
    repeating.router.script = says(*THOUGHT)
    body = {"temperature": 0, "stream": stream, "tools": [WEATHER]}
    first = ask(repeating, body, **{"idempotency-key": "k"})
    again = ask(repeating, body, **{"idempotency-key": "k"})
    assert (again.content, again.headers["idempotent-replayed"]) == (first.content, "true")
    cached = ask(repeating, body | {"metadata": {"user_id": "another"}, "service_tier": "auto"})
    assert (cached.content, cached.headers["x-inferd-cache"]) == (first.content, "hit")
    assert len(repeating.router.streams) == 1
    assert ask(repeating, body | {"max_tokens": 51}).headers["x-inferd-cache"] == "miss"


# -- the unmodified client ---------------------------------------------------------------------


@pytest.fixture
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_the_clients_stream_ends_with_the_message(server: Running, client: anthropic.Anthropic) -> None:
    server.router.script = says(*THOUGHT)
    tools: Any = [WEATHER]
    with client.messages.stream(model="tiny", max_tokens=50, tools=tools, messages=HI) as stream:  # type: ignore[arg-type]
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens == 6
    assert message.usage.cache_read_input_tokens == 4


def test_the_clients_errors_are_of_their_kinds(server: Running, client: anthropic.Anthropic) -> None:
    def refused(error: type[anthropic.APIStatusError], cause: Callable[[], object]) -> anthropic.APIStatusError:
        with pytest.raises(error) as caught:
            cause()
        assert caught.value.request_id
        return caught.value

    refused(anthropic.NotFoundError, lambda: client.messages.create(model="no", max_tokens=5, messages=HI))  # type: ignore[arg-type]
    refused(anthropic.BadRequestError, lambda: client.messages.create(model="tiny", max_tokens=0, messages=HI))  # type: ignore[arg-type]
    server.router.refusal = Overloaded("Full.")
    refused(anthropic.APIStatusError, lambda: client.messages.create(model="tiny", max_tokens=5, messages=HI))  # type: ignore[arg-type]


def test_the_clients_lists_and_counts(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_input_tokens == 128
    assert client.messages.count_tokens(model="tiny", messages=HI).input_tokens == 2  # type: ignore[arg-type]


def test_the_clients_tool_runner_runs_to_the_end(server: Running, client: anthropic.Anthropic) -> None:
    ran: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: The city.
        """
        ran.append(city)
        return "sunny"

    def script(request: GenerateRequest) -> Any:
        assert isinstance(request.prompt, Chat)
        if request.prompt.messages[-1]["role"] == "tool":
            return says(Delta(0, f"It is {request.prompt.messages[-1]['content']}."))(request)
        return says(Delta(0, calls=(CallDelta(0, "get_weather", '{"city":"Paris"}'),)))(request)

    server.router.script = script
    runner = client.beta.messages.tool_runner(model="tiny", max_tokens=50, tools=[get_weather], messages=HI)  # type: ignore[arg-type]
    answer = runner.until_done()
    assert ran == ["Paris"]
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "It is sunny."
