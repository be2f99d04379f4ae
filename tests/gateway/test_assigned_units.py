"""What the gateway says of a call's unit while its model has a rollout: which version chance gave it, or that none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest
from tests.gateway.fakes import FakeRouter, Running, post, running

from inferd.config import Config
from inferd.errors import InferdError, InternalError
from inferd.events import Assigned, HttpServed
from inferd.rollout.plan import plan_of
from inferd.rollout.split import Split, with_weights
from inferd.types import GenerateRequest, Output

CONFIG = msgspec.convert(
    {
        "models": {
            "chat": {"source": "x", "version": "1", "rollout": {"stable": 1, "new": 2}},
            "chat@2": {"source": "y", "version": "2"},
        }
    },
    Config,
)
SPLIT = Split("chat:1:2", 3, 0.5, True, "chat", "chat@2", "auto")


@pytest.fixture
def server() -> Iterator[Running]:
    with running(FakeRouter("chat", "chat@2"), config=CONFIG) as started:
        divide(started, SPLIT)
        yield started


def divide(server: Running, split: Split) -> None:
    plan = plan_of("chat", CONFIG.models["chat"])
    assert plan is not None
    server.app.configure(with_weights(CONFIG, {"chat": plan}, {"chat": split}), {"chat": split})


def ask(server: Running, model: str = "chat", user: str = "", **headers: str) -> HttpServed:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **({"user": user} if user else {})}
    assert post(server, "/v1/chat/completions", body, **headers).status_code in (200, 500)
    return server.served()


def unit_of(server: Running, **given: str) -> Assigned:
    assigned = ask(server, **given).assigned
    assert assigned is not None
    return assigned


def test_a_call_says_what_chance_gave_its_unit(server: Running) -> None:
    seen = {name: unit_of(server, user=name) for name in map(str, range(12))}
    assert {assigned.is_new for assigned in seen.values()} == {True, False}
    for name, assigned in seen.items():
        assert (assigned.rollout, assigned.run, assigned.share) == ("chat:1:2", 3, 0.5)
        assert assigned == unit_of(server, user=name)
        event = ask(server, user=name)
        assert event.model == ("chat@2" if assigned.is_new else "chat")
    assert len({assigned.unit for assigned in seen.values()}) == 12
    assert all(assigned.unit for assigned in seen.values())


def test_a_request_without_a_name_is_a_unit_of_its_own_unless_its_client_named_it(server: Running) -> None:
    assert {unit_of(server).unit for _ in range(4)} == {b""}
    one, two = (unit_of(server, **{"x-request-id": "always-this"}) for _ in range(2))
    assert one == two
    assert one.unit, "such requests are one unit"


@pytest.mark.parametrize(
    ("unit", "first", "second", "is_same"),
    [
        ("auto", {"x-session-id": "s", "user": "a"}, {"x-session-id": "s", "user": "b"}, True),
        ("session", {"x-session-id": "s", "user": "a"}, {"x-session-id": "s", "user": "b"}, True),
        ("session", {"user": "a"}, {"user": "a"}, False),
        ("user", {"x-session-id": "s", "user": "a"}, {"x-session-id": "t", "user": "a"}, True),
        ("user", {"x-session-id": "s"}, {"x-session-id": "s"}, False),
        ("tenant", {"x-session-id": "s"}, {"user": "b"}, True),
        ("request", {"x-session-id": "s", "user": "a"}, {"x-session-id": "s", "user": "a"}, False),
        ("request", {"idempotency-key": "k"}, {"idempotency-key": "k"}, True),
    ],
)
def test_the_configuration_chooses_what_a_unit_is(
    server: Running, unit: str, first: dict[str, str], second: dict[str, str], is_same: bool
) -> None:
    divide(server, SPLIT._replace(unit=unit))
    one, two = unit_of(server, **first), unit_of(server, **second)
    assert (bool(one.unit) and one.unit == two.unit) == is_same


def test_what_no_chance_has_given_is_not_counted(server: Running) -> None:
    for name in ("chat@1", "chat@2"):
        assert ask(server, model=name).assigned is None, "the request names its version"
    server.router.statuses[0].state = "failed"
    assert ask(server, user="a").assigned is None, "one of the versions cannot serve"
    server.router.statuses[0].state = "ready"
    assert ask(server, user="a").assigned is not None
    divide(server, SPLIT._replace(share=1.0, is_counted=False))
    event = ask(server, user="a")
    assert (event.assigned, event.model) == (None, "chat@2"), "the rollout is over"


def test_a_chat_that_the_new_version_fails_at_is_answered_by_the_stable_one(server: Running) -> None:
    whole = server.router.script

    def script(request: GenerateRequest) -> Sequence[Output | InferdError | None]:
        assert whole is not None
        return [InternalError("it fails")] if request.model == "chat@2" else whole(request)

    server.router.script = script
    for name in map(str, range(8)):
        body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "user": name}
        answer = post(server, "/v1/chat/completions", body)
        assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, "Hello world!")
        event = server.served()
        assert event.assigned is not None
        assert (event.model, event.rescued_from) == ("chat", "internal" if event.assigned.is_new else "")
        streamed = post(server, "/v1/chat/completions", {**body, "stream": True})
        assert (streamed.status_code, "Hello" in streamed.text, "error" in streamed.text) == (200, True, False)
        server.served()
    answer = post(server, "/v1/chat/completions", {"model": "chat@2", "messages": [{"role": "user", "content": "hi"}]})
    assert answer.status_code == 500, "it names its version"
