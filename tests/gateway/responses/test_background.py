"""Background responses, stored responses and conversations, over real sockets and with OpenAI's client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseCreatedEvent
from tests.gateway.fakes import Running
from tests.gateway.responses.stored import Store, storing
from tests.gateway.responses.test_responses_api import chat_of, events, folded, says

from inferd.errors import InvalidRequest, Overloaded
from inferd.types import Delta, End, GenerateRequest, Output, PromptReport, Usage

JSON = dict[str, Any]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with storing(tmp_path) as (server, store):
        server.store = store  # type: ignore[attr-defined]
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-a", max_retries=0, timeout=20) as client:
        yield client


def until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        value = found()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def ended(client: openai.OpenAI, name: str) -> Response:
    def over() -> Response | None:
        found = client.responses.retrieve(name)
        return found if found.status not in ("queued", "in_progress") else None

    found = until(over)
    assert isinstance(found, Response)
    return found


def hold(server: Running, *said: str) -> Any:
    """Let answers begin with these pieces and stay open; the stream of the next request, once it is there."""
    server.router.script = lambda request: [
        Output(request.id, (Delta(0, piece),), PromptReport(3) if number == 0 else None)
        for number, piece in enumerate(said)
    ]
    return lambda: until(lambda: server.router.streams and server.router.streams[-1])


def finish(server: Running, stream: Any, text: str) -> None:
    end = Output(stream.request.id, (Delta(0, text, finish_reason="stop"),), None, End("done", Usage(3, 2)))
    server.loop.call_soon_threadsafe(stream.put, end)


def test_a_background_response_is_queued_computed_and_kept(server: Running, client: openai.OpenAI) -> None:
    queued = client.responses.create(model="tiny", input="hi", background=True, metadata={"a": "b"})
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    done = ended(client, queued.id)
    assert (done.status, done.output_text) == ("completed", "Hello world!")
    assert (done.id, done.created_at, done.metadata) == (queued.id, queued.created_at, {"a": "b"})
    assert server.router.last.sampling.seed is not None
    items = client.responses.input_items.list(queued.id).data
    assert [item.type for item in items] == ["message"]
    with client.responses.stream(response_id=queued.id, starting_after=3) as again:
        kinds = [event.type for event in again]
    assert kinds[-1] == "response.completed"


def test_a_background_stream_is_followed_live_and_again_from_a_number(server: Running, client: openai.OpenAI) -> None:
    opened = hold(server, "Hello to everyon")  # one piece of divided text
    live = client.responses.create(model="tiny", input="hi", background=True, stream=True)
    seen = [next(live) for _ in range(6)]
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert seen[-1].type == "response.output_text.delta"
    name = seen[0].response.id  # type: ignore[union-attr]
    assert client.responses.retrieve(name).status == "in_progress"
    finish(server, opened(), "e!")
    seen += list(live)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    headers = {"authorization": "Bearer sk-a"}
    for after in (None, 0, 4, len(seen) - 1):
        query = "stream=true" if after is None else f"stream=true&starting_after={after}"
        reply = server.http.get(f"{server.url}/v1/responses/{name}?{query}", headers=headers)
        told = reply.text.removesuffix("data: [DONE]\n\n").count("event: ")
        assert told == len(seen) - (0 if after is None else after + 1)
    whole = server.http.get(f"{server.url}/v1/responses/{name}?stream=true", headers=headers)
    found = events(whole)
    assert found.pop(1)["response"]["status"] == "queued"
    assert found[0]["response"]["status"] == "queued"
    found[0]["response"]["status"] = "in_progress"
    assert folded(found)["output"][0]["content"][0]["text"] == "Hello to everyone!"


def test_the_events_of_a_background_response_do_not_depend_on_the_pieces_of_its_text(
    server: Running, client: openai.OpenAI
) -> None:
    """Else a client that follows a second computation would lose or repeat some of it."""
    thought, text = "It may be a greeting, or it may be none.", "Hello to everyone in the house, and to you. "

    def told(*cuts: int) -> list[tuple[str, str]]:
        ends = [*cuts, len(text)]
        pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        server.router.script = says(Delta(0, reasoning=thought), *(Delta(0, piece) for piece in pieces))
        made: Any = client.responses.create(model="tiny", input="hi", background=True, stream=True)
        return [(event.type, getattr(event, "delta", "")) for event in made]

    whole = told()
    assert "".join(delta for _, delta in whole) == thought + text
    assert told(1, 2, 30) == told(15, 16, 17, 40) == told(*range(1, len(text))) == whole


def test_a_background_response_is_cancelled_and_deleted(server: Running, client: openai.OpenAI) -> None:
    opened = hold(server, "Hel")
    queued = client.responses.create(model="tiny", input="hi", background=True)
    stream = opened()
    assert client.responses.cancel(queued.id).status == "cancelled"
    assert stream.closed.wait(10)
    assert client.responses.retrieve(queued.id).status == "cancelled"
    server.router.streams.clear()
    other = client.responses.create(model="tiny", input="hi", background=True)
    stream = opened()
    client.responses.delete(other.id)
    assert stream.closed.wait(10)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(other.id)
    server.router.script = says(Delta(0, "Hello"))
    plain = client.responses.create(model="tiny", input="hi")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(plain.id)


def test_a_background_response_that_fails_says_why(server: Running, client: openai.OpenAI) -> None:
    def script(request: GenerateRequest) -> list[Any]:
        return [Output(request.id, (Delta(0, "Hel"),), PromptReport(3)), Overloaded("No.")]

    server.router.script = script
    failed = ended(client, client.responses.create(model="tiny", input="hi", background=True).id)
    assert (failed.status, failed.output_text) == ("failed", "Hel")
    assert failed.error is not None
    assert failed.error.code == "server_error"


def test_the_events_of_a_response_that_was_never_computed_have_the_same_numbers_when_they_are_read_again(
    server: Running, client: openai.OpenAI
) -> None:
    server.router.script = lambda request: [InvalidRequest("Too long.")]
    with client.responses.create(model="tiny", input="hi", background=True, stream=True) as live:
        told = list(live)
    assert [event.type for event in told] == ["response.created", "response.queued", "response.failed"]
    first = told[0]
    assert isinstance(first, ResponseCreatedEvent)
    assert ended(client, first.response.id).status == "failed"
    for after in (-1, 0, 1):
        more = {"starting_after": after} if after >= 0 else {}
        with client.responses.retrieve(first.response.id, stream=True, **more) as again:  # type: ignore[call-overload]
            assert list(again) == told[after + 1 :]


def test_background_needs_the_store(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="hi", background=True, store=False)
    assert caught.value.param == "background"


def test_another_tenant_sees_nothing(server: Running, client: openai.OpenAI) -> None:
    made = client.responses.create(model="tiny", input="hi")
    talk = client.conversations.create()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-b", max_retries=0) as other:
        for attempt in (
            lambda: other.responses.retrieve(made.id),
            lambda: other.responses.delete(made.id),
            lambda: other.responses.cancel(made.id),
            lambda: other.responses.input_items.list(made.id),
            lambda: other.conversations.retrieve(talk.id),
            lambda: other.responses.create(model="tiny", input="hi", conversation=talk.id),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()


@pytest.mark.parametrize("background", [False, True])
def test_a_conversation_gets_the_items_of_its_responses(
    server: Running, client: openai.OpenAI, background: bool
) -> None:
    talk = client.conversations.create(items=[{"type": "message", "role": "developer", "content": "Be brief."}])
    server.router.script = says(Delta(0, reasoning="Hm"), Delta(0, "One."))
    first = client.responses.create(model="tiny", input="one", conversation=talk.id, background=background)
    assert first.conversation is not None
    assert first.conversation.id == talk.id
    if background:
        ended(client, first.id)
    server.router.script = says(Delta(0, "Two."))
    second = client.responses.create(model="tiny", input="two", conversation={"id": talk.id}, store=False)
    assert second.output_text == "Two."
    messages = chat_of(server).messages
    assert [(m["role"], m["content"]) for m in messages] == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "One."),
        ("user", "two"),
    ]
    kept = client.conversations.items.list(talk.id, order="asc").data
    assert [item.type for item in kept] == ["message", "message", "reasoning", "message", "message", "message"]
    one = client.conversations.items.retrieve(kept[1].id or "", conversation_id=talk.id)
    assert one == kept[1]
    client.conversations.items.delete(kept[1].id or "", conversation_id=talk.id)
    assert len(client.conversations.items.list(talk.id).data) == 5
    assert client.conversations.update(talk.id, metadata={"a": "b"}).metadata == {"a": "b"}
    client.conversations.items.create(talk.id, items=[{"type": "message", "role": "user", "content": "more"}])
    assert client.conversations.items.list(talk.id, limit=1).data[0].type == "message"
    client.conversations.delete(talk.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="three", conversation=talk.id)


def test_a_store_that_fails_is_told_at_once(server: Running, client: openai.OpenAI) -> None:
    store: Store = server.store  # type: ignore[attr-defined]
    made = client.responses.create(model="tiny", input="hi")
    assert client.responses.retrieve(made.id).id == made.id
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="hi", previous_response_id=made.id)
    assert store.refusal is None
