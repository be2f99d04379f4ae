"""The admin API of drift: what a key sees and may do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.gateway.admin.test_admin_api import KEYS, ask
from tests.gateway.fakes import FakeControl, FakeDoor, FakeRouter, Running, running


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def server(control: FakeControl) -> Iterator[Running]:
    with running(FakeRouter("tiny", "team-b"), door=FakeDoor(KEYS), control=control) as started:
        yield started


def test_a_key_sees_the_drift_of_its_models(server: Running) -> None:
    assert [one["model"] for one in ask(server, "GET", "drift").json()["data"]] == ["tiny", "other"]
    assert ask(server, "GET", "drift", "narrow").json()["data"] == []
    assert ask(server, "GET", "drift/tiny").json()["state"] == "watching"
    assert ask(server, "GET", "drift/tiny/reference").json()["streams"]["label"]["counts"] == [990, 10]
    for path in ("drift/tiny", "drift/tiny/reference"):
        assert ask(server, "GET", path, "narrow").status_code == 404
    assert ask(server, "GET", "drift/none").status_code == 404


def test_a_reset_reaches_the_monitors_of_the_keys_models_alone(server: Running, control: FakeControl) -> None:
    assert ask(server, "POST", "drift/tiny/reset", "narrow").status_code == 404
    assert control.drift.asked == []
    assert ask(server, "POST", "drift/tiny/reset").status_code == 200
    assert control.drift.asked == ["tiny"]


@pytest.mark.parametrize("key", ["user", "nobody"])
def test_no_other_scope_reads_or_resets(server: Running, control: FakeControl, key: str) -> None:
    for method, path in (("GET", "drift"), ("GET", "drift/tiny"), ("POST", "drift/tiny/reset")):
        assert ask(server, method, path, key).status_code in (401, 403)
    assert control.drift.asked == []
