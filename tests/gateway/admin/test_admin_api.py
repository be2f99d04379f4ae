"""The admin API changes the server with an admin key only, and a key never makes a stronger one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from tests.gateway.fakes import FakeControl, FakeDoor, FakeRouter, Running, running

from inferd.gateway.control import (
    DeviceReport,
    EnergyReport,
    ModelReport,
    ReloadReport,
    ServerReport,
    TenantReport,
    UseReport,
)
from inferd.router.hints import HintReport
from inferd.state.group import GatewayReport
from inferd.tenancy.keys import KeySpec
from inferd.tenancy.principal import OPERATOR, Limits, Principal, Scope

ADMIN: frozenset[Scope] = frozenset(("admin",))
BOSS = Principal(key_id="boss", tenant="ops", scopes=ADMIN)
KEYS = {
    "boss": BOSS,
    "limited": Principal(
        key_id="limited", tenant="ops", scopes=ADMIN, limits=Limits(rpm=10, tpm=1000, max_in_flight=2), priority=0
    ),
    "narrow": Principal(key_id="narrow", tenant="ops", scopes=ADMIN, models=("team-*",)),
    "brief": Principal(key_id="brief", tenant="ops", scopes=ADMIN, expires_at=time.time() + 3600),
    "user": Principal(key_id="user", tenant="ops", scopes=frozenset(("infer", "models"))),
}


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def server(control: FakeControl) -> Iterator[Running]:
    with running(FakeRouter("a", "team-b"), door=FakeDoor(KEYS), control=control) as started:
        yield started


def ask(server: Running, method: str, path: str, key: str = "boss", **arguments: Any) -> httpx.Response:
    return server.http.request(method, server.url + "/admin/" + path, headers={"x-api-key": key}, **arguments)


def make(server: Running, key: str, **spec: Any) -> httpx.Response:
    return ask(server, "POST", "keys", key, json={"tenant": "ops", **spec})


def test_actions_reach_the_server(server: Running, control: FakeControl) -> None:
    assert ask(server, "GET", "status").json()["models"][0]["replicas"][0]["name"] == "worker 0"
    for action in ("load", "unload", "restart"):
        assert ask(server, "POST", f"models/a/{action}").status_code == 200
    assert ask(server, "POST", "models/a/unload").json() == {"model": "a", "freed_bytes": 7}
    assert ask(server, "POST", "drain").status_code == 202
    assert control.asked == ["load a", "unload a", "restart a", "unload a", "drain"]
    for where in ("models/z/load", "models//load", "models/load", "models/a/explode"):
        assert ask(server, "POST", where).status_code == 404, where
    assert ask(server, "GET", "models/a/load").status_code == 405


def test_the_phases_of_loads_are_shown_of_the_models_that_a_key_may_use(control: FakeControl) -> None:
    with running(FakeRouter("tiny", "team-b"), control=control, principal=OPERATOR) as server:
        everything = ask(server, "GET", "startup").json()
    assert everything["gateway"]["phases"] == [{"name": "import", "begin_s": 0.0, "seconds": 0.5}]
    assert [(load["model"], load["state"], load["reason"]) for load in everything["loads"]] == [
        ("tiny", "ready", ""),
        ("team-b", "failed", "No file /secret."),
    ]
    with running(FakeRouter("tiny", "team-b"), door=FakeDoor(KEYS), control=control) as server:
        (own,) = ask(server, "GET", "startup", "narrow").json()["loads"]
        assert ask(server, "GET", "startup", "user").status_code == 403
    assert (own["model"], own["cause"], own["restarts"], own["reason"]) == ("team-b", "restart", 2, "")


def test_a_models_name_may_have_slashes(control: FakeControl) -> None:
    with running(FakeRouter("org/chat"), control=control, principal=OPERATOR) as server:
        assert ask(server, "POST", "models/org/chat/load").status_code == 200
        assert ask(server, "POST", "models/org%2Fchat/load").status_code == 200
    assert control.asked == ["load org/chat", "load org/chat"]


def test_an_admin_of_some_models_sees_no_others(server: Running, control: FakeControl) -> None:
    assert ask(server, "POST", "models/a/unload", "narrow").status_code == 404
    assert ask(server, "POST", "models/team-b/unload", "narrow").status_code == 200
    assert control.asked == ["unload team-b"]


def _use(name: str) -> UseReport:
    return UseReport(
        name=name,
        device_s=1.0,
        energy_j=2.0,
        tokens=3,
        device_s_per_1000_tokens=4.0,
        energy_j_per_1000_tokens=5.0,
        cost=6.0,
    )


def _device(name: str) -> DeviceReport:
    return DeviceReport(
        device="gpu0",
        kind="gpu",
        name=name,
        duty=0.5,
        memory_used_bytes=None,
        memory_total_bytes=None,
        temperature_c=None,
        power_w=None,
        idle_j=None,
    )


class Crowded(FakeControl):
    """A server of several tenants, of which some things went wrong."""

    def status(self) -> ServerReport:
        return msgspec.structs.replace(
            super().status(),
            config_path="/etc/inferd/canary.yaml",
            last_reload=ReloadReport(at=1.0, accepted=True, details=("tenants.canary: rpm 7",), failed=("canary",)),
            memory_budget_bytes=99,
            memory_bytes=30,
            gateways=[GatewayReport(id="1", host="machine", is_this=False, differs=["models.canary"])],
            hints=HintReport(sent=7),
            models=[self._report("a"), self._report("team-b"), self._report("canary")],
            tenants=[
                TenantReport(name="ops", limits={"requests": 5.0}, used={"requests": 1.0}),
                TenantReport(name="canary", limits={"requests": 6.0}, used={"requests": 2.0}),
            ],
            energy=EnergyReport(
                currency="EUR",
                devices=[_device("gpu of canary")],
                models=[_use("team-b"), _use("canary")],
                tenants=[_use("ops"), _use("canary")],
            ),
        )

    def _report(self, name: str) -> ModelReport:
        report = super()._report(name)
        [replica] = report.replicas
        replica = msgspec.structs.replace(replica, detail="/srv/canary/config.json is missing")
        return msgspec.structs.replace(report, memory_bytes=10, detail="canary needs 9 GB", replicas=[replica])


def test_a_tenants_admin_sees_what_is_its_own() -> None:
    with running(FakeRouter("a", "team-b", "canary"), door=FakeDoor(KEYS), control=Crowded()) as server:
        reply = ask(server, "GET", "status", "narrow")
        assert b"canary" not in reply.content
        report = reply.json()
        assert [model["name"] for model in report["models"]] == ["team-b"]
        assert [tenant["name"] for tenant in report["tenants"]] == ["ops"]
        assert (report["memory_bytes"], report["memory_budget_bytes"]) == (10, None)
        energy = report["energy"]
        assert (energy["devices"], energy["models"]) == ([], []), "sums of all tenants"
        assert [use["name"] for use in energy["tenants"]] == ["ops"]
        assert [model["name"] for model in ask(server, "GET", "status").json()["models"]] == ["a", "team-b", "canary"]
        for action in ("load", "restart"):
            assert b"canary" not in ask(server, "POST", f"models/team-b/{action}", "narrow").content
    control = Crowded()
    with running(FakeRouter("a"), control=control, principal=OPERATOR) as server:
        assert ask(server, "GET", "status").content == msgspec.json.encode(control.status())


def test_a_refused_reload_lists_what_is_wrong_to_the_operator(server: Running, control: FakeControl) -> None:
    assert ask(server, "POST", "reload").json()["accepted"] is True
    control.problems = ("server.port: it is 'x'.", "models: none.")
    reply = ask(server, "POST", "reload")
    assert reply.status_code == 422
    assert [told[:32] for told in reply.json()["details"]] == ["Number of changes or mistakes: 2"]
    with running(FakeRouter("a"), control=control, principal=OPERATOR) as own:
        reply = ask(own, "POST", "reload")
        assert (reply.status_code, reply.json()["details"]) == (422, list(control.problems))


def test_a_reload_whose_model_does_not_load_is_no_success(server: Running, control: FakeControl) -> None:
    control.failed = ("chat: its config.json is missing. What served before goes on serving.",)
    reply = ask(server, "POST", "reload")
    assert (reply.status_code, reply.json()["accepted"]) == (422, True)
    assert [told[:19] for told in reply.json()["failed"]] == ["Number of models: 1"]
    with running(FakeRouter("a"), control=control, principal=OPERATOR) as own:
        assert ask(own, "POST", "reload").json()["failed"] == list(control.failed)


def test_a_key_is_made_listed_rotated_and_ended(server: Running) -> None:
    made = make(server, "boss", rpm=5, models=["a"])
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    key_id = made.json()["info"]["id"]
    assert made.json()["key"] not in ask(server, "GET", "keys").text
    rotated = ask(server, "POST", f"keys/{key_id}/rotate", json={"overlap_s": 60})
    assert (rotated.status_code, rotated.headers["cache-control"]) == (201, "no-store")
    assert ask(server, "POST", f"keys/{key_id}/rotate").status_code == 201
    assert ask(server, "DELETE", f"keys/{key_id}").json()["state"] == "revoked"
    assert len(ask(server, "GET", "keys").json()["data"]) == 3
    assert ask(server, "DELETE", "keys/none").status_code == 404
    for given, told in (("none", "'none'"), ("sk-proj-SECRET", "'sk-...'"), ("vnDhSECRETSECRETSECRET", "'vnDh...'")):
        message = ask(server, "DELETE", f"keys/{given}").json()["error"]["message"]
        assert message == f"There is no key with the id {told}; GET /admin/keys lists them."


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"tenant": "ops", "hash": "x"}', b'{"tenant": "ops", "scopes": ["root"]}', b"{" * 70_000]
)
def test_a_key_that_is_no_key_is_refused(server: Running, control: FakeControl, body: bytes) -> None:
    assert ask(server, "POST", "keys", content=body).status_code in (400, 413)
    assert not control.keys.keys


@pytest.mark.parametrize(
    ("key", "spec"),
    [
        ("boss", {"tenant": "team"}),
        ("limited", {}),
        ("limited", {"rpm": 11, "tpm": 1000, "max_in_flight": 2}),
        ("limited", {"rpm": 10, "tpm": 1001, "max_in_flight": 2}),
        ("limited", {"rpm": 10, "tpm": 1000, "max_in_flight": 3}),
        ("limited", {"rpm": 10, "tpm": 1000}),
        ("limited", {"rpm": 10, "tpm": 1000, "max_in_flight": 2, "priority": "interactive"}),
        ("narrow", {}),
        ("narrow", {"models": ["a"]}),
        ("narrow", {"models": ["*"]}),
        ("narrow", {"models": ["team-b", "team"]}),
        ("brief", {}),
        ("brief", {"expires_in_s": 7200}),
        ("user", {}),
    ],
)
def test_a_key_never_makes_a_stronger_one(
    server: Running, control: FakeControl, key: str, spec: dict[str, Any]
) -> None:
    reply = make(server, key, **spec)
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "insufficient_permissions")
    assert not control.keys.keys


def test_a_scope_that_no_key_has_is_refused_by_name(server: Running, control: FakeControl) -> None:
    for scope in ("public", "root"):
        reply = make(server, "boss", scopes=["infer", scope])
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "scopes[1]")
        assert f'"{scope}"' in reply.json()["error"]["message"]
    assert not control.keys.keys


@pytest.mark.parametrize(
    ("key", "spec"),
    [
        ("limited", {"rpm": 10, "tpm": 1000, "max_in_flight": 2, "priority": "batch"}),
        ("narrow", {"models": ["team-*"]}),
        ("narrow", {"models": ["team-b"]}),
        ("brief", {"expires_in_s": 60}),
    ],
)
def test_a_key_makes_weaker_ones(server: Running, key: str, spec: dict[str, Any]) -> None:
    assert make(server, key, **spec).status_code == 201


def test_keys_of_another_tenant_do_not_exist(server: Running, control: FakeControl) -> None:
    theirs = control.keys.add(KeySpec(tenant="team"))
    assert ask(server, "GET", "keys").json() == {"data": []}
    missing = ask(server, "DELETE", "keys/none")
    for method, path in [("DELETE", f"keys/{theirs.id}"), ("POST", f"keys/{theirs.id}/rotate")]:
        reply = ask(server, method, path)
        told = missing.text.replace("'none'", f"'{theirs.id}'")
        assert (reply.status_code, reply.text) == (404, told)
    assert control.keys.keys == [theirs]


def test_a_key_does_not_take_over_a_stronger_one_by_rotating_it(server: Running, control: FakeControl) -> None:
    strong = control.keys.add(KeySpec(tenant="ops", rpm=100, tpm=100, max_in_flight=1))
    assert ask(server, "POST", f"keys/{strong.id}/rotate", "limited").status_code == 403
    lasting = control.keys.add(KeySpec(tenant="ops"))
    assert ask(server, "POST", f"keys/{lasting.id}/rotate", "brief").status_code == 403
    assert control.keys.keys == [strong, lasting]


def test_the_operator_sees_and_makes_all(control: FakeControl) -> None:
    theirs = control.keys.add(KeySpec(tenant="team"))
    with running(control=control, door=FakeDoor({}), principal=OPERATOR) as server:
        assert [info["id"] for info in ask(server, "GET", "keys").json()["data"]] == [theirs.id]
        assert make(server, "", tenant="other", scopes=["admin"]).status_code == 201


def test_a_server_without_administration_says_so() -> None:
    with running(door=FakeDoor(KEYS)) as server:
        reply = ask(server, "GET", "status")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_control")


def test_a_web_page_has_no_way_in(server: Running, control: FakeControl) -> None:
    for origin in ("https://evil.example", "null", "http://localhost.evil.example", server.url + "0"):
        reply = server.http.post(
            server.url + "/admin/drain", headers={"authorization": "Bearer boss", "origin": origin}
        )
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "origin_not_allowed"), origin
    assert not control.asked
    assert ask(server, "GET", "status").json()["status"] == "serving"
