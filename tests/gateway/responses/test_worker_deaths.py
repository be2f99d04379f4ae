"""A worker is killed in the middle of a response: what the client gets, and what is stored."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.gateway.responses.test_background import ended, until
from tests.scripted import Rule
from tests.scripted.serving import ScriptedServer, serving
from tests.tiers import THOROUGH, sample
from tests.worker.watching import children

LONG = " ".join(f"word {number}" for number in range(400))
RULES = [Rule("a long text", LONG), Rule("anything", None), Rule("what did I say", "Hello."), Rule("hello", "Hello!")]
DRAWN: dict[str, Any] = {  # a long text of which every token is drawn
    "temperature": 2,
    "text": {
        "format": {
            "type": "json_schema",
            "name": "n",
            "schema": {"type": "string", "minLength": 4000, "maxLength": 4100},
        }
    },
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ScriptedServer]:
    with serving(tmp_path / "served", RULES, data_dir=tmp_path / "data") as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def kill_worker(server: ScriptedServer) -> None:
    """Kill the worker, once there is one."""

    def found() -> list[int]:
        return children(server.process.pid)

    (worker,) = until(found)
    os.kill(worker, signal.SIGKILL)
    until(lambda: worker not in children(server.process.pid))


def begin(client: openai.OpenAI, said: str, **more: Any) -> tuple[Any, list[Any]]:
    """A stream, and its events up to the tenth piece of its text."""
    stream: Any = client.responses.create(model="scripted", input=said, stream=True, **more)
    seen: list[Any] = []
    while sum(event.type == "response.output_text.delta" for event in seen) < 10:
        seen.append(next(stream))
    return stream, seen


def test_a_stream_fails_and_is_stored_as_it_was_sent(server: ScriptedServer, client: openai.OpenAI) -> None:
    talk = client.conversations.create()
    stream, seen = begin(client, "a long text", conversation=talk.id)
    kill_worker(server)
    seen += list(stream)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    last = seen[-1]
    assert last.type == "response.failed"
    assert last.response.error.code == "server_error"
    assert last.response.output[0].status == "incomplete"
    told = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert LONG.startswith(told)
    assert last.response.output_text == told
    found = client.responses.retrieve(last.response.id)
    assert (found.status, found.output_text, found.error) == ("failed", told, last.response.error)
    assert not client.conversations.items.list(talk.id).data, "a conversation has no items of a failed response"
    with client.responses.stream(response_id=found.id) as again:
        assert [event.type for event in again] == [event.type for event in seen]
    assert client.responses.create(model="scripted", input="hello", conversation=talk.id).output_text == "Hello!"


@THOROUGH
def test_an_answer_in_one_piece_is_computed_by_the_next_worker(server: ScriptedServer, client: openai.OpenAI) -> None:
    talk = client.conversations.create()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(client.responses.create, model="scripted", input="a long text", conversation=talk.id)
        until(lambda: is_computing(server))
        kill_worker(server)
        assert asked.result(60).output_text == LONG
    assert client.responses.retrieve(asked.result().id).status == "completed"
    assert [item.type for item in client.conversations.items.list(talk.id).data] == ["message", "message"]


def is_computing(server: ScriptedServer) -> bool:
    page = httpx.get(f"{server.url}/metrics", timeout=10).text
    return any(line.startswith("inferd_running{") and float(line.rpartition(" ")[2]) > 0 for line in page.splitlines())


@pytest.mark.parametrize("text", sample(["a long text", "anything"], "a long text"))
def test_a_background_response_goes_on_at_the_next_worker(
    server: ScriptedServer, client: openai.OpenAI, text: str
) -> None:
    """Also at a temperature where every token is drawn."""
    talk = client.conversations.create()
    more: dict[str, Any] = {"background": True, "conversation": talk.id}
    if text == "anything":
        more |= DRAWN
    stream, seen = begin(client, text, **more)
    kill_worker(server)
    seen += list(stream)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type in ("response.completed", "response.incomplete")
    told = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    found = client.responses.retrieve(seen[0].response.id)
    assert found.output_text == told
    assert found == seen[-1].response
    assert told == LONG or text != "a long text"
    assert [item.type for item in client.conversations.items.list(talk.id, order="asc").data] == ["message"] * 2
    with client.responses.stream(response_id=found.id) as again:
        assert [event.type for event in again] == [event.type for event in seen]


@THOROUGH  # test_survival.py: a response that was begun too often has failed
def test_a_response_whose_workers_die_has_failed(server: ScriptedServer, client: openai.OpenAI) -> None:
    stream, seen = begin(client, "a long text", background=True)
    name = seen[0].response.id

    def is_over() -> bool:
        if is_computing(server):
            kill_worker(server)
        return client.responses.retrieve(name).status not in ("queued", "in_progress")

    until(is_over)
    seen += list(stream)
    assert seen[-1].type == "response.failed"
    found = ended(client, name)
    assert (found.status, found.error) == ("failed", seen[-1].response.error)
    assert client.responses.create(model="scripted", input="hello").output_text == "Hello!"
