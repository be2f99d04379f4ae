"""Responses that are stored, and requests that go on from them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.fakes import Running, post
from tests.gateway.responses.stored import Store, storing
from tests.gateway.responses.test_responses_api import WEATHER, chat_of, events, folded, says

from inferd.errors import StateUnavailable
from inferd.stored.record import frames_after
from inferd.types import CallDelta, Delta

JSON = dict[str, Any]


class Stored:
    def __init__(self, server: Running, store: Store) -> None:
        self.server = server
        self.store = store

    def ask(self, body: JSON, key: str = "sk-a", path: str = "/v1/responses") -> httpx.Response:
        return post(self.server, path, {"model": "tiny", "input": "hi", **body}, authorization=f"Bearer {key}")

    def told(self, body: JSON) -> JSON:
        reply = self.ask(body)
        assert reply.status_code == 200, reply.text
        answer: JSON = reply.json()
        return answer

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.server.loop).result(timeout=20)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    with storing(tmp_path) as (server, store):
        yield Stored(server, store)


def test_a_response_is_stored_as_it_was_sent(stored: Stored) -> None:
    sent = stored.told({"metadata": {"a": "b"}})
    kept = stored.run(stored.store.get("team-a", sent["id"]))
    assert json.loads(kept.body) == sent
    assert sent["store"] is True
    (item,) = json.loads(kept.input_items)
    assert item["content"] == [{"type": "input_text", "text": "hi"}]
    assert (item["type"], item["role"], item["status"]) == ("message", "user", "completed")
    assert item["id"].startswith("msg_")


def test_a_stream_is_stored_with_its_events(stored: Stored) -> None:
    stored.server.router.script = says(Delta(0, reasoning="Hm"), Delta(0, "Hel\n\nlo"))
    reply = stored.ask({"stream": True})
    sent = folded(events(reply))
    kept = stored.run(stored.store.get("team-a", sent["id"]))
    assert json.loads(kept.body) == sent
    assert b"".join(frames_after(kept.events, -1)) == reply.content.removesuffix(b"data: [DONE]\n\n")


def test_a_request_goes_on_from_the_response_before_it(stored: Stored) -> None:
    stored.server.router.script = says(
        Delta(0, reasoning="Hm"), Delta(0, calls=(CallDelta(0, "get_weather", '{"city":"Paris"}'),))
    )
    first = stored.told({"instructions": "Be brief.", "tools": [WEATHER]})
    call_id = first["output"][1]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
    stored.server.router.script = says(Delta(0, "Sunny."))
    second = stored.told({"previous_response_id": first["id"], "input": [result], "instructions": "Be kind."})
    assert second["previous_response_id"] == first["id"]
    third = stored.told({"previous_response_id": second["id"], "input": "And now?", "stream": False})
    assert [(m["role"], m["content"]) for m in chat_of(stored.server).messages] == [
        ("user", "hi"),
        ("assistant", ""),
        ("tool", "sunny"),
        ("assistant", "Sunny."),
        ("user", "And now?"),
    ]
    assert chat_of(stored.server).messages[1]["reasoning_content"] == "Hm"
    assert third["instructions"] is None
    count = stored.ask({"previous_response_id": second["id"]}, path="/v1/responses/input_tokens").json()
    assert count["input_tokens"] == len("hisunnySunny.hi")
    reply = stored.ask({"previous_response_id": first["id"], "input": "No result."})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "missing_tool_output")


def test_another_tenant_and_a_response_that_is_not_stored_are_not_found(stored: Stored) -> None:
    kept, dropped = stored.told({}), stored.told({"store": False})
    assert dropped["store"] is False
    for body, key in (
        ({"previous_response_id": kept["id"]}, "sk-b"),
        ({"previous_response_id": dropped["id"]}, "sk-a"),
        ({"previous_response_id": "resp_x"}, "sk-a"),
    ):
        reply = stored.ask(body, key)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (404, "previous_response_not_found"), reply.text
        assert error["param"] == "previous_response_id"
    reply = stored.ask({"input": [{"type": "item_reference", "id": kept["output"][0]["id"]}]}, "sk-b")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "item_not_found")
    reply = stored.ask({"conversation": "conv_x"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "conversation")


def test_a_reference_stands_for_its_item(stored: Stored) -> None:
    first = stored.told({"input": [{"role": "user", "content": "one"}]})
    kept = stored.run(stored.store.get("team-a", first["id"]))
    (asked,) = json.loads(kept.input_items)
    refs = [{"type": "item_reference", "id": asked["id"]}, {"id": first["output"][0]["id"]}]
    second = stored.told({"input": [*refs, {"role": "user", "content": "two"}]})
    assert [m["content"] for m in chat_of(stored.server).messages] == ["one", "Hello world!", "two"]
    kept = stored.run(stored.store.get("team-a", second["id"]))
    assert [item["id"] for item in json.loads(kept.input_items)][:2] == [asked["id"], first["output"][0]["id"]]


def test_every_stored_item_has_an_id_of_its_own_by_which_a_list_goes_on(stored: Stored) -> None:
    first = stored.told({"input": "one"})
    said = first["output"][0]["id"]
    given = ["msg_a", "msg a", "msg_a", "", said, "x" * 129]
    items = [{"role": "user", "content": str(i), "id": name} for i, name in enumerate(given)]
    refs = [{"type": "item_reference", "id": said}] * 2
    made = stored.told({"input": [*items, *refs]})
    path = f"/v1/responses/{made['id']}/input_items?order=asc&limit=1"
    listed: list[str] = []
    while True:
        after = f"&after={listed[-1]}" if listed else ""
        page = stored.server.http.get(
            f"{stored.server.url}{path}{after}", headers={"authorization": "Bearer sk-a"}
        ).json()
        listed += [item["id"] for item in page["data"]]
        assert page["first_id"] == page["last_id"] == listed[-1]
        if not page["has_more"]:
            break
        assert len(listed) < 10
    assert len(set(listed)) == len(listed) == 8
    assert (listed[0], listed[4]) == ("msg_a", said)
    reply = stored.ask({"input": [{"type": "item_reference"}]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input[0].id")


def test_an_answer_that_cannot_be_stored_is_an_error(stored: Stored) -> None:
    stored.store.refusal = StateUnavailable("The disk is full.")
    reply = stored.ask({})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "state_unavailable")
    stored.server.router.script = says(Delta(0, "event: response.x"))
    last = folded(events(stored.ask({"stream": True})))
    assert (last["status"], last["error"]["code"]) == ("failed", "server_error")
    assert stored.ask({"store": False}).status_code == 200


def test_previous_response_and_conversation_exclude_each_other(stored: Stored) -> None:
    reply = stored.ask({"previous_response_id": "resp_x", "conversation": {"id": "conv_x"}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "previous_response_id")


@pytest.mark.parametrize("field", ["previous_response_id", "conversation", "store"])
def test_a_server_without_a_store_refuses_what_needs_one(server: Running, field: str) -> None:
    body = {"model": "tiny", "input": "hi"}
    reply = post(server, "/v1/responses", {**body, field: True if field == "store" else "x"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert post(server, "/v1/responses", body).json()["store"] is False
