"""What is stored outlives a server that is killed, and what it computed in the background is computed again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.gateway.responses.test_worker_deaths import DRAWN
from tests.scripted import Rule
from tests.scripted.serving import ScriptedServer, serving
from tests.tiers import THOROUGH

LONG = " ".join(f"word {number}" for number in range(400))
RULES = [
    Rule("a long text", LONG),
    Rule("anything", None),
    Rule("what did I say", "You said hello.", given="hello"),
    Rule("hello", "Hello!"),
]


class Site:
    """Servers one after the other on the same state."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._number = 0
        self.server = self.start()

    def start(self) -> ScriptedServer:
        self._number += 1
        running = serving(self._folder / str(self._number), RULES, data_dir=self._folder / "data")
        self.server = running.__enter__()
        self._stack.callback(running.gen.close)
        return self.server

    def kill(self) -> None:
        self.server.process.kill()
        self.server.process.wait(timeout=20)

    def client(self) -> openai.OpenAI:
        client = openai.OpenAI(base_url=self.server.api, api_key="none", max_retries=0, timeout=60)
        return self._stack.enter_context(client)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, stack)


def test_a_killed_server_loses_no_response_and_finishes_what_it_began(site: Site) -> None:
    client = site.client()
    said = client.responses.create(model="scripted", input="hello")
    talk = client.conversations.create(items=[{"type": "message", "role": "user", "content": "hello"}])
    live = client.responses.create(model="scripted", input="a long text", background=True, stream=True)
    seen = [next(live) for _ in range(12)]
    name = seen[0].response.id  # type: ignore[union-attr]
    assert client.responses.retrieve(name).status == "in_progress"
    site.kill()
    site.start()
    client = site.client()
    again = client.responses.create(model="scripted", input="what did I say?", previous_response_id=said.id)
    assert again.output_text == "You said hello."
    assert client.responses.create(model="scripted", input="what did I say?", conversation=talk.id).output_text
    with client.responses.stream(response_id=name, starting_after=seen[-1].sequence_number) as rest:
        numbers = [event.sequence_number for event in rest]
    assert numbers == list(range(len(seen), len(seen) + len(numbers)))
    with client.responses.stream(response_id=name) as whole:
        events = list(whole)
    assert [event.type for event in events[: len(seen)]] == [event.type for event in seen]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == LONG
    assert client.responses.retrieve(name).output_text == LONG


@THOROUGH
def test_a_drawn_text_is_drawn_again_from_the_same_items(site: Site) -> None:
    """The client that follows it gets one text, though its conversation has grown meanwhile."""
    client = site.client()
    talk = client.conversations.create(items=[{"type": "message", "role": "user", "content": "hello"}])
    asked: Any = {"model": "scripted", "input": "anything", "conversation": talk.id, "text": DRAWN["text"]}
    num_tokens = client.responses.input_tokens.count(**asked).input_tokens
    live: Any = client.responses.create(
        model="scripted", input="anything", conversation=talk.id, background=True, stream=True, **DRAWN
    )
    seen: list[Any] = []
    while sum(event.type == "response.output_text.delta" for event in seen) < 10:
        seen.append(next(live))
    name = seen[0].response.id
    client.conversations.items.create(talk.id, items=[{"type": "message", "role": "user", "content": "more " * 40}])
    assert client.responses.retrieve(name).status == "in_progress"
    site.kill()
    site.start()
    client = site.client()
    with client.responses.stream(response_id=name, starting_after=seen[-1].sequence_number) as rest:
        events = [*seen, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    found = client.responses.retrieve(name)
    assert found.output_text == told
    assert found.usage is not None
    assert found.usage.input_tokens == num_tokens
    with client.responses.stream(response_id=name) as whole:
        again = list(whole)
    assert [event.type for event in again] == [event.type for event in events]
    assert "".join(event.delta for event in again if event.type == "response.output_text.delta") == told
    assert [item.type for item in client.conversations.items.list(talk.id).data] == ["message"] * 4


@THOROUGH
def test_a_response_that_was_begun_too_often_has_failed(site: Site) -> None:
    name = site.client().responses.create(model="scripted", input="a long text", background=True).id
    for _ in range(2):
        deadline = time.monotonic() + 30
        while site.client().responses.retrieve(name).status != "in_progress":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        site.kill()
        site.start()
    deadline = time.monotonic() + 30
    while (found := site.client().responses.retrieve(name)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert found.status == "failed"
    assert found.error is not None
    assert found.error.code == "server_error"
