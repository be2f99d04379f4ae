"""Bad schemas, patterns, grammars and tools through a whole server, in every dialect of texts: each is a 400 in the form
and with the field of the dialect, in bounded time, and a valid request of another client is answered meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import openai
import pytest
from tests.gateway.grpc.running import text_request, unary
from tests.scripted import Rule
from tests.scripted.serving import ScriptedServer, serving
from tests.stopwatch import Stopwatch
from tests.tiers import THOROUGH, sample

MOST_S = 20.0  # of one refusal: far above the limits of its parts, for a machine that is busy
ASK = [{"role": "user", "content": "hi"}]
RULES = [
    Rule("call odd with a", '<tool_call>\n{"name": "odd", "arguments": {"x": "a"}}\n</tool_call>'),
    Rule("call odd with b", '<tool_call>\n{"name": "odd", "arguments": {"x": "b"}}\n</tool_call>'),
    Rule("hi|result", None),
    Rule("hello", "Hello."),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder: Path = tmp_path_factory.mktemp("forms")
    with serving(folder / "served", RULES, data_dir=folder / "data", has_grpc=True) as started:
        yield started


@pytest.fixture(scope="module")
def http(server: ScriptedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def channel(server: ScriptedServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc) as opened:
        yield opened


class Told(NamedTuple):
    """An error as its dialect says it. ``param`` is empty where the dialect has no such field."""

    status: int
    message: str
    param: str


def posted(http: httpx.Client, path: str, body: dict[str, Any]) -> Told:
    watch = Stopwatch()
    reply = http.post(path, json=body)
    assert watch.seconds < MOST_S
    error = reply.json().get("error", {}) if reply.status_code != 200 else {}
    if isinstance(error, str):
        return Told(reply.status_code, error, "")
    return Told(reply.status_code, error.get("message", ""), error.get("param") or "")


def chat(http: httpx.Client, fields: dict[str, Any]) -> Told:
    return posted(http, "/v1/chat/completions", {"model": "scripted", "messages": ASK, "max_tokens": 4, **fields})


def completions(http: httpx.Client, fields: dict[str, Any]) -> Told:
    return posted(http, "/v1/completions", {"model": "scripted", "prompt": "hi", "max_tokens": 4, **fields})


def generate(http: httpx.Client, fields: dict[str, Any]) -> Told:
    body = {"text_input": "hi", "parameters": {"max_tokens": 4, **fields}}
    return posted(http, "/v2/models/scripted/generate", body)


def generate_stream(http: httpx.Client, fields: dict[str, Any]) -> Told:
    body = {"text_input": "hi", "parameters": {"max_tokens": 4, **fields}}
    return posted(http, "/v2/models/scripted/generate_stream", body)


def responses(http: httpx.Client, fields: dict[str, Any]) -> Told:
    return posted(http, "/v1/responses", {"model": "scripted", "input": "hi", "max_output_tokens": 16, **fields})


def messages(http: httpx.Client, fields: dict[str, Any]) -> Told:
    return posted(http, "/v1/messages", {"model": "scripted", "messages": ASK, "max_tokens": 4, **fields})


def over_grpc(channel: grpc.Channel, fields: dict[str, Any]) -> Told:
    message = text_request("hi")
    message.model_name = "scripted"
    options = message.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    options.contents.bytes_contents.append(json.dumps({"max_tokens": 4, **fields}).encode())
    try:
        unary(channel, "ModelInfer", message, timeout=60)
    except grpc.RpcError as error:
        is_refusal = error.code() == grpc.StatusCode.INVALID_ARGUMENT
        return Told(400 if is_refusal else 500, error.details() or "", "")
    return Told(200, "", "")


def still_answered(server: ScriptedServer) -> None:
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=60) as client:
        answer = client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hello"}])
    assert answer.choices[0].message.content == "Hello."


# -- patterns, grammars and schemas ------------------------------------------------------------

FORMS = [
    ({"guided_regex": "a(?=b)"}, "guided_regex", "at line 1, column 2, before '(?=b)': a look-ahead"),
    ({"structured_outputs": {"regex": r"(a)\1"}}, "structured_outputs.regex", "a back-reference"),
    ({"response_format": {"type": "regex", "value": "(a"}}, "response_format.value", "the group is not closed"),
    ({"guided_grammar": "start: foo"}, "guided_grammar", "at line 1, column 8, before 'foo': 'foo' is not defined"),
    ({"grammar": 'root ::= "a" b'}, "grammar", "at line 1, column 14, before 'b': the rule 'b' is not defined"),
    ({"grammar": 'start: "a" %json {"type": "null"}'}, "grammar", "%json is not supported in a grammar"),
    ({"structured_outputs": {"grammar": "start: @frame"}}, "structured_outputs.grammar", "no grammar '@frame'"),
    ({"guided_json": {"type": "string", "pattern": "(?!x)"}}, "guided_json", "at /pattern: "),
    ({"guided_json": {"patternProperties": {"f.*": True, "b.*": False}}}, "guided_json", "at /patternProperties: "),
    ({"guided_json": {"const": [1]}, "guided_whitespace_pattern": "x*"}, "guided_json", "white space"),
    ({"guided_json": {"items": {"$ref": "https://example.com"}}}, "guided_json", "at /items/$ref: "),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "lead back to it"),
    ({"guided_json": {"properties": {"a": {"type": "text"}}}}, "guided_json", "at /properties/a/type: "),
    ({"guided_json": {"enum": [f"x{n}" for n in range(6_000)]}}, "guided_json", "at /enum: the list has 6000 members"),
    ({"guided_choice": []}, "guided_choice", "is empty"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "told"), FORMS)
def test_a_bad_form_is_told_alike_in_the_dialects_of_texts(
    http: httpx.Client, channel: grpc.Channel, fields: dict[str, Any], param: str, told: str
) -> None:
    for ask in (chat, completions, generate, generate_stream):
        error = ask(http, fields)
        assert error.status == 400
        assert error.message.startswith(param)
        assert told in error.message
        assert error.param == ("" if "generate" in ask.__name__ else param)
    error = over_grpc(channel, fields)
    assert error.status == 400
    assert told in error.message


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"guided_regex": "x{3}"}, "xxx"),
        ({"grammar": 'root ::= "x" y\ny ::= "\\u00e9"'}, "xé"),
        ({"guided_grammar": 'start: "x" "y"'}, "xy"),
        ({"guided_json": {"const": {"a": [1]}}, "structured_outputs": None}, '{"a": [1]}'),
        ({"guided_choice": ["yes"]}, "yes"),
    ],
)
def test_a_form_binds_texts_over_rest_and_grpc(
    http: httpx.Client, channel: grpc.Channel, fields: dict[str, Any], text: str
) -> None:
    # Many, because a model that follows no script writes much of the white space that a form allows.
    parameters = {"max_tokens": 1000, **{name: value for name, value in fields.items() if value is not None}}
    body = {"text_input": "hi", "parameters": parameters}
    reply = http.post("/v2/models/scripted/generate", json=body).json()
    said = [reply["text_output"]]
    stream = http.post("/v2/models/scripted/generate_stream", json=body).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    said.append("".join(event["text_output"] for event in events))
    message = text_request("hi")
    message.model_name = "scripted"
    options = message.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    options.contents.bytes_contents.append(json.dumps(parameters).encode())
    answer = unary(channel, "ModelInfer", message, timeout=60)
    (output,) = answer.outputs
    raw = output.contents.bytes_contents[0] if output.contents.bytes_contents else answer.raw_output_contents[0][4:]
    said.append(bytes(raw).decode())
    if text.startswith("{"):
        assert [json.loads(each) for each in said] == [json.loads(text)] * 3
    else:
        assert said == [text] * 3


SCHEMAS_OF_TEXTS: list[tuple[Any, dict[str, Any]]] = [
    (responses, {"text": {"format": {"type": "json_schema", "name": "x", "schema": "SCHEMA"}}}),
    (messages, {"output_config": {"format": {"type": "json_schema", "schema": "SCHEMA"}}}),
    (chat, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "SCHEMA"}}}),
]


def filled(value: Any, schema: Any) -> Any:
    if value == "SCHEMA":
        return schema
    if isinstance(value, dict):
        return {name: filled(inner, schema) for name, inner in value.items()}
    return [filled(inner, schema) for inner in value] if isinstance(value, list) else value


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BAD_SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}, "at /properties/a/pattern: "),
    ({"type": "object", "patternProperties": {"f.*": {"type": "null"}, "b.*": {}}}, "at /patternProperties: "),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "at /properties/a/$ref: "),
    ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, "at /properties/a: "),
    ({"type": "object", "properties": {"a": {"enum": list(range(6_000))}}}, "at /properties/a/enum: "),
    (nested(90), "the JSON is nested over 100 levels"),
    ({"type": "object", "properties": {"a": {"allOf": [{"anyOf": [{"required": [f"{n}{m}"]} for n in range(9)]} for m in range(9)]}}},
     "too many to enforce"),
    ({"type": "object", "properties": {"a": {"type": "text"}}}, "at /properties/a/type: "),
    ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "told"), BAD_SCHEMAS)
def test_a_bad_schema_is_told_with_its_pointer_in_every_dialect(
    http: httpx.Client, server: ScriptedServer, schema: Any, told: str
) -> None:
    for ask, fields in SCHEMAS_OF_TEXTS:
        error = ask(http, filled(fields, schema))
        assert error.status == 400
        assert told in error.message
        assert ".schema" in (error.param or error.message)


FORCED: list[tuple[Any, dict[str, Any], str]] = [
    (
        chat,
        {"tools": [{"type": "function", "function": {"name": "t", "parameters": "SCHEMA"}}], "tool_choice": "required"},
        "tools[0].function.parameters",
    ),
    (
        chat,
        {
            "tools": [{"type": "function", "function": {"name": "t", "parameters": "SCHEMA"}}],
            "tool_choice": {"type": "function", "function": {"name": "t"}},
        },
        "tools[0].function.parameters",
    ),
    (
        chat,
        {"tools": [{"type": "function", "function": {"name": "t", "parameters": "SCHEMA", "strict": True}}]},
        "tools[0].function.parameters",
    ),
    (
        responses,
        {"tools": [{"type": "function", "name": "t", "parameters": "SCHEMA"}], "tool_choice": "required"},
        "tools[0].parameters",
    ),
    (responses, {"tools": [{"type": "function", "name": "t", "parameters": "SCHEMA", "strict": True}]}, "tools[0].parameters"),
    (messages, {"tools": [{"name": "t", "input_schema": "SCHEMA"}], "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
    (
        messages,
        {"tools": [{"name": "t", "input_schema": "SCHEMA"}], "tool_choice": {"type": "tool", "name": "t"}},
        "tools[0].input_schema",
    ),
    (messages, {"tools": [{"name": "t", "input_schema": "SCHEMA", "strict": True}]}, "tools[0].input_schema"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "told"), [BAD_SCHEMAS[0], *(pytest.param(*one, marks=THOROUGH) for one in BAD_SCHEMAS[1:])]
)
def test_a_tool_that_must_be_called_needs_a_schema_that_is_enforced(
    http: httpx.Client, server: ScriptedServer, schema: Any, told: str
) -> None:
    for ask, fields, param in FORCED:
        error = ask(http, filled(fields, schema))
        assert error.status == 400
        assert error.message.startswith(param)
        assert told in error.message
        assert error.param in ("", param)


# -- auto calls of tools whose schemas are not enforced -----------------------------------------

ODD = {
    "type": "object",
    "properties": {"x": {"type": "string", "pattern": "^(?=a)a$"}},
    "required": ["x"],
}


@pytest.mark.parametrize("streams", [False, True])
def test_an_auto_call_of_such_a_tool_is_sent_marked_and_counted(http: httpx.Client, streams: bool) -> None:
    def unmatched() -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("inferd_unmatched_calls_total{"))

    bodies: list[tuple[str, dict[str, Any], str]] = [
        (
            "/v1/chat/completions",
            {"messages": ["ASK"], "tools": [{"type": "function", "function": {"name": "odd", "parameters": ODD}}]},
            "tools[0].function.parameters",
        ),
        (
            "/v1/responses",
            {"input": ["ASK"], "tools": [{"type": "function", "name": "odd", "parameters": ODD, "strict": False}]},
            "tools[0].parameters",
        ),
        (
            "/v1/messages",
            {"messages": ["ASK"], "tools": [{"name": "odd", "input_schema": ODD}], "max_tokens": 99},
            "tools[0].input_schema",
        ),
    ]
    for path, body, field in bodies:
        for letter, count in (("a", 0), ("b", 1)):
            asked = {"role": "user", "content": f"call odd with {letter}"}
            filled_body = {name: [asked] if value == ["ASK"] else value for name, value in body.items()}
            before = unmatched()
            reply = http.post(path, json={"model": "scripted", **filled_body, "stream": streams})
            assert reply.status_code == 200, reply.text
            assert reply.headers["x-inferd-unenforced-params"] == field
            assert unmatched() - before == count
            assert "odd" in reply.text
    fine = {"type": "object", "properties": {"x": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "odd", "parameters": fine}}]
    asked = {"role": "user", "content": "call odd with a"}
    reply = http.post("/v1/chat/completions", json={"model": "scripted", "messages": [asked], "tools": tools})
    assert "x-inferd-unenforced-params" not in reply.headers


# -- tools, conversations and parts ------------------------------------------------------------


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


OK = {"type": "object"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "result"}
CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}

REQUESTS: list[tuple[Any, dict[str, Any], str, str]] = [
    (chat, {"tools": [function(name="bad name!", parameters=OK)]}, "tools[0].function.name", "characters"),
    (chat, {"tools": [function(name="x" * 129, parameters=OK)]}, "tools[0].function.name", "128"),
    (chat, {"tools": [function(name="f"), function(name="f")]}, "tools[1].function.name", "tools[0] has"),
    (chat, {"tools": [function(name="f", parameters=[])]}, "tools[0].function.parameters", "object"),
    (chat, {"tools": [function(name="f", parameters={"type": "string"})]}, "tools[0].function.parameters", "at /type"),
    (chat, {"tools": [{"type": "function", "function": "f"}]}, "tools[0].function", "object"),
    (chat, {"tools": "f"}, "tools", "array"),
    (chat, {"tools": [{"type": "of_tomorrow"}]}, "tools[0].type", "function"),
    (chat, {"tool_choice": "required"}, "tool_choice", "tools is empty"),
    (chat, {"tools": [function(name="f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name",
     "the tools are f"),
    (chat, {"messages": [RESULT]}, "messages[0].role", "no assistant message"),
    (chat, {"messages": [*ASK, CALL, RESULT]}, "messages[2].tool_call_id", "no call"),
    (chat, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type", "image_url"),
    (chat, {"messages": [{"role": "user", "content": [AUDIO]}]}, "messages[0].content[0].type", "input_audio"),
    (chat, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "king"),
    (chat, {"messages": []}, "messages", "empty"),
    (responses, {"tools": [{"type": "function", "name": "bad name!"}]}, "tools[0].name", "characters"),
    (responses, {"tools": [{"type": "function", "name": "f"}] * 2}, "tools[1].name", "tools[0]"),
    (responses, {"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "tools[0].parameters", "at /type"),
    (responses, {"tools": [{"type": "function", "name": "f", "parameters": "x"}]}, "tools[0].parameters", "object"),
    (responses, {"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "g"),
    (responses, {"tool_choice": "required"}, "tool_choice", "tool"),
    (responses, {"input": [{"type": "function_call_output", "call_id": "c1", "output": "x"}]}, "input[0]", "call"),
    (responses, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, "input[0].content[0]",
     "input_image"),
    (responses, {"input": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "input[0].content[0]",
     "input_audio"),
    (responses, {"input": [{"role": "king", "content": "x"}]}, "input[0].role", "king"),
    (responses, {"text": {"format": {"type": "of_tomorrow"}}}, "text.format.type", "of_tomorrow"),
    (messages, {"tools": [{"name": "bad name!", "input_schema": OK}]}, "tools[0].name", "characters"),
    (messages, {"tools": [{"name": "f", "input_schema": OK}] * 2}, "tools[1].name", "names must differ"),
    (messages, {"tools": [{"name": "f"}]}, "tools[0].input_schema", "missing"),
    (messages, {"tools": [{"name": "f", "input_schema": {"type": "null"}}]}, "tools[0].input_schema", "at /type"),
    (messages, {"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema", "object"),
    (messages, {"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name", "g"),
    (messages, {"tool_choice": {"type": "any"}}, "tool_choice", "no tool"),
    (messages, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "x"}]}]},
     "messages[0].content[0]", "tool_use"),
    (messages, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]", "image"),
    (messages, {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0]", "document"),
    (messages, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "king"),
    (messages, {"messages": []}, "messages", "empty"),
    (completions, {"tools": [function(name="f")]}, "tools", "tools"),
    (completions, {"prompt": [{"type": "image_url"}]}, "prompt", "prompt"),
    (generate, {"tools": [function(name="f")]}, "", "tools"),
    (generate, {"n": 2}, "", "parameters.n"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "fields", "param", "told"), REQUESTS)
def test_a_bad_request_names_the_field_of_its_dialect(
    http: httpx.Client, ask: Any, fields: dict[str, Any], param: str, told: str
) -> None:
    error = ask(http, fields)
    assert error.status == 400, error
    assert param in error.message or error.param.startswith(param)
    assert error.param == "" or error.param.startswith(param)
    assert told in error.message


def test_decisions_name_their_fields(http: httpx.Client) -> None:
    asked = {"type": "predicate", "instructions": "Is it so?"}
    for fields, param in (
        ({"questions": []}, "questions"),
        ({"questions": [{"type": "of_tomorrow", "instructions": "x"}]}, "questions[0].type"),
        ({"questions": [{"type": "choice", "instructions": "x", "choices": []}]}, "questions[0].choices"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}], "questions": [asked]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "king", "content": "x"}], "questions": [asked]}, "input[0].role"),
    ):
        error = posted(http, "/v1/decisions", {"model": "scripted", "input": "hi", **fields})
        assert error.status == 400, fields
        assert error.param.startswith(param)


def test_a_call_of_a_tool_that_the_request_does_not_have_is_history(http: httpx.Client) -> None:
    """Agents change their tools between turns, so the calls of the history may be of others."""
    history = [*ASK, CALL, {**RESULT, "tool_call_id": "c2"}]
    assert chat(http, {"messages": history}).status == 200
    assert chat(http, {"messages": history, "tools": [function(name="g")]}).status == 200


def test_a_response_that_is_not_there_is_named(http: httpx.Client) -> None:
    error = responses(http, {"previous_response_id": "resp_of_another_tenant"})
    assert error.status in (400, 404)
    assert error.param == "previous_response_id"


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_several_choices_with_streamed_tools_are_told_apart(server: ScriptedServer, tool_choice: Any) -> None:
    """Each part of a call names its choice, and each choice ends once."""
    parameters = {
        "type": "object",
        "properties": {"x": {"enum": ["a", "b"]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    tools: Any = [{"type": "function", "function": {"name": "t", "parameters": parameters}}]
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=60) as client:
        stream = client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "hi"}], tools=tools, tool_choice=tool_choice, n=3,
            stream=True, temperature=1, max_tokens=120, parallel_tool_calls=False,
        )  # fmt: skip
        arguments, ends = dict[int, str](), list[tuple[int, str]]()
        for chunk in stream:
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or ():
                    assert call.function is not None
                    arguments[choice.index] = arguments.get(choice.index, "") + (call.function.arguments or "")
                if choice.finish_reason is not None:
                    ends.append((choice.index, choice.finish_reason))
    assert sorted(index for index, _ in ends) == [0, 1, 2]
    for index, reason in ends:
        if reason == "tool_calls":
            assert json.loads(arguments[index])["x"] in ("a", "b")
    if tool_choice == "required":
        assert arguments.keys() == {0, 1, 2}


# -- bombs, beside a client that asks for nothing special ---------------------------------------


WIDE = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(8_000)}}
BOMBS: dict[str, Any] = {
    "many members": WIDE,
    "few of many members": {"maxProperties": 3, **WIDE},
    "all subsets": {
        "type": "object",
        "anyOf": [{"allOf": [{"not": {"required": [f"{n}"]}}, {"minProperties": n}]} for n in range(150)],
    },
    "deep": nested(300),
}
GRAMMARS = ("start: " + "(" * 9_000, 'start: "a"{0,99999}{0,99999}', "root ::= " + '"a" | ' * 20_000 + '"b"')


@THOROUGH
@pytest.mark.parametrize("bomb", sample([*BOMBS, "grammars"], "all subsets", "deep", "grammars"))
def test_bombs_of_every_dialect_keep_no_other_client_waiting(
    http: httpx.Client, server: ScriptedServer, bomb: str
) -> None:
    results: list[Told] = []

    def ask_all() -> None:
        if bomb in BOMBS:
            results.extend(ask(http, filled(fields, BOMBS[bomb])) for ask, fields in SCHEMAS_OF_TEXTS)
            results.extend(ask(http, filled(fields, BOMBS[bomb])) for ask, fields, _ in FORCED[::3])
            return
        for grammar in GRAMMARS:
            results.extend(ask(http, {"guided_grammar": grammar}) for ask in (chat, generate))
        results.append(chat(http, {"guided_regex": "(a{1000}){1000}"}))

    flood = threading.Thread(target=ask_all)
    flood.start()
    times: list[float] = []
    while flood.is_alive() or not times:
        watch = Stopwatch()
        still_answered(server)
        times.append(watch.seconds)
    flood.join()
    assert {told.status for told in results} <= {200, 400}
    assert all(told.message for told in results if told.status == 400)
    assert all(len(told.message) < 2_100 for told in results)
    assert max(times) < MOST_S
    assert "Traceback" not in server.log()
