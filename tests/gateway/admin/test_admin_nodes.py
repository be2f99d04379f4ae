"""The admin API of nodes: machines and their tokens are the operator's, and no tenant's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.gateway.admin.test_admin_api import ADMIN, KEYS, ask
from tests.gateway.fakes import FakeControl, FakeDoor, FakeRouter, Running, running

from inferd.tenancy.principal import Principal


@pytest.fixture
def server() -> Iterator[Running]:
    keys = {**KEYS, "operator": Principal(key_id="operator", scopes=ADMIN)}
    with running(FakeRouter("tiny"), door=FakeDoor(keys), control=FakeControl()) as started:
        yield started


def test_the_operator_sees_nodes_and_makes_tokens(server: Running) -> None:
    (node,) = ask(server, "GET", "nodes", "operator").json()["data"]
    assert (node["name"], node["labels"], node["workers"]) == ("one", {"zone": "a"}, 1)
    made = ask(server, "POST", "nodes/token", "operator")
    assert (made.status_code, made.json()["token"]) == (201, "new")
    revoked = ask(server, "POST", "nodes/token", "operator", json={"revoke": True})
    assert revoked.json()["token"] == "revoked"
    for body in ({"revoke": "yes"}, {"expire": 1}):
        assert ask(server, "POST", "nodes/token", "operator", json=body).status_code == 400


@pytest.mark.parametrize("key", ["boss", "narrow", "user"])
def test_a_tenants_key_does_not(server: Running, key: str) -> None:
    assert ask(server, "GET", "nodes", key).status_code == 403
    assert ask(server, "POST", "nodes/token", key).status_code == 403
