"""Calls that are recorded: whole and streamed answers, errors, predictions; nothing of a tenant that is not named."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.fakes import FakeDoor, FakeRouter, Running, post, running
from tests.gateway.responses.stored import storing

from inferd.config import PayloadsConfig
from inferd.errors import Overloaded
from inferd.gateway.routes import ROUTES
from inferd.observe.payloads.log import PayloadLog
from inferd.observe.payloads.store import PayloadStore
from inferd.tenancy.principal import Principal
from inferd.types import CallDelta, Delta, End, GenerateRequest, Output, PromptReport, Usage

KEYS = {"sk-a": Principal(key_id="a", tenant="team-a"), "sk-b": Principal(key_id="b", tenant="team-b")}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the canary of anna@example.com"}]}


class Recorded:
    """A server that records, and its records once it has stopped."""

    def __init__(self, server: Running, router: FakeRouter, log: PayloadLog, folder: Path) -> None:
        self.server = server
        self.router = router
        self._log = log
        self._folder = folder

    def ask(self, path: str, body: object, key: str = "sk-a", **headers: str) -> Any:
        return post(self.server, path, body, authorization=f"Bearer {key}", **headers)

    def records(self) -> list[dict[str, Any]]:
        self.server.stop()
        self._log.close()
        return list(PayloadStore(self._folder).records())


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    config = PayloadsConfig(tenants=("team-a",), keep=("prompts", "answers"))
    log, router = PayloadLog(tmp_path, config, lambda: None), FakeRouter("tiny")
    with running(router, door=FakeDoor(KEYS), payloads=log) as server:
        yield Recorded(server, router, log, tmp_path)
    log.close()


def test_a_whole_answer_and_a_stream_are_recorded_with_one_text(recorded: Recorded) -> None:
    for stream in (False, True):
        assert recorded.ask("/v1/chat/completions", {**CHAT, "stream": stream}).status_code == 200
    whole, streamed = recorded.records()
    for record in (whole, streamed):
        assert record["request"]["body"]["messages"][0]["content"] == "the canary of [email]"
        assert (record["tenant"], record["key_id"], record["status"]) == ("team-a", "a", 200)
        assert (record["model"], record["outcome"]) == ("tiny", "done")
    assert whole["answer"]["body"]["choices"][0]["message"]["content"] == "Hello world!"
    assert streamed["answer"]["body"]["choices[0].content"] == "Hello world!"


def test_a_message_is_recorded_whole_and_streamed(recorded: Recorded) -> None:
    for stream in (False, True):
        asked = {**CHAT, "max_tokens": 20, "system": "about b@example.com", "stream": stream}
        assert recorded.ask("/v1/messages", asked).status_code == 200
    whole, streamed = recorded.records()
    for record in (whole, streamed):
        assert record["request"]["body"]["messages"][0]["content"] == "the canary of [email]"
        assert record["request"]["body"]["system"] == "about [email]"
        assert (record["route"], record["status"], record["outcome"]) == ("/v1/messages", 200, "done")
    assert whole["answer"]["body"]["content"] == [{"type": "text", "text": "Hello world!"}]
    assert streamed["answer"]["body"] == {"[0].text": "Hello world!"}


def test_every_route_whose_answer_is_generated_tells_its_texts() -> None:
    """A dialect whose row forgets them would be recorded without its texts."""
    generates = [route for route in ROUTES if route.operation is not None and route.operation.generates]
    assert len(generates) > 3
    assert [route.pattern for route in generates if route.texts is None] == []


def test_a_compressed_answer_is_recorded_as_it_was_before(recorded: Recorded) -> None:
    body = {**CHAT, "n": 1}
    recorded.ask("/v1/chat/completions", body, **{"accept-encoding": "gzip"})
    (record,) = recorded.records()
    assert record["answer"]["body"]["choices"][0]["message"]["content"] == "Hello world!"


def test_errors_are_recorded(recorded: Recorded) -> None:
    assert recorded.ask("/v1/chat/completions", {**CHAT, "temperature": -1}).status_code == 400
    assert recorded.ask("/v1/chat/completions", b'{"broken').status_code == 400
    recorded.router.refusal = Overloaded("The queue is full.")
    assert recorded.ask("/v1/chat/completions", CHAT).status_code == 503
    wrong, broken, refused = recorded.records()
    assert "temperature" in json.dumps(wrong["answer"]["body"])
    assert "body" not in broken["request"]
    assert (refused["status"], refused["error_code"]) == (503, "overloaded")


def test_a_prediction_is_recorded_by_sizes_and_digests(recorded: Recorded) -> None:
    recorded.ask("/v1/embeddings", {"model": "tiny", "input": "the canary"})
    (record,) = recorded.records()
    assert record["request"]["bytes"] > 0
    assert len(record["answer"]["sha256"]) == 64
    assert "canary" not in json.dumps(record)


def test_another_tenant_leaves_no_trace(recorded: Recorded, tmp_path: Path) -> None:
    recorded.ask("/v1/chat/completions", CHAT, "sk-b")
    recorded.ask("/v1/chat/completions", CHAT, "sk-unknown")
    assert recorded.records() == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_event_of_a_recorded_call_has_no_text(recorded: Recorded) -> None:
    recorded.ask("/v1/chat/completions", CHAT)
    recorded.records()
    assert "canary" not in repr(recorded.server.events)


def test_a_response_is_recorded_whole_and_streamed_with_one_text(recorded: Recorded) -> None:
    for stream in (False, True):
        asked = {"model": "tiny", "input": "the canary of anna@example.com", "stream": stream}
        assert recorded.ask("/v1/responses", asked).status_code == 200
    whole, streamed = recorded.records()
    for record in (whole, streamed):
        assert record["request"]["body"]["input"] == "the canary of [email]"
        assert record["answer"]["body"]["output"][0]["content"][0]["text"] == "Hello world!"


def calls_tools(request: GenerateRequest) -> list[Output]:
    """A script that calls two tools; the arguments of the first come in two pieces."""
    deltas = (
        Delta(0, "See.", calls=(CallDelta(0, "get_weather", '{"to":"anna@exa'),)),
        Delta(0, calls=(CallDelta(0, None, 'mple.com"}'), CallDelta(1, "now", "{}"))),
        Delta(0, finish_reason="stop"),
    )
    reports = (PromptReport(3), None, None)
    ends = (None, None, End("done", Usage(3, 5)))
    return [Output(request.id, (delta,), report, end) for delta, report, end in zip(deltas, reports, ends, strict=True)]


SCHEMA = {"type": "object", "properties": {"to": {"type": "string"}}}
NAMES = ("get_weather", "now")
ARGUMENTS = '{"to":"[email]"}'
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
CALLS_OF: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "/v1/chat/completions": (
        {**CHAT, "tools": TOOLS},
        {
            "choices[0].content": "See.",
            "choices[0].tool_calls[0].function.name": "get_weather",
            "choices[0].tool_calls[0].function.arguments": ARGUMENTS,
            "choices[0].tool_calls[1].function.name": "now",
            "choices[0].tool_calls[1].function.arguments": "{}",
        },
    ),
    "/v1/messages": (
        {**CHAT, "max_tokens": 20, "tools": [{"name": name, "input_schema": SCHEMA} for name in NAMES]},
        {
            "[0].text": "See.",
            "[1].name": "get_weather",
            "[1].partial_json": ARGUMENTS,
            "[2].name": "now",
            "[2].partial_json": "{}",
        },
    ),
}


@pytest.mark.parametrize("path", CALLS_OF)
def test_the_tools_that_a_stream_calls_are_recorded_by_their_names(recorded: Recorded, path: str) -> None:
    body, expected = CALLS_OF[path]
    recorded.router.script = calls_tools
    assert recorded.ask(path, {**body, "stream": True}).status_code == 200
    (record,) = recorded.records()
    assert record["answer"]["body"] == expected


RESPONSES_TOOLS = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]


def test_the_tools_that_a_response_calls_are_recorded_whole_streamed_and_cut_off(recorded: Recorded) -> None:
    asked = {"model": "tiny", "input": "hi", "tools": RESPONSES_TOOLS}
    recorded.router.script = calls_tools
    for stream in (False, True):
        assert recorded.ask("/v1/responses", {**asked, "stream": stream}).status_code == 200
    recorded.router.script = lambda request: [*calls_tools(request)[:2], Overloaded("The queue is full.")]
    assert recorded.ask("/v1/responses", {**asked, "stream": True}).status_code == 200
    whole, streamed, failed = recorded.records()
    for record in (whole, streamed):
        called = [item for item in record["answer"]["body"]["output"] if item["type"] == "function_call"]
        assert [(item["name"], item["arguments"]) for item in called] == [("get_weather", ARGUMENTS), ("now", "{}")]
    assert failed["outcome"] == "failed"
    said = json.dumps(failed["answer"]["body"])
    assert all(name in said for name in NAMES)
    assert "anna" not in said


def test_a_response_whose_client_left_is_recorded_as_far_as_it_came(recorded: Recorded) -> None:
    recorded.router.script = lambda request: calls_tools(request)[:2]  # and stays open
    asked = {"model": "tiny", "input": "hi", "tools": RESPONSES_TOOLS, "stream": True}
    headers = {"authorization": "Bearer sk-a"}
    with httpx.stream("POST", f"{recorded.server.url}/v1/responses", json=asked, headers=headers) as reply:
        for line in reply.iter_lines():
            # The second call is whole. The first event names the tools as well.
            if '"response.function_call_arguments.delta"' in line and '"{}"' in line:
                break
    (stream,) = recorded.router.streams
    assert stream.closed.wait(10)
    (record,) = recorded.records()
    assert record["answer"]["body"] == {
        "[0].delta": "[cut]",  # what follows could make it an address
        "[1].name": "get_weather",
        "[1].delta": ARGUMENTS,
        "[2].name": "now",
        "[2].delta": "{}",
    }


def test_the_input_and_the_answers_of_a_decision_are_recorded(recorded: Recorded) -> None:
    def scores(request: GenerateRequest) -> list[Output]:
        report = PromptReport(5, scores=((1.0, 0.0),))
        return [Output(request.id, (Delta(0, finish_reason="length"),), report, End("done", Usage(5, 0)))]

    recorded.router.script = scores
    questions = [{"type": "predicate", "instructions": "Written by anna@example.com?", "name": "by_anna"}]
    asked = {"model": "tiny", "input": "the canary of anna@example.com", "questions": questions}
    assert recorded.ask("/v1/decisions", asked).status_code == 200
    (record,) = recorded.records()
    assert record["route"] == "/v1/decisions"
    assert record["request"]["body"]["input"] == "the canary of [email]"
    assert record["request"]["body"]["questions"][0]["instructions"] == "Written by [email]?"
    (answer,) = record["answer"]["body"]["answers"]
    assert (answer["type"], answer["name"]) == ("predicate", "by_anna")


def test_a_request_in_the_background_is_recorded_with_its_answer(recorded: Recorded) -> None:
    begun = recorded.ask("/v1/chat/completions", CHAT, prefer="respond-async")
    assert begun.status_code == 202
    headers = {"authorization": "Bearer sk-a", "prefer": "wait=10"}
    found = httpx.get(recorded.server.url + begun.headers["location"], headers=headers, timeout=20)
    assert found.json()["status"] == "done"
    (record, polled) = recorded.records()
    assert polled["route"] == "/v1/async/{id}"
    assert "body" not in polled["answer"]
    assert record["request"]["body"]["messages"][0]["content"] == "the canary of [email]"
    assert record["answer"]["body"]["choices"][0]["message"]["content"] == "Hello world!"


def test_a_chat_whose_client_left_is_recorded_as_far_as_it_came(recorded: Recorded) -> None:
    recorded.router.script = lambda request: calls_tools(request)[:1]
    headers = {"authorization": "Bearer sk-a"}
    body = {**CHAT, "stream": True}
    with httpx.stream("POST", f"{recorded.server.url}/v1/chat/completions", json=body, headers=headers) as reply:
        for line in reply.iter_lines():
            if "See." in line:
                break
    (stream,) = recorded.router.streams
    assert stream.closed.wait(10)
    (record,) = recorded.records()
    assert record["status"] == 499
    assert record["answer"]["body"]["choices[0].content"] == "[cut]"  # what follows could make it an address


def test_a_background_response_is_recorded_when_it_is_computed(tmp_path: Path) -> None:
    log = PayloadLog(tmp_path, PayloadsConfig(tenants=("team-a",), keep=("prompts", "answers")), lambda: None)
    with storing(tmp_path, payloads=log) as (server, _):
        asked = {"model": "tiny", "input": "the canary of anna@example.com", "background": True}
        begun = post(server, "/v1/responses", asked, authorization="Bearer sk-a")
        assert begun.json()["status"] == "queued"
        deadline = time.monotonic() + 20
        while begun.json()["status"] != "completed" and time.monotonic() < deadline:
            time.sleep(0.05)
            url = f"{server.url}/v1/responses/{begun.json()['id']}"
            begun = httpx.get(url, headers={"authorization": "Bearer sk-a"})
        assert begun.json()["status"] == "completed"
    log.close()
    found = [record for record in PayloadStore(tmp_path).records() if record["route"] == "/v1/responses"]
    assert [record["request"]["body"]["input"] for record in found] == ["the canary of [email]"] * 2
    said = [item for record in found for item in record["answer"]["body"]["output"]]
    assert [item["content"][0]["text"] for item in said] == ["Hello world!"]
