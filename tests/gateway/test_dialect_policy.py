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
