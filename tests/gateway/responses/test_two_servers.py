"""Two servers on one database: what was made at one is read, followed, cancelled and deleted at the other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from tests.conftest import postgres_schema
from tests.gateway.responses.test_background import ended, until
from tests.scripted import Rule
from tests.scripted.serving import ScriptedServer, serving
from tests.tiers import THOROUGH

LONG = " ".join(f"word {number}" for number in range(400))
LINE = {"type": "array", "items": {"const": "word"}, "minItems": 999}
LINES = {"type": "array", "items": LINE, "minItems": 999}
ENDLESS: Any = {  # of a million words; compiled at once, as a long text of a script is not
    "type": "json_schema",
    "name": "endless",
    "schema": {"type": "object", "properties": {"x": LINES}, "required": ["x"], "additionalProperties": False},
}
RULES = [
    Rule("a long text", LONG),
    Rule("an endless text", None),
    Rule("what did I say", "You said hello.", given="hello"),
    Rule("hello", "Hello!"),
]


class Pair(NamedTuple):
    one: openai.OpenAI
    two: openai.OpenAI
    servers: tuple[ScriptedServer, ScriptedServer]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """No test sees what another one stored: each has responses and conversations of its own."""
    place: Path = tmp_path_factory.mktemp("two-servers")
    with ExitStack() as stack:
        is_file = request.param == "sqlite"
        url = f"sqlite://{place}/state.db" if is_file else stack.enter_context(postgres_schema())

        def start(name: str) -> ScriptedServer:
            folder, state = place / name, {"url": url}
            return stack.enter_context(serving(folder / "served", RULES, data_dir=folder / "data", state=state))

        servers = start("one"), start("two")
        clients = [openai.OpenAI(base_url=one.api, api_key="none", max_retries=0, timeout=60) for one in servers]
        for client in clients:
            stack.callback(client.close)
        yield Pair(clients[0], clients[1], servers)


def test_a_response_of_one_server_belongs_to_the_other_too(pair: Pair) -> None:
    made = pair.one.responses.create(model="scripted", input="hello", metadata={"a": "b"})
    assert pair.two.responses.retrieve(made.id) == made
    assert pair.two.responses.input_items.list(made.id).data
    again = pair.two.responses.create(model="scripted", input="what did I say?", previous_response_id=made.id)
    assert again.output_text == "You said hello."
    pair.two.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        pair.one.responses.retrieve(made.id)
    talk = pair.one.conversations.create()
    pair.two.responses.create(model="scripted", input="hello", conversation=talk.id)
    assert pair.one.responses.create(model="scripted", input="what did I say?", conversation=talk.id).output_text
    pair.one.conversations.delete(talk.id)
    with pytest.raises(openai.NotFoundError):
        pair.two.conversations.retrieve(talk.id)


def test_a_background_response_is_followed_at_the_other_server(pair: Pair) -> None:
    live: Any = pair.one.responses.create(model="scripted", input="a long text", background=True, stream=True)
    seen = [next(live) for _ in range(12)]
    name = seen[0].response.id
    assert pair.two.responses.retrieve(name).status == "in_progress"
    with pair.two.responses.stream(response_id=name, starting_after=seen[-1].sequence_number) as rest:
        others = list(rest)
    own = list(live)
    assert [event.sequence_number for event in others] == [event.sequence_number for event in own]
    told = [event.delta for event in [*seen, *others] if event.type == "response.output_text.delta"]
    assert "".join(told) == LONG


@THOROUGH
@pytest.mark.parametrize("deletes", [False, True])
def test_a_background_response_is_ended_at_the_other_server(pair: Pair, deletes: bool) -> None:
    def given_up() -> list[dict[str, Any]]:
        return [line for line in pair.servers[0].lines() if line["status"] == 499]

    num_before = len(given_up())
    live: Any = pair.one.responses.create(
        model="scripted", input="an endless text", text={"format": ENDLESS}, background=True, stream=True
    )
    seen = [next(live) for _ in range(12)]
    name = seen[0].response.id
    if deletes:
        pair.two.responses.delete(name)
    else:
        assert pair.two.responses.cancel(name).status == "cancelled"
        assert ended(pair.one, name).status == "cancelled"
    seen += list(live)
    assert not any(event.type == "response.completed" for event in seen)
    until(lambda: given_up()[num_before:])  # the other server ended the computation
    if deletes:
        with pytest.raises(openai.NotFoundError):
            pair.one.responses.retrieve(name)


def test_turns_at_the_same_time_lose_nothing_of_a_conversation(pair: Pair) -> None:
    talk = pair.one.conversations.create().id

    def turn(number: int) -> str:
        client = (pair.one, pair.two)[number % 2]
        is_background = number % 3 == 0
        made = client.responses.create(
            model="scripted", input=f"hello {number}", conversation=talk, background=is_background
        )
        return ended(client, made.id).id

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(turn, range(24)))
    items = list(pair.two.conversations.items.list(talk, order="asc", limit=100))
    assert len(items) == 2 * len(ids)
    of = [(item.id or "").partition("_")[2][:32] for item in items]
    assert of[::2] == of[1::2], "the items of a turn follow one another"
    assert sorted(of[::2]) == sorted(name.removeprefix("resp_") for name in ids)
    assert [getattr(item, "role", None) for item in items] == ["user", "assistant"] * len(ids)
