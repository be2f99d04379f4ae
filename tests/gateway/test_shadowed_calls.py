"""Calls of a model whose rollout copies requests or reads refusals: what is copied, and that clients notice nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from tests.gateway.fakes import FakeRouter, Running, post, running, words
from tests.gateway.test_assigned_units import CONFIG, SPLIT, divide
from tests.worker.watching import until_now

from inferd.errors import InferdError, InternalError
from inferd.events import CopyEnded, Event, HttpServed
from inferd.rollout.copies import Copies
from inferd.types import GenerateRequest, Output

SHADOW = SPLIT._replace(share=0.0, shadow=1.0)
BODY = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


class Told:
    """What came of the copies."""

    def __init__(self) -> None:
        self.events: list[CopyEnded] = []

    def __call__(self, event: Event) -> None:
        assert isinstance(event, CopyEnded)
        self.events.append(event)

    def results(self, count: int) -> list[str]:
        until_now(lambda: len(self.events) >= count, f"{count} copies have ended")
        return [event.result for event in self.events]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def server(told: Told) -> Iterator[Running]:
    copies = Copies(told)
    with running(FakeRouter("chat", "chat@2"), config=CONFIG, copies=copies) as started:
        divide(started, SHADOW)
        yield started
    copies.close()


def models_asked(server: Running) -> list[str]:
    return [stream.request.model for stream in server.router.streams]


def chat(server: Running, **fields: object) -> str:
    answer = post(server, "/v1/chat/completions", {**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_an_answered_chat_is_copied_and_compared(server: Running, told: Told, fields: dict[str, object]) -> None:
    text = chat(server, **fields)
    assert "Hello" in text
    assert told.results(1) == ["equal"]
    assert models_asked(server) == ["chat", "chat@2"]
    event = server.served()
    assert (event.model, event.status) == ("chat", 200)
    assert event.assigned is not None
    assert told.events[0].request_id.startswith("chatcmpl-")
    copy = server.router.streams[1].request
    assert (copy.is_copy, copy.priority, copy.tenant) == (True, 1, "(copies)")


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_a_copy_begins_behind_the_last_byte_of_the_answer(
    server: Running, told: Told, fields: dict[str, object]
) -> None:
    whole, were_over = server.router.script, []

    def script(request: GenerateRequest) -> Sequence[Output | InferdError | None]:
        assert whole is not None
        if request.is_copy:
            were_over.append(any(isinstance(event, HttpServed) for event in server.events))
        return whole(request)

    server.router.script = script
    chat(server, **fields)
    assert told.results(1) == ["equal"]
    assert were_over == [True]


def test_a_copy_that_fails_is_told_and_no_client_s(server: Running, told: Told) -> None:
    whole = server.router.script

    def script(request: GenerateRequest) -> Sequence[Output | InferdError | None]:
        assert whole is not None
        return [InternalError("it fails")] if request.model == "chat@2" else whole(request)

    server.router.script = script
    assert "Hello" in chat(server)
    assert told.results(1) == ["failed"]
    assert server.served().status == 200


def test_only_shadowed_units_are_copied(server: Running, told: Told) -> None:
    divide(server, SPLIT._replace(share=0.0, shadow=0.5))
    units = set()
    for name in map(str, range(16)):
        chat(server, user=name)
        assigned = server.served().assigned
        assert assigned is not None
        units.add(assigned.unit)
    until_now(lambda: models_asked(server).count("chat@2") == len(told.events) > 0, "the copies have ended")
    assert {event.assigned.unit for event in told.events} < units
    first = len(told.events)
    for name in map(str, range(16)):
        chat(server, user=name)
    told.results(2 * first)
    assert len({event.assigned.unit for event in told.events}) == first, "the same units again"


def test_what_names_its_version_or_has_no_other_is_not_copied(server: Running, told: Told) -> None:
    chat(server, model="chat@1")
    server.router.statuses[1].state = "failed"
    chat(server)
    server.router.statuses[1].state = "ready"
    divide(server, SPLIT._replace(share=0.0, shadow=0.0))
    chat(server)
    divide(server, SPLIT._replace(share=1.0, is_counted=False))
    chat(server)
    assert models_asked(server) == ["chat", "chat", "chat", "chat@2"]
    assert not told.events


def test_refusals_are_noted_of_both_versions_and_not_where_the_other_one_answered(server: Running) -> None:
    texts = {"chat": "I'm sorry, I can't help with that.", "chat@2": "Of course: here it is."}

    def script(request: GenerateRequest) -> Sequence[Output | InferdError | None]:
        text = texts[request.model]
        return [InternalError("it fails")] if not text else words(text)(request)

    server.router.script = script
    divide(server, SPLIT._replace(reads_refusals=True))

    def refusals() -> dict[str, set[bool]]:
        found: dict[str, set[bool]] = {"chat": set(), "chat@2": set()}
        for name in map(str, range(12)):
            chat(server, user=name)
            assigned = server.served().assigned
            assert assigned is not None
            found["chat@2" if assigned.is_new else "chat"].add(assigned.is_refusal)
        return found

    assert refusals() == {"chat": {True}, "chat@2": {False}}
    texts["chat@2"] = ""
    assert refusals() == {"chat": {True}, "chat@2": {False}}, "the stable version refused in its place"
    divide(server, SPLIT)
    assert refusals() == {"chat": {False}, "chat@2": {False}}, "no guard wants to know"
