"""A handle now, the answer later: without an open connection, and visible to its own key only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.gateway.fakes import FakeDoor, FakeRouter, Running, running

from inferd.config import Config, ModelConfig, ServerConfig
from inferd.errors import Overloaded
from inferd.tenancy.principal import Principal
from inferd.types import Delta, End, Output, Relay, Relayed, RelayHead, Request, Usage

KEYS = {
    "sk-a": Principal(key_id="a", tenant="a"),
    "sk-a2": Principal(key_id="a2", tenant="a"),
    "sk-b": Principal(key_id="b", tenant="b"),
}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def door() -> FakeDoor:
    return FakeDoor(KEYS)


@pytest.fixture
def server(door: FakeDoor) -> Iterator[Running]:
    with running(FakeRouter("tiny"), door=door) as started:
        yield started


def ask(server: Running, method: str, path: str, key: str = "sk-a", prefer: str = "", **more: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"} | ({"prefer": prefer} if prefer else {})
    return server.http.request(method, server.url + path, headers=headers, **more)


def begin(server: Running, body: dict[str, Any] = CHAT, key: str = "sk-a") -> Any:
    return ask(server, "POST", "/v1/chat/completions", key, "respond-async", json=body)


def test_the_answer_is_the_one_that_a_waiting_client_gets(server: Running) -> None:
    begun = begin(server)
    assert begun.status_code == 202
    assert begun.headers["preference-applied"] == "respond-async"
    assert begun.json()["status"] == "running"
    found = ask(server, "GET", begun.headers["location"], prefer="wait=10").json()
    waited = ask(server, "POST", "/v1/chat/completions", json=CHAT).json()
    assert (found["status"], found["http_status"]) == ("done", 200)
    assert found["answer"]["choices"] == waited["choices"]
    assert found["answer"]["usage"] == waited["usage"]


@pytest.mark.parametrize("body", [b'{"messages": ' + b"[" * 100_000, b'{"stream": ' + b"[" * 100_000, b"\xff"])
def test_a_body_that_nests_too_deeply_is_refused_in_its_answer(server: Running, body: bytes) -> None:
    headers = {"authorization": "Bearer sk-a", "prefer": "respond-async", "content-type": "application/json"}
    begun = server.http.post(f"{server.url}/v1/chat/completions", headers=headers, content=body)
    assert begun.status_code == 202
    found = ask(server, "GET", begun.headers["location"], prefer="wait=10").json()
    assert (found["status"], found["http_status"]) == ("failed", 400)


def test_looking_does_not_wait_unless_it_is_asked_to(server: Running) -> None:
    server.router.script = None
    where = begin(server).headers["location"]
    assert ask(server, "GET", where).json()["status"] == "running"
    server.router.submitted.acquire()
    stream = server.router.streams[-1]
    end = End("done", Usage(1, 1))
    server.put(stream, Output(stream.request.id, (Delta(0, "later", (1,), None, "stop"),), None, end))
    found = ask(server, "GET", where, prefer="wait=10").json()
    assert found["answer"]["choices"][0]["message"]["content"] == "later"


def test_a_failure_is_kept_like_an_answer(server: Running) -> None:
    server.router.refusal = Overloaded("The queue is full; try again later.", code="queue_full")
    found = ask(server, "GET", begin(server).headers["location"], prefer="wait=10").json()
    assert (found["status"], found["http_status"]) == ("failed", 503)
    assert found["answer"]["error"]["code"] == "queue_full"


def test_how_long_the_client_waits_for_its_handle_is_no_deadline_of_the_answer(server: Running) -> None:
    headers = {"authorization": "Bearer sk-a", "prefer": "respond-async", "x-stainless-read-timeout": "5"}
    where = server.http.post(server.url + "/v1/chat/completions", json=CHAT, headers=headers).headers["location"]
    assert ask(server, "GET", where, prefer="wait=10").json()["status"] == "done"
    assert server.router.last.deadline_s is None


def test_only_its_tenant_sees_a_handle(server: Running) -> None:
    where = begin(server).headers["location"]
    assert ask(server, "GET", where, "sk-a2").status_code == 200
    for method in ("GET", "DELETE"):
        refused = ask(server, method, where, "sk-b")
        never = ask(server, method, where[:-1] + "x", "sk-b")
        assert (refused.status_code, refused.json()) == (404, never.json())


def test_cancelling_stops_the_work_and_forgetting_ends_the_handle(server: Running) -> None:
    server.router.script = None
    where = begin(server).headers["location"]
    server.router.submitted.acquire()
    assert ask(server, "DELETE", where).status_code == 204
    assert ask(server, "GET", where, prefer="wait=10").json()["status"] == "cancelled"
    assert server.router.streams[-1].closed.wait(10)
    assert ask(server, "DELETE", where).status_code == 204
    assert ask(server, "GET", where).status_code == 404


def test_the_quota_is_asked_and_settled_once(server: Running, door: FakeDoor) -> None:
    ask(server, "GET", begin(server).headers["location"], prefer="wait=10")
    assert [len(permit.settled) for permit in door.permits] == [1]


def test_a_stream_needs_a_reader(server: Running) -> None:
    refused = begin(server, CHAT | {"stream": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stream"


def test_there_are_bounds(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.gateway.background.MAX_RUNNING_PER_TENANT", 2)
    server.router.script = None
    assert [begin(server).status_code for _ in range(3)] == [202, 202, 503]
    assert begin(server, key="sk-b").status_code == 202
    monkeypatch.setattr("inferd.gateway.background.MAX_KEPT_BYTES", 1)
    server.reset()
    where = begin(server, key="sk-b").headers["location"]
    ask(server, "GET", where, "sk-b", prefer="wait=10")
    assert ask(server, "GET", where, "sk-b").status_code == 404


def test_small_answers_are_not_kept_without_number(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused requests use no quota."""
    monkeypatch.setattr("inferd.gateway.background.MAX_KEPT", 2)
    places = [begin(server, {"messages": []}).headers["location"] for _ in range(3)]
    assert ask(server, "GET", places[-1], prefer="wait=10").json()["http_status"] == 400
    assert [ask(server, "GET", where).status_code for where in places] == [404, 200, 200]


@pytest.mark.parametrize(("limit", "room"), [("MAX_KEPT", 4), ("MAX_KEPT_BYTES", 0)])
def test_the_key_with_the_most_kept_answers_loses_its_oldest(
    server: Running, monkeypatch: pytest.MonkeyPatch, limit: str, room: int
) -> None:
    def ended(key: str) -> Any:
        where = begin(server, key=key).headers["location"]
        assert ask(server, "GET", where, key, prefer="wait=10").json()["status"] == "done"
        return where

    little = ended("sk-b")
    size = len(msgspec.json.encode(ask(server, "GET", little, "sk-b").json()["answer"]))
    monkeypatch.setattr(f"inferd.gateway.background.{limit}", room or size * 9 // 2)
    much = [ended("sk-a") for _ in range(6)]
    assert ask(server, "GET", little, "sk-b").status_code == 200
    assert [ask(server, "GET", where).status_code for where in much] == [404, 404, 404, 200, 200, 200]
    ended("sk-b")
    assert [ask(server, "GET", where).status_code for where in much[3:]] == [404, 200, 200]


def test_answers_that_were_forgotten_count_no_more_when_room_is_made(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(key: str) -> Any:
        where = begin(server, key=key).headers["location"]
        assert ask(server, "GET", where, key, prefer="wait=10").json()["status"] == "done"
        return where

    kept = ended("sk-a")
    size = len(msgspec.json.encode(ask(server, "GET", kept).json()["answer"]))
    for _ in range(4):
        assert ask(server, "DELETE", ended("sk-a")).status_code == 204
    monkeypatch.setattr("inferd.gateway.background.MAX_KEPT_BYTES", size * 7 // 2)
    others = [ended("sk-b") for _ in range(3)]
    assert ask(server, "GET", kept).status_code == 200
    assert [ask(server, "GET", where, "sk-b").status_code for where in others] == [404, 200, 200]


def test_a_remote_servers_page_is_told_as_a_text() -> None:
    page = b"<html>no</html>"

    def refuse(request: Request, relay: Relay) -> list[Relayed]:
        return [Relayed(request.id, RelayHead(400, b"text/html"), page, End("refused"))]

    router = FakeRouter("far")
    router.statuses[0].has_remote, router.statuses[0].info, router.relay_script = True, None, refuse
    config = Config(
        models={"far": ModelConfig(source="openai:http://127.0.0.1:9/v1")}, server=ServerConfig(port=0, grace_s=1)
    )
    with running(router, config, door=FakeDoor(KEYS)) as server:
        where = begin(server, CHAT | {"model": "far"}).headers["location"]
        found = ask(server, "GET", where, prefer="wait=10").json()
    assert (found["http_status"], found["answer"]) == (400, page.decode())
