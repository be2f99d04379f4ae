"""The admin API of rollouts: which keys may command, what reaches the rollout, and what is refused with its field."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.gateway.admin.test_admin_api import KEYS, ask
from tests.gateway.fakes import FakeControl, FakeDoor, FakeRouter, Running, running

from inferd.rollout.machine import COMMANDS


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def server(control: FakeControl) -> Iterator[Running]:
    with running(FakeRouter("tiny", "team-b"), door=FakeDoor(KEYS), control=control) as started:
        yield started


def test_a_key_sees_the_rollouts_of_its_models(server: Running) -> None:
    assert [one["model"] for one in ask(server, "GET", "rollouts").json()["data"]] == ["tiny", "other"]
    assert ask(server, "GET", "rollouts", "narrow").json()["data"] == []
    shown = ask(server, "GET", "rollouts/tiny").json()
    assert (shown["progress"]["state"], shown["progress"]["share"], shown["steps"]) == ("running", 0.05, [5.0, 100.0])
    assert ask(server, "GET", "rollouts/tiny", "narrow").status_code == 404
    assert ask(server, "GET", "rollouts/none").status_code == 404


def test_commands_reach_the_rollout_with_their_actor_and_reason(server: Running, control: FakeControl) -> None:
    words = [command for command in COMMANDS if command != "promote_full"]
    for word in words:
        assert ask(server, "POST", f"rollouts/tiny/{word}").status_code == 200
    assert control.rollouts.asked == [f"tiny {word} key:boss: {word} by key:boss" for word in words]
    control.rollouts.asked.clear()
    assert ask(server, "POST", "rollouts/tiny/promote", json={"full": True, "reason": "it is good"}).status_code == 200
    assert control.rollouts.asked == ["tiny promote_full key:boss: promote by key:boss: it is good"]


def test_a_bad_answer_is_reported_by_its_request(server: Running, control: FakeControl) -> None:
    assert ask(server, "POST", "rollouts/tiny/bad", json={"request_id": "r7"}).json() == {"noted": True}
    assert control.rollouts.asked == ["tiny bad r7"]
    refused = ask(server, "POST", "rollouts/tiny/bad", json={})
    assert (refused.status_code, "request_id" in refused.text) == (400, True)


@pytest.mark.parametrize(
    ("word", "body", "status", "part"),
    [
        ("start", {"reason": "x" * 201}, 400, "reason has 201 characters, and may have 200. Shorten it"),
        ("start", {"reason": "a\nb"}, 400, "write one line"),
        ("start", {"full": True}, 400, "full is for promote alone"),
        ("start", {"force": True}, 400, "force"),
        ("begin", {}, 405, "does not allow POST"),
    ],
)
def test_what_no_command_means_is_refused(
    server: Running, control: FakeControl, word: str, body: dict[str, object], status: int, part: str
) -> None:
    refused = ask(server, "POST", f"rollouts/tiny/{word}", json=body)
    assert (refused.status_code, part in refused.text) == (status, True), refused.text
    assert control.rollouts.asked == []


@pytest.mark.parametrize("key", ["user", "nobody"])
def test_without_permission_nothing_is_commanded(server: Running, control: FakeControl, key: str) -> None:
    for word in (*COMMANDS, "bad"):
        assert ask(server, "POST", f"rollouts/tiny/{word}", key).status_code in (401, 403, 404)
    assert ask(server, "GET", "rollouts", key).status_code in (401, 403)
    assert control.rollouts.asked == []


def test_a_key_commands_no_rollout_of_models_that_it_may_not_use(server: Running, control: FakeControl) -> None:
    assert ask(server, "POST", "rollouts/tiny/promote", "narrow").status_code == 404
    assert control.rollouts.asked == []
