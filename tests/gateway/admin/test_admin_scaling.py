"""The admin API of numbers of replicas that follow the load: what a key sees, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.gateway.admin.test_admin_api import KEYS, ask
from tests.gateway.fakes import FakeControl, FakeDoor, FakeRouter, Running, running


@pytest.fixture
def server() -> Iterator[Running]:
    with running(FakeRouter("tiny", "team-b"), door=FakeDoor(KEYS), control=FakeControl()) as started:
        yield started


def test_a_key_sees_the_scaling_of_its_models(server: Running) -> None:
    assert [one["model"] for one in ask(server, "GET", "scaling").json()["data"]] == ["tiny"]
    assert ask(server, "GET", "scaling", "narrow").json()["data"] == []
    shown = ask(server, "GET", "scaling/tiny").json()
    assert (shown["desired"], shown["ready"], shown["starting"], shown["rule"]) == (2, 1, 1, "panic")
    assert ask(server, "GET", "scaling/tiny", "narrow").status_code == 404
    assert ask(server, "GET", "scaling/none").status_code == 404
    refused = ask(server, "GET", "scaling/team-b")
    assert (refused.status_code, "fixed number" in refused.text) == (400, True)
