"""The bounds of stored state as OpenAI's client meets them, and what is left of deleted text in the files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.gateway.responses.test_background import ended, until
from tests.scripted import Rule
from tests.scripted.serving import serving
from tests.tiers import THOROUGH

RULES = [Rule("", "Hello!")]
CANARY = "a canary sings in the garden "


class Site:
    """Servers whose state is in one folder."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack

    def client(self, **limits: Any) -> openai.OpenAI:
        server = self._stack.enter_context(
            serving(self.folder / "served", RULES, data_dir=self.folder / "data", state={"responses": limits})
        )
        return self._stack.enter_context(openai.OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=60))

    def has_canary(self) -> bool:
        files = [file for file in (self.folder / "data").rglob("*") if file.is_file()]
        assert files
        return any(b"canary" in file.read_bytes() for file in files)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, stack)


def is_there(client: openai.OpenAI, name: str) -> bool:
    try:
        client.responses.retrieve(name)
    except openai.NotFoundError:
        return False
    return True


@THOROUGH
def test_the_oldest_go_first_and_what_is_too_large_is_refused(site: Site) -> None:
    client = site.client(max_bytes=60_000)
    made = [client.responses.create(model="scripted", input=f"{number} {CANARY * 200}") for number in range(16)]
    left = [is_there(client, response.id) for response in made]
    assert left == sorted(left), "the oldest are deleted first"
    assert 5 < left.count(True) < 12
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.retrieve(made[0].id)
    assert unknown.value.code == "response_not_found"
    for background in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="scripted", input=CANARY * 2200, background=background)
        assert (refused.value.code, refused.value.param) == ("stored_bytes_exceeded", "store")
    last: Any = list(client.responses.create(model="scripted", input=CANARY * 2200, stream=True))[-1]
    assert last.type == "response.failed"
    assert "state.responses.max_bytes" in last.response.error.message
    assert client.responses.create(model="scripted", input=CANARY * 2200, store=False).output_text == "Hello!"
    with pytest.raises(openai.BadRequestError) as long:
        client.conversations.create(items=[{"type": "message", "role": "user", "content": CANARY * 2200}])
    assert (long.value.code, long.value.param) == ("stored_bytes_exceeded", "items")
    talk = client.conversations.create(metadata={"a": "b"})
    with pytest.raises(openai.BadRequestError):
        client.conversations.items.create(
            talk.id, items=[{"type": "message", "role": "user", "content": CANARY * 2200}]
        )
    assert not client.conversations.items.list(talk.id).data
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.create(model="scripted", input="hi", previous_response_id=made[0].id)
    assert (gone.value.code, gone.value.param) == ("previous_response_not_found", "previous_response_id")


def test_what_is_too_old_is_gone(site: Site) -> None:
    client = site.client(max_age_s=1.0)
    made = client.responses.create(model="scripted", input="hi")
    talk = client.conversations.create()
    until(lambda: not is_there(client, made.id))
    time.sleep(1.1)  # each use of the conversation is its latest
    with pytest.raises(openai.NotFoundError) as gone:
        client.conversations.retrieve(talk.id)
    assert (gone.value.code, gone.value.param) == ("conversation_not_found", "conversation")
    with pytest.raises(openai.NotFoundError) as lost:
        client.responses.create(model="scripted", input="hi", conversation=talk.id)
    assert lost.value.param == "conversation"


@THOROUGH
def test_deleted_text_is_in_no_file_of_the_running_server(site: Site) -> None:
    client = site.client()
    asked: dict[str, Any] = {"model": "scripted", "input": CANARY * 300}
    names = [client.responses.create(**asked).id]
    names.append(ended(client, client.responses.create(**asked, background=True).id).id)
    stream: Any = client.responses.create(**asked, stream=True)
    names += [event.response.id for event in stream if event.type == "response.completed"]
    talk = client.conversations.create(items=[{"type": "message", "role": "user", "content": CANARY * 300}])
    names.append(client.responses.create(**asked, conversation=talk.id).id)
    assert site.has_canary()
    for name in names:
        client.responses.delete(name)
    assert site.has_canary(), "the conversation has its items"
    client.conversations.delete(talk.id)
    until(lambda: not site.has_canary())
    kept = client.conversations.create(items=[{"type": "message", "role": "user", "content": CANARY * 300}])
    (item,) = client.conversations.items.list(kept.id).data
    client.conversations.items.delete(item.id or "", conversation_id=kept.id)
    until(lambda: not site.has_canary())
