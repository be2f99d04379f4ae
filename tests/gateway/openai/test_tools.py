"""The fields that say which tools may be called and how the model reasons reach the worker, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
from tests.gateway.fakes import Running, post

from inferd.answer_form import ToolUse
from inferd.types import Chat

HI = [{"role": "user", "content": "hi"}]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolUse()),
        ("auto", ToolUse()),
        ("none", None),
        ("required", ToolUse(mode="required")),
        (named("g"), ToolUse(mode="required", names=("g",))),
        (allowed("auto", "f", "g", "f"), ToolUse(names=("f", "g"))),
        (allowed("required", "g"), ToolUse(mode="required", names=("g",))),
    ],
)
def test_tool_choice_reaches_the_worker(server: Running, choice: object, expected: ToolUse | None) -> None:
    body = {"messages": HI, "tools": [tool("f"), tool("g")], "tool_choice": choice}
    assert post(server, "/v1/chat/completions", body).status_code == 200
    form = server.router.last.form
    assert form is not None
    assert form.tools == expected
    prompt = server.router.last.prompt
    assert isinstance(prompt, Chat)
    assert prompt.tools is not None  # the prompt has all tools, whatever may be called
    assert len(prompt.tools) == 2


@pytest.mark.parametrize(
    ("choice", "at"),
    [
        ("any", "tool_choice"),
        (named("h"), "tool_choice.function.name"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        ({"function": {"name": "f"}}, "tool_choice.type"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (
            allowed("auto", "f") | {"allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {}}]}},
            "tool_choice.allowed_tools.tools[0].type",
        ),
        ({"type": "custom", "custom": {"name": "f"}}, "tool_choice.type"),
        (allowed("none", "f"), "tool_choice.allowed_tools.mode"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        (allowed("auto", "f", "h"), "tool_choice.allowed_tools.tools[1].function.name"),
    ],
)
def test_a_tool_choice_that_cannot_be_met_is_refused(server: Running, choice: object, at: str) -> None:
    reply = post(server, "/v1/chat/completions", {"messages": HI, "tools": [tool("f")], "tool_choice": choice})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == at


@pytest.mark.parametrize(
    ("effort", "kwargs"),
    [
        (None, {}),
        ("none", {"enable_thinking": False, "thinking": False}),
        ("minimal", {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
        ("medium", {"reasoning_effort": "medium", "enable_thinking": True, "thinking": True}),
        ("max", {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}),
    ],
)
def test_reasoning_effort_reaches_the_template(server: Running, effort: str | None, kwargs: dict[str, Any]) -> None:
    body = {"messages": HI, "reasoning_effort": effort}
    assert post(server, "/v1/chat/completions", body).status_code == 200
    prompt = server.router.last.prompt
    assert isinstance(prompt, Chat)
    assert prompt.template_kwargs == kwargs


def test_the_clients_own_variables_of_the_template_win(server: Running) -> None:
    body = {"messages": HI, "reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}
    assert post(server, "/v1/chat/completions", body).status_code == 200
    prompt = server.router.last.prompt
    assert isinstance(prompt, Chat)
    assert prompt.template_kwargs == {"reasoning_effort": "high", "enable_thinking": False, "thinking": True}


def test_a_budget_of_reasoning_reaches_the_worker(server: Running) -> None:
    assert post(server, "/v1/chat/completions", {"messages": HI, "thinking_token_budget": 7}).status_code == 200
    form = server.router.last.form
    assert form is not None
    assert form.reasoning_budget == 7


@pytest.mark.parametrize(
    ("field", "value"),
    [("reasoning_effort", "extreme"), ("reasoning_effort", 3), ("thinking_token_budget", -1)],
)
def test_other_words_are_refused(server: Running, field: str, value: object) -> None:
    reply = post(server, "/v1/chat/completions", {"messages": HI, field: value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKS = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("messages", "at"),
    [
        ([*HI, {"role": "tool", "tool_call_id": "c1", "content": "1"}], "messages[1].role"),
        ([*HI, ASKS, {"role": "tool", "tool_call_id": "c2", "content": "1"}], "messages[2].tool_call_id"),
        ([*HI, ASKS, *HI, {"role": "tool", "tool_call_id": "c1", "content": "1"}], "messages[3].role"),
        ([*HI, ASKS, *[{"role": "tool", "tool_call_id": "c1", "content": "1"}] * 2], "messages[3].tool_call_id"),
        ([*HI, ASKS, *[{"role": "tool", "content": "1"}] * 2], "messages[3].tool_call_id"),
    ],
)
def test_results_of_no_call_are_refused(server: Running, messages: list[object], at: str) -> None:
    reply = post(server, "/v1/chat/completions", {"messages": messages})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == at


@pytest.mark.parametrize(
    ("call", "at", "told"),
    [
        (
            {"id": "c1", "type": "custom", "custom": {"name": "f", "input": "x"}},
            "type",
            "must be 'function', not \"custom\"",
        ),
        ({"id": "c1", "type": "function"}, "function", "missing"),
        ({"id": "c1", "function": {"arguments": "{}"}}, "function.name", "missing"),
    ],
)
def test_a_call_that_is_not_one_of_a_function_is_refused_by_its_type(
    server: Running, call: object, at: str, told: str
) -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    reply = post(server, "/v1/chat/completions", {"messages": [*HI, {**ASKS, "tool_calls": [call]}, result]})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, f"messages[1].tool_calls[0].{at}")
    assert told in error["message"]


def test_results_of_calls_are_taken(server: Running) -> None:
    two = {**ASKS, "tool_calls": [CALL, {**CALL, "id": "c2"}]}
    results = [{"role": "tool", "tool_call_id": id, "content": "1"} for id in ("c2", "c1")]
    assert post(server, "/v1/chat/completions", {"messages": [*HI, two, *results]}).status_code == 200
    for calls, ids in (
        ([CALL, CALL], ("c1", "c1")),
        ([{**CALL, "id": None}, CALL], ("c1", "x")),
        ([CALL] * 2, (None, "c1")),
    ):
        messages = [
            *HI,
            {**ASKS, "tool_calls": calls},
            *[{"role": "tool", "tool_call_id": id, "content": "1"} for id in ids],
        ]
        assert post(server, "/v1/chat/completions", {"messages": messages}).status_code == 200, ids
