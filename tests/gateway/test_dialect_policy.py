"""What the page says of unknown and unsupported fields, of every dialect that generates, is what the routes do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.gateway.decisions.test_decisions_api import scores
from tests.gateway.fakes import Running, post, running

from inferd.gateway.routes import ROUTES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "openai-api.md"
MESSAGES = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
    "/v1/messages": {**MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/decisions": {
        "model": "tiny",
        "input": "hi",
        "questions": [{"type": "predicate", "instructions": "It is a greeting."}],
    },
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/v1/responses/input_tokens": {"model": "tiny", "input": "hi"},
    "/api/chat": MESSAGES,
    "/api/generate": {"model": "tiny", "prompt": "hi"},
    "/generate": {"model": "tiny", "inputs": "hi"},
    "/generate_stream": {"model": "tiny", "inputs": "hi"},
    "/": {"model": "tiny", "inputs": "hi"},
    "/v2/models/{model}/generate": {"text_input": "hi"},
    "/v2/models/{model}/generate_stream": {"text_input": "hi"},
}
TOOL = {"type": "of_tomorrow", "name": "t"}
CHOICES: dict[str, Any] = {  # that name the tool, in the form of the dialect
    "/v1/messages": {"type": "tool", "name": "t"},
    "/v1/messages/count_tokens": {"type": "tool", "name": "t"},
    "/v1/responses": {"type": "function", "name": "t"},
    "/v1/responses/input_tokens": {"type": "function", "name": "t"},
}
FUNCTION = {"type": "function", "name": "t"}
CHAT_TOOLS = [{"type": "function", "function": {"name": "t"}}]
OTHER_TYPES: list[tuple[str, dict[str, Any], str]] = [  # with keys that objects of another type have
    ("/v1/chat/completions",
     {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "image_url": {"url": "u"}}]}]},
     "messages.content.image_url"),
    ("/v1/chat/completions",
     {"tools": CHAT_TOOLS, "tool_choice": {**CHAT_TOOLS[0], "x": 1, "allowed_tools": {"mode": "auto", "tools": CHAT_TOOLS}}},
     "tool_choice.x,tool_choice.allowed_tools"),
    ("/v1/chat/completions",
     {"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "t", "strict": True}}},
     "tool_choice.function.strict"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi", "refusal": "no"}]}]},
     "input.content.refusal"),
    ("/v1/responses", {"input": [{"role": "user", "content": "hi", "arguments": "{}"}]}, "input.arguments"),
    ("/v1/responses", {"tools": [{**FUNCTION, "format": {"type": "text"}}]}, "tools.format"),
    ("/v1/responses", {"tools": [{"type": "custom", "name": "t", "parameters": {"type": "object"}, "strict": True}]},
     "tools.parameters,tools.strict"),
    ("/v1/responses", {"tools": [FUNCTION], "tool_choice": {**FUNCTION, "mode": "auto", "x": 1}},
     "tool_choice.mode,tool_choice.x"),
    ("/v1/responses", {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{**FUNCTION, "x": 1}]}},
     "tool_choice.tools.x"),
    ("/v1/responses", {"text": {"format": {"type": "text", "schema": {"type": "object"}}}}, "text.format.schema"),
    ("/v1/decisions", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi", "data": {"a": 1}}]}]},
     "input.content.data"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "thinking": "h"}]}]},
     "messages.content.thinking"),
    ("/v1/messages", {"tools": [{"name": "t", "input_schema": {}}], "tool_choice": {"type": "auto", "name": "t", "x": 1}},
     "tool_choice.name,tool_choice.x"),
    ("/api/chat", {"messages": [{"role": "user", "content": "hi", "thinking": "h", "tool_name": "t"}]},
     "messages.thinking,messages.tool_name"),
    ("/v1/messages", {"thinking": {"type": "disabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
]  # fmt: skip


class Case(NamedTuple):
    path: str
    sent: dict[str, Any]
    listed: str  # the name in the header where the field is dropped
    policy: str


def rows() -> list[list[str]]:
    """The cells of the page's table."""
    table = PAGE.read_text(encoding="utf-8").partition("## Policy of the dialects")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [re.split(r"\s*\|\s*", line.strip("| ")) for line in lines]


def cases() -> Iterator[Case]:
    for route, unknown, without_effect, tool, chosen, unsupported in rows():
        path = route.strip("` ")
        choice = CHOICES.get(path, {"type": "function", "function": {"name": "t"}})
        yield Case(path, {"field_of_tomorrow": 1}, "field_of_tomorrow", unknown)
        if tool:
            sent = TOOL if chosen else {"type": TOOL["type"]}  # the name is for the choice, and a key of its own
            yield Case(path, {"tools": [sent]}, "tools.of_tomorrow", tool)
            if chosen:
                yield Case(path, {"tools": [TOOL], "tool_choice": choice}, "", chosen)
        for cell in filter(None, (without_effect, unsupported)):
            found = re.fullmatch(r"`(\{.*\})`: (\w+)", cell)
            assert found is not None, cell
            sent = json.loads(found[1])
            yield Case(path, sent, next(iter(sent)), found[2])


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as started:
        yield started


def test_every_route_that_generates_has_a_row() -> None:
    generating = {
        route.pattern for route in ROUTES if route.method == "POST" and route.operation and route.operation.generates
    }
    told = {cells[0].strip("` ") for cells in rows()}
    assert {path for path in generating if "{version}" not in path} <= told == BODIES.keys()


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.path} {json.dumps(case.sent)}")
def test_a_request_is_served_or_refused_as_the_table_says(server: Running, case: Case) -> None:
    path, body = case.path.replace("{model}", "tiny"), BODIES[case.path]
    server.reset()
    if case.path == "/v1/decisions":
        server.router.script = scores
    assert post(server, path, body).status_code == 200
    reply = post(server, path, {**body, **case.sent})
    assert case.policy in ("400", "listed")
    assert reply.status_code == (400 if case.policy == "400" else 200), reply.text
    if case.policy == "listed":
        assert reply.headers["x-inferd-ignored-params"] == case.listed


@pytest.mark.parametrize(("path", "sent", "listed"), OTHER_TYPES)
def test_a_key_of_another_type_is_listed(server: Running, path: str, sent: dict[str, Any], listed: str) -> None:
    server.reset()
    if path == "/v1/decisions":
        server.router.script = scores
    body = BODIES.get(path, {"model": "tiny"})
    reply = post(server, path, {**body, **sent})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-inferd-ignored-params"] == listed


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ({"type": "text", "json_schema": {"schema": {}}}, "json_schema"),
        ({"type": "json_object", "json_schema": {"schema": {}}}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}, "value": "x"}, "value"),
        ({"type": "regex", "value": "a", "triggers": ["<"]}, "triggers"),
    ],
)
def test_a_format_with_a_key_of_another_type_is_refused(server: Running, form: dict[str, Any], name: str) -> None:
    reply = post(server, "/v1/chat/completions", {**MESSAGES, "response_format": form})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, f"response_format.{name}")
    assert f'where response_format.type is "{form["type"]}"' in error["message"]


@pytest.mark.parametrize(
    ("form", "place"),
    [
        ({"type": "json_schema", "schema": {"type": "object"}}, 'response_format.json_schema.schema or response_format.type "json_object"'),
        ({"type": "json_schema", "triggers": ["<"]}, 'send response_format.type "structural_tag" with it'),
    ],
)  # fmt: skip
def test_the_refusal_of_a_key_says_where_it_has_an_effect(server: Running, form: dict[str, Any], place: str) -> None:
    reply = post(server, "/v1/chat/completions", {**MESSAGES, "response_format": form})
    assert place in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("tag", [5, ["x"], {"type": 5}])
def test_json_of_a_free_form_that_has_the_tag_of_a_type_is_no_object_of_it(
    server: Running, path: str, tag: object
) -> None:
    block = {"type": "tool_result", "tool_use_id": "c", "content": {"type": tag, "content": [{"type": tag}]}}
    reply = post(server, path, {**BODIES[path], "messages": [{"role": "user", "content": [block]}]})
    assert reply.status_code == 400, reply.text
