"""The Responses API over real sockets, with answers by script: items, events, echo, policies and refusals."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from tests.gateway.fakes import FakeRouter, Running, logprob, post, running
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from inferd.answer_form import AnswerForm, JsonSchema, ToolUse
from inferd.errors import InternalError, Overloaded, WorkerDied
from inferd.types import CallDelta, Chat, Delta, End, GenerateRequest, Output, PromptReport, Usage

JSON = dict[str, Any]
SCHEMA: JSON = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: JSON = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
PATCH: JSON = {"type": "custom", "name": "apply_patch", "description": "Change files."}
ASKED = Usage(prompt_tokens=10, completion_tokens=20, cached_tokens=4, reasoning_tokens=5)
_events: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def says(*deltas: Delta, usage: Usage = ASKED, reason: str = "stop") -> Any:
    """A script that says the parts, one output each."""

    def script(request: GenerateRequest) -> list[Output]:
        report = PromptReport(usage.prompt_tokens, usage.cached_tokens)
        last = Delta(0, finish_reason=reason)  # type: ignore[arg-type]
        outputs = [Output(request.id, (delta,)) for delta in deltas]
        outputs.append(Output(request.id, (last,), None, End("done", usage)))
        first = outputs[0]
        outputs[0] = Output(first.request_id, first.deltas, report, first.end)
        return outputs

    return script


def ask(server: Running, body: JSON | None = None, path: str = "/v1/responses", **headers: str) -> httpx.Response:
    return post(server, path, {"model": "tiny", "input": "hi"} | (body or {}), **headers)


def told(server: Running, body: JSON | None = None, **headers: str) -> JSON:
    reply = ask(server, body, **headers)
    assert reply.status_code == 200, reply.text
    Response.model_validate_json(reply.content, strict=True)
    answer: JSON = reply.json()
    return answer


def events(reply: httpx.Response) -> list[JSON]:
    """The events of a stream, in the order of their numbers; the name of each is its type."""
    found: list[JSON] = []
    for frame in reply.text.removesuffix("data: [DONE]\n\n").removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(found)
        _events.validate_python(event)
        found.append(event)
    return found


def folded(found: list[JSON]) -> JSON:
    """The response that a stream's events make. Checks their order."""
    created, in_progress, *middle, last = found
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert created["response"]["status"] == "in_progress"
    output: list[JSON] = []
    item: JSON | None = None
    for event in middle:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert item is None
            assert event["output_index"] == len(output)
            item = event["item"]
            assert item["status"] == "in_progress"
            continue
        assert item is not None
        assert event["output_index"] == len(output)
        if kind == "output_item.done":
            assert {**item, "status": ""} == {**event["item"], "status": ""}
            output.append(event["item"])
            item = None
            continue
        assert event["item_id"] == item["id"]
        match kind:
            case "content_part.added":
                item["content"].append(event["part"])
            case "content_part.done":
                assert item["content"][event["content_index"]] == event["part"]
            case "output_text.delta":
                part = item["content"][event["content_index"]]
                part["text"] += event["delta"]
                part["logprobs"] += event["logprobs"]
            case "output_text.done":
                part = item["content"][event["content_index"]]
                assert (part["text"], part["logprobs"]) == (event["text"], event["logprobs"])
            case "reasoning_text.delta":
                item["content"][event["content_index"]]["text"] += event["delta"]
            case "reasoning_text.done":
                assert item["content"][event["content_index"]]["text"] == event["text"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])
            case "custom_tool_call_input.delta":
                item["input"] += event["delta"]
            case "custom_tool_call_input.done":
                assert item["input"] == event["input"]
            case _:
                raise AssertionError(kind)
    assert item is None
    response: JSON = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert response["output"] == output
    assert {key: response[key] for key in created["response"] if key not in _LATER} == {
        key: value for key, value in created["response"].items() if key not in _LATER
    }
    return response


_LATER = ("status", "output", "usage", "completed_at", "incomplete_details", "error")


def without_ids(response: JSON) -> JSON:
    items = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]]
    return response | {"id": "", "created_at": 0, "completed_at": 0, "output": items}


def chat_of(server: Running) -> Chat:
    prompt = server.router.last.prompt
    assert isinstance(prompt, Chat)
    return prompt


def form_of(server: Running) -> AnswerForm:
    form = server.router.last.form
    assert form is not None
    return form


# -- answers -----------------------------------------------------------------------------------

THOUGHT = (
    Delta(0, reasoning="I thi"),
    Delta(0, reasoning="nk"),
    Delta(0, "Let me"),
    Delta(0, " see.", calls=(CallDelta(0, "get_weather"),)),
    Delta(0, calls=(CallDelta(0, None, '{"city":'),)),
    Delta(0, calls=(CallDelta(0, None, '"Paris"}'), CallDelta(1, "apply_patch", '{"input": "a\\n'))),
    Delta(0, calls=(CallDelta(1, None, 'b"}'), CallDelta(2, "get_weather"))),
)


def test_reasoning_text_and_calls_are_items(server: Running) -> None:
    server.router.script = says(*THOUGHT)
    response = told(server, {"tools": [WEATHER, PATCH]})
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    reasoning, message, first, second, third = response["output"]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I think"}]
    assert message["content"] == [
        {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []},
    ]
    assert (first["type"], first["name"], first["arguments"]) == ("function_call", "get_weather", '{"city":"Paris"}')
    assert (second["type"], second["name"], second["input"]) == ("custom_tool_call", "apply_patch", "a\nb")
    assert third["arguments"] == "{}"
    assert len({item["id"] for item in response["output"]}) == 5
    assert len({item["call_id"] for item in (first, second, third)}) == 3
    assert all(item["status"] == "completed" for item in response["output"])
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 20,
        "output_tokens_details": {"reasoning_tokens": 5},
        "total_tokens": 30,
    }


PIECES = st.lists(st.text(alphabet='ab {}"\\é😀\n', min_size=1, max_size=4), max_size=4)
PARTS = st.lists(
    st.one_of(
        st.tuples(st.just("reasoning"), PIECES),
        st.tuples(st.just("text"), PIECES),
        st.tuples(st.sampled_from(["get_weather", "apply_patch", "files__read"]), PIECES),
    ),
    max_size=5,
)


def deltas_of(parts: list[tuple[str, list[str]]], cut: int) -> list[Delta]:
    deltas: list[Delta] = []
    calls = 0
    for kind, pieces in parts:
        if kind == "reasoning":
            deltas += [Delta(0, reasoning=piece) for piece in pieces]
        elif kind == "text":
            deltas += [Delta(0, piece, (), (logprob(piece, top=2),)) for piece in pieces]
        else:
            key = "input" if kind == "apply_patch" else "city"
            arguments = json.dumps({key: "".join(pieces)})
            deltas.append(Delta(0, calls=(CallDelta(calls, kind, arguments[:cut]),)))
            deltas.append(Delta(0, calls=(CallDelta(calls, None, arguments[cut:]),)))
            calls += 1
    return deltas


@given(parts=PARTS, cut=st.integers(0, 40), reason=st.sampled_from(["stop", "length"]), top=st.sampled_from([None, 1]))
def test_a_stream_equals_the_whole_answer(
    shared_server: Running, parts: list[tuple[str, list[str]]], cut: int, reason: str, top: int | None
) -> None:
    server = shared_server.reset()
    server.router.script = says(*deltas_of(parts, cut), reason=reason)
    read: JSON = {"type": "function", "name": "read", "parameters": SCHEMA}
    namespace: JSON = {"type": "namespace", "name": "files", "description": "Files.", "tools": [read]}
    body: JSON = {"tools": [WEATHER, PATCH, namespace], "top_logprobs": top, "metadata": {"a": "b"}}
    whole = told(server, body)
    assert whole["status"] == ("incomplete" if reason == "length" else "completed")
    streamed = folded(events(ask(server, body | {"stream": True})))
    assert without_ids(streamed) == without_ids(whole)
    texts = ["".join(pieces) for kind, pieces in parts if kind == "apply_patch"]
    assert [item["input"] for item in whole["output"] if item["type"] == "custom_tool_call"] == texts
    said = "".join("".join(pieces) for kind, pieces in parts if kind == "text")
    assert Response.model_validate(whole).output_text == said
    for item in whole["output"]:
        if item.get("name") == "read":
            assert item["namespace"] == "files"
    results = [
        {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "done"}
        for item in whole["output"]
        if "call_id" in item
    ]
    told(server, {"input": [{"role": "user", "content": "hi"}, *whole["output"], *results]})
    replayed = [m for m in chat_of(server).messages if m["role"] == "assistant"]
    assert "".join(m["content"].replace("\n", "") for m in replayed) == said.replace("\n", "")
    names = [call["function"]["name"] for m in replayed for call in m.get("tool_calls", ())]
    assert names == [kind for kind, _ in parts if kind not in ("text", "reasoning")]


def test_an_answer_without_text_and_calls_has_an_empty_message(server: Running) -> None:
    server.router.script = says(Delta(0, reasoning="Hm."))
    reasoning, message = told(server)["output"]
    assert (reasoning["type"], message["type"]) == ("reasoning", "message")
    assert message["content"][0]["text"] == ""


def test_an_answer_that_is_cut_off_is_incomplete(server: Running) -> None:
    server.router.script = says(Delta(0, "Hel"), reason="length")
    response = told(server, {"max_output_tokens": 16})
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert response["completed_at"] is None


def test_a_failure_within_a_stream_is_its_last_event(server: Running) -> None:
    def script(request: GenerateRequest) -> list[Output | Any]:
        return [Output(request.id, (Delta(0, "Hel"),), PromptReport(3)), WorkerDied("The worker died.")]

    server.router.script = script
    response = folded(events(ask(server, {"stream": True})))
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "The worker died."}
    assert (response["output"][0]["status"], response["output"][0]["content"][0]["text"]) == ("incomplete", "Hel")
    reply = ask(server)
    assert (reply.status_code, reply.json()["error"]["type"]) == (503, "server_error")


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_output_has_a_status(server: Running, stream: bool) -> None:
    server.router.script = lambda request: [InternalError("No.")]
    assert ask(server, {"stream": stream}).status_code == 500
    server.router.refusal = Overloaded("Full.")
    assert ask(server, {"stream": stream}).status_code == 503


def test_log_probabilities_are_those_of_the_text(server: Running) -> None:
    told_of = (logprob("Hm", top=3),), (logprob("Hel", top=3),), (logprob("lo", top=3),)
    server.router.script = says(
        Delta(0, reasoning="Hm", logprobs=told_of[0]),
        Delta(0, "", logprobs=told_of[1]),
        Delta(0, "Hello", logprobs=told_of[2]),
    )
    response = told(server, {"include": ["message.output_text.logprobs"], "top_logprobs": 2})
    assert server.router.last.sampling.logprobs == 2
    found = response["output"][1]["content"][0]["logprobs"]
    assert [(one["token"], len(one["top_logprobs"])) for one in found] == [("Hel", 2), ("lo", 2)]
    assert told(server)["output"][1]["content"][0]["logprobs"] == []
    assert server.router.last.sampling.logprobs is None


def test_reasoning_comes_back_without_its_content(server: Running) -> None:
    server.router.script = says(Delta(0, reasoning="Hm, é."), Delta(0, "Hello"))
    response = told(server, {"include": ["reasoning.encrypted_content"], "store": False})
    reasoning, message = response["output"]
    del reasoning["content"]
    told(server, {"input": [reasoning, message, {"role": "user", "content": "And?"}]})
    assert chat_of(server).messages[0] == {"role": "assistant", "content": "Hello", "reasoning_content": "Hm, é."}
    foreign = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    reply = ask(server, {"input": [foreign, message, {"role": "user", "content": "And?"}]})
    assert reply.headers["x-inferd-ignored-params"] == "input.status,input.encrypted_content"
    told_of = {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "In short."}]}
    reply = ask(server, {"input": [told_of, foreign, message, foreign, {"role": "user", "content": "And?"}]})
    assert reply.headers["x-inferd-ignored-params"] == "input.status,input.summary,input.encrypted_content"


# -- requests ----------------------------------------------------------------------------------


def test_the_response_has_the_fields_of_its_request(server: Running) -> None:
    given: JSON = {
        "instructions": "Be brief.",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 100,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "name": "get_weather"},
        "metadata": {"a": "b"},
        "user": "u1",
        "safety_identifier": "s1",
        "prompt_cache_key": "k1",
        "truncation": "disabled",
        "top_logprobs": 1,
    }
    server.router.script = says(Delta(0, calls=(CallDelta(0, "get_weather", "{}"),)))
    response = told(
        server,
        {
            **given,
            "tools": [WEATHER],
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
            "store": False,
        },
    )
    assert {key: response[key] for key in given} == given
    assert response["reasoning"] == {"effort": "low", "summary": None}
    assert response["text"]["format"]["schema"] == SCHEMA
    assert response["tools"] == [{**WEATHER, "strict": None}]
    assert response["store"] is False
    assert (response["object"], response["model"], response["service_tier"]) == ("response", "tiny", "default")
    assert response["completed_at"] >= response["created_at"]
    sampling, form = server.router.last.sampling, form_of(server)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 100)
    assert form.constraint == JsonSchema(schema=SCHEMA, at="text.format.schema")
    assert form.tools == ToolUse(
        mode="required", names=("get_weather",), is_parallel=False, places=("tools[0].parameters",)
    )
    assert chat_of(server).template_kwargs["reasoning_effort"] == "low"


def test_the_response_has_the_sampling_of_the_model(server: Running) -> None:
    info = server.router.statuses[0].info
    assert info is not None
    server.router.statuses[0].info = msgspec.structs.replace(info, temperature=0.6, top_p=0.95)
    for stream in (False, True):
        for asked, expected in (({}, (0.6, 0.95)), ({"temperature": 0}, (0, 0.95)), ({"top_p": 1}, (0.6, 1))):
            reply = ask(server, {**asked, "stream": stream})
            response = folded(events(reply)) if stream else reply.json()
            assert (response["temperature"], response["top_p"]) == expected


def test_items_become_messages(server: Running) -> None:
    told(
        server,
        {
            "instructions": "One.",
            "input": [
                {"role": "developer", "content": "Two."},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"role": "user", "content": "b"},
                {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
                {
                    "type": "message",
                    "id": "msg",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "c", "annotations": []}],
                },
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}', "namespace": "n"},
                {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "raw"},
                {"type": "custom_tool_call_output", "call_id": "2", "output": "R2"},
                {"role": "developer", "content": "Now."},
                {
                    "type": "function_call_output",
                    "call_id": "1",
                    "output": [{"type": "input_text", "text": "R1"}],
                },
                {"role": "user", "content": "d"},
            ],
        },
    )
    assert chat_of(server).messages == [
        {"role": "system", "content": "One.\n\nTwo."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "r",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "n__f", "arguments": {"x": 1}}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": {"input": "raw"}}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "name": "n__f", "content": "R1"},
        {"role": "tool", "tool_call_id": "2", "name": "g", "content": "R2"},
        {"role": "user", "content": "<system>\nNow.\n</system>\nd"},
    ]


CALL: JSON = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
RESULT: JSON = {"type": "function_call_output", "call_id": "1", "output": "r"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [RESULT]}, "input[0].call_id"),
        ({"input": [RESULT, CALL]}, "input[0].call_id"),
        ({"input": [CALL]}, "input"),
        ({"input": [CALL, CALL, RESULT]}, "input[1].call_id"),
        ({"input": [CALL, RESULT, RESULT]}, "input[2].call_id"),
        ({"input": [{**CALL, "call_id": None}, RESULT]}, "input[0].call_id"),
        ({"input": [{**CALL, "name": ""}, RESULT]}, "input[0].name"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "1"}]}, "input[1].output"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [CALL, {**RESULT, "output": [{"type": "input_file", "file_id": "f"}]}]},
            "input[1].output[0].type",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"reasoning": {"effort": "hard"}}, "reasoning.effort"),
        ({"truncation": "middle"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]}, "tool_choice.type"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "ebnf"}}]}, "tools[0].format.syntax"),
        (
            {"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: start"}}]},
            "tools[0].format.definition",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": [{"type": "additional_tools", "role": "developer", "tools": [WEATHER]}]}, "input"),
        ({"input": [{"type": "additional_tools", "role": "developer"}]}, "input[0].tools"),
        ({"input": [{"type": "additional_tools", "role": "user", "tools": []}]}, "input[0].role"),
        (
            {"input": [{"type": "additional_tools", "role": "developer", "tools": [WEATHER, WEATHER]}]},
            "input[0].tools[1].name",
        ),
    ],
)
def test_refusals_name_the_field(server: Running, body: JSON, param: str) -> None:
    reply = ask(server, body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_conversation_of_many_items_is_checked_in_bounded_time(server: Running) -> None:
    calls = [{**CALL, "call_id": str(number)} for number in range(2_000)]
    results = [{**RESULT, "call_id": str(number)} for number in reversed(range(2_000))]
    began = time.monotonic()
    assert ask(server, {"input": [*calls, *results]}).status_code == 200
    assert [m["tool_call_id"] for m in chat_of(server).messages[1:4]] == ["0", "1", "2"]
    assert ask(server, {"input": [*calls, *results[1:]]}).json()["error"]["code"] == "missing_tool_output"
    assert ask(server, {"input": [{"role": "user", "content": "x"}] * 20_000}).status_code == 400
    assert time.monotonic() - began < 30


def test_unknown_fields_and_tools_are_dropped_and_listed(server: Running) -> None:
    body = {
        "tools": [WEATHER, {"type": "web_search"}, {"type": "local_shell"}],
        "brand_new": {"a": 1},
        "client_metadata": {},
        "context_management": [{"type": "compaction"}],
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content", "something.new"],
    }
    reply = ask(server, body)
    assert reply.status_code == 200, reply.text
    assert set(reply.headers["x-inferd-ignored-params"].split(",")) == {
        "brand_new",
        "context_management",
        "reasoning.summary",
        "text.verbosity",
        "include.something.new",
        "tools.web_search",
        "tools.local_shell",
    }
    assert [tool["function"]["name"] for tool in chat_of(server).tools or ()] == ["get_weather"]


def test_tools_of_a_namespace_are_flat_for_the_model(server: Running) -> None:
    read: JSON = {"type": "function", "name": "read", "description": "Reads.", "parameters": SCHEMA}
    inner = [read, {"type": "custom", "name": "run", "format": {"type": "text"}}]
    namespace: JSON = {"type": "namespace", "name": "files", "description": "Files.", "tools": inner}
    calls = (CallDelta(0, "files__read", "{}"), CallDelta(1, "files__run", '{"input":"x"}'), CallDelta(2, "read", "{}"))
    server.router.script = says(Delta(0, calls=calls))
    response = told(server, {"tools": [namespace, {**read, "description": None}]})
    named = [(item["type"], item.get("namespace"), item["name"]) for item in response["output"]]
    assert named == [
        ("function_call", "files", "read"),
        ("custom_tool_call", "files", "run"),
        ("function_call", None, "read"),
    ]
    functions = [tool["function"] for tool in chat_of(server).tools or ()]
    assert [function["name"] for function in functions] == ["files__read", "files__run", "read"]
    assert functions[0]["description"] == "Files.\nReads."
    assert response["tools"][0]["tools"][0]["name"] == "read"


def test_items_bring_tools_beside_those_of_the_request(server: Running) -> None:
    def bring(*tools: JSON) -> JSON:
        return {"type": "additional_tools", "role": "developer", "tools": list(tools)}

    run: JSON = {"type": "custom", "name": "run"}
    first = bring({"type": "namespace", "name": "functions", "tools": [run]}, {"type": "web_search"}, PATCH)
    second = bring({**WEATHER, "name": "apply_patch", "description": "Newer."})
    hi = {"role": "user", "content": "hi"}
    server.router.script = says(Delta(0, calls=(CallDelta(0, "functions__run", '{"input":"x"}'),)))
    reply = ask(server, {"tools": [WEATHER], "input": [first, hi, second]})
    response = reply.json()
    (item,) = response["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("custom_tool_call", "functions", "run")
    assert reply.headers["x-inferd-ignored-params"] == "tools.web_search"
    assert [tool["name"] for tool in response["tools"]] == ["get_weather"]
    functions = [tool["function"] for tool in chat_of(server).tools or ()]
    assert [function["name"] for function in functions] == ["get_weather", "functions__run", "apply_patch"]
    assert functions[2]["description"] == "Newer."
    use = form_of(server).tools
    assert use is not None
    assert use.places == (
        "tools[0].parameters",
        "input[0].tools[0].tools[0].format",
        "input[2].tools[0].parameters",
    )
    chosen = {"type": "custom", "name": "run", "namespace": "functions"}
    told(server, {"input": [first, hi], "tool_choice": chosen})
    assert chat_of(server).messages == [{"role": "user", "content": "hi"}]


def test_a_change_of_the_effort_within_a_conversation_is_listed(server: Running) -> None:
    """As Codex sends it to OpenAI's provider, once or more often."""
    update = {"type": "configuration_update", "reasoning": {"effort": "low"}}
    items = [{"role": "user", "content": "hi"}, update, CALL, RESULT, {"role": "user", "content": "go on"}, update]
    reply = ask(server, {"input": items, "reasoning": {"effort": "low", "context": "all_turns"}})
    assert reply.status_code == 200, reply.text
    listed = reply.headers["x-inferd-ignored-params"].split(",")
    assert listed.count("input.configuration_update") == 1
    assert [message["role"] for message in chat_of(server).messages] == ["user", "assistant", "tool", "user"]


def test_allowed_tools_and_custom_choices(server: Running) -> None:
    tools = [WEATHER, PATCH, {"type": "namespace", "name": "n", "description": "", "tools": [{**WEATHER, "name": "f"}]}]
    remote = {"type": "mcp", "server_label": "x"}
    allowed = [{"type": "function", "name": "f"}, {"type": "custom", "name": "apply_patch"}, remote]
    chosen = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    reply = ask(server, {"tools": tools, "tool_choice": chosen})
    assert reply.headers["x-inferd-ignored-params"] == "tool_choice.tools.server_label,tool_choice.mcp"
    assert reply.json()["tool_choice"] == chosen
    places = ("tools[0].parameters", "tools[1].format", "tools[2].tools[0].parameters")
    assert form_of(server).tools == ToolUse(names=("n__f", "apply_patch"), places=places)
    told(server, {"tools": tools, "tool_choice": {"type": "custom", "name": "apply_patch"}})
    assert form_of(server).tools == ToolUse(mode="required", names=("apply_patch",), places=places)
    told(server, {"tools": tools, "tool_choice": "none"})
    assert form_of(server).tools is None


def test_input_tokens_are_those_of_the_prompt(server: Running) -> None:
    reply = ask(server, {"instructions": "Be brief."}, path="/v1/responses/input_tokens")
    assert reply.json() == {"object": "response.input_tokens", "input_tokens": len("Be brief.hi")}


TURNS: list[JSON] = [
    {"role": "user", "content": "a" * 40},
    {"role": "assistant", "content": "b" * 40},
    {"role": "user", "content": "c" * 40},
    {**CALL, "call_id": "1"},
    {**RESULT, "output": "d" * 40},
    {**CALL, "call_id": "2"},
    {**RESULT, "call_id": "2", "output": "e" * 20},
]


@pytest.mark.parametrize(("limit", "kept"), [(400, "Sabcde"), (160, "Scde"), (120, "Sce"), (20, "Sce"), (0, "Sabcde")])
def test_truncation_leaves_out_the_oldest_messages(server: Running, limit: int, kept: str) -> None:
    info = server.router.statuses[0].info
    assert info is not None
    server.router.statuses[0].info = msgspec.structs.replace(info, max_model_len=limit)
    body: JSON = {"instructions": "S" * 10, "input": TURNS, "truncation": "auto"}
    assert told(server, body)["truncation"] == "auto"
    assert "".join(message["content"][:1] for message in chat_of(server).messages) == kept
    asked = {key: body[key] for key in ("instructions", "input", "truncation")}
    count = ask(server, asked, path="/v1/responses/input_tokens").json()["input_tokens"]
    assert count == sum(len(message["content"]) for message in chat_of(server).messages)
    told(server, {**body, "truncation": "disabled"})
    assert len(chat_of(server).messages) == 8


@pytest.mark.parametrize("name", ["gpt-5.5-codex", "codex-mini-latest", "o4-mini"])
def test_a_name_of_openais_models_stands_for_the_only_model(server: Running, name: str) -> None:
    reply = ask(server, {"model": name})
    assert reply.json()["model"] == "tiny"
    assert reply.headers["x-inferd-ignored-params"] == "model"
    assert ask(server, {"model": "octopus"}).status_code == 404
    with running(FakeRouter("one", "two")) as several:
        assert ask(several, {"model": name}).status_code == 404


REQUIRED = {
    "number": ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "created_at"),
    "text": ("id", "object", "status", "model", "truncation", "service_tier"),
    "bool": ("parallel_tool_calls", "store", "background"),
    "any": (
        *("completed_at", "incomplete_details", "previous_response_id", "instructions", "output", "error", "tools"),
        *("tool_choice", "text", "reasoning", "user", "usage", "max_output_tokens", "max_tool_calls", "metadata"),
        *("safety_identifier", "prompt_cache_key"),
    ),
}


def test_a_response_has_every_field_that_open_responses_requires(server: Running) -> None:
    response = told(server)
    kinds: dict[str, Any] = {"number": (int, float), "text": str, "bool": bool, "any": object}
    for kind, names in REQUIRED.items():
        for name in names:
            assert isinstance(response[name], kinds[kind]), name


def test_a_websocket_is_refused_so_that_codex_uses_http_at_once(server: Running) -> None:
    with pytest.raises(InvalidStatus) as refused:
        connect(server.url.replace("http://", "ws://") + "/v1/responses")
    answer = refused.value.response
    assert (answer.status_code, answer.headers["upgrade"]) == (426, "HTTP/1.1")
    assert b"/v1/responses takes no WebSocket; use POST, OPTIONS." in (answer.body or b"")


def test_codex_gets_a_list_of_models_that_it_reads(server: Running) -> None:
    listed = server.http.get(f"{server.url}/v1/models?client_version=0.169.0").json()
    assert listed["models"] == []
    assert [card["id"] for card in listed["data"]] == ["tiny"]
    assert "models" not in server.http.get(f"{server.url}/v1/models").json()


# -- OpenAI's client ---------------------------------------------------------------------------


class City(BaseModel):
    name: str


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_the_client_reads_answers_and_streams(server: Running, client: openai.OpenAI) -> None:
    server.router.script = says(*THOUGHT)
    with client.responses.stream(model="tiny", input="hi", tools=[WEATHER, PATCH]) as stream:  # type: ignore[list-item]
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Let me see."
    assert [item.type for item in final.output[2:]] == ["function_call", "custom_tool_call", "function_call"]


def test_the_client_parses_structured_answers(server: Running, client: openai.OpenAI) -> None:
    server.router.script = says(Delta(0, '{"name":"Paris"}'))
    parsed = client.responses.parse(model="tiny", input="hi", text_format=City)
    assert parsed.output_parsed == City(name="Paris")
    constraint = form_of(server).constraint
    assert isinstance(constraint, JsonSchema)
    with client.responses.stream(model="tiny", input="hi", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(name="Paris")


def test_the_client_counts_tokens_and_raises_errors(server: Running, client: openai.OpenAI) -> None:
    assert client.responses.input_tokens.count(model="tiny", input="hi").input_tokens == 2
    with pytest.raises(openai.BadRequestError, match="input is empty"):
        client.responses.create(model="tiny", input=[])
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="huge", input="hi")


def test_a_model_that_loads_is_waited_for(server: Running) -> None:
    with running(FakeRouter("tiny")) as slow:
        slow.router.statuses[0].replicas_ready = 0
        assert told(slow)["output"][0]["content"][0]["text"] == "Hello world!"
