"""The admin API of the registry: what a key sees and may change, and what is refused with its field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gateway.admin.test_admin_api import KEYS, ask
from tests.gateway.fakes import FakeControl, FakeDoor, FakeRouter, Running, running

from inferd import clock, models
from inferd.app.audit import AuditTrail
from inferd.config.versioning import RegistryConfig
from inferd.lifecycle import registry
from inferd.lifecycle.actions import RegistryActions
from inferd.lifecycle.registry import Finding, NewVersion
from inferd.state.audit import AuditLog
from inferd.state.database import Database
from inferd.state.open import open_database
from inferd.state.thread import StateThread


def registered(database: Database, name: str, number: int) -> None:
    new = NewVersion(name=name, source=f"/models/{number}", digest=f"tree-sha256:{number:064x}")
    version = registry.register(database, new, actor="user:1", now=1.0)
    found = Finding(kind="digest", passed=True, summary="", report={})
    registry.verify(database, name, version.version, [found], actor="user:1", now=1.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    database = open_database(None, tmp_path)
    for number, name in enumerate(("churn", "churn", "team-b/risk")):
        registered(database, name, number)
    state = StateThread(lambda: open_database(None, tmp_path))
    state.start(database)
    control = FakeControl()
    control.versions = RegistryActions(state, RegistryConfig, clock.wall)
    with running(FakeRouter("tiny"), door=FakeDoor(KEYS), control=control) as started:
        yield started
    state.close()


def test_a_key_sees_the_versions_of_its_models(server: Running) -> None:
    def names(path: str, key: str = "boss") -> list[tuple[str, int]]:
        return [(one["name"], one["version"]) for one in ask(server, "GET", path, key).json()["data"]]

    assert names("registry") == [("churn", 1), ("churn", 2), ("team-b/risk", 1)]
    assert names("registry", "narrow") == [("team-b/risk", 1)]
    assert names("registry/churn") == [("churn", 1), ("churn", 2)]
    assert names("registry/team-b/risk", "narrow") == [("team-b/risk", 1)]
    shown = ask(server, "GET", "registry/team-b/risk/versions/latest", "narrow").json()
    assert (shown["version"], shown["record"]["stage"]) == (1, "verified")
    for path in ("registry/churn", "registry/churn/history", "registry/churn/versions/1"):
        assert ask(server, "GET", path, "narrow").status_code == 404, path
        assert ask(server, "GET", path).status_code == 200, path
    for path in ("registry/none", "registry/none/history", "registry/churn/versions/9"):
        assert ask(server, "GET", path).status_code == 404, path


def test_actions_have_their_actor_their_reason_and_the_head_of_the_history(server: Running) -> None:
    base = "registry/churn/versions"
    answer = ask(server, "POST", f"{base}/1/validate").json()
    assert (answer["version"]["record"]["stage"], answer["line"], len(answer["hash"])) == ("validated", 10, 64)
    report = {"kind": "golden", "passed": True, "report": {"passed": 98}, "summary": "98 of 100"}
    assert ask(server, "POST", f"{base}/1/evidence", json=report).status_code == 200
    assert ask(server, "POST", f"{base}/1/approve", json={"reason": "ticket 812"}).status_code == 200
    for action in ("canary", "promote"):
        assert ask(server, "POST", f"{base}/1/{action}").status_code == 200
    assert ask(server, "GET", f"{base}/production").json()["version"] == 1
    assert ask(server, "POST", f"{base}/2/reject", json={"reason": "too slow"}).status_code == 200
    assert ask(server, "POST", f"{base}/production/archive").status_code == 200
    lines = ask(server, "GET", "registry/churn/history?limit=3").json()["data"]
    assert [(one["action"], one["actor"], one["reason"]) for one in lines] == [
        ("archive", "key:boss", ""),
        ("reject", "key:boss", "too slow"),
        ("promote", "key:boss", ""),
    ]
    older = ask(server, "GET", f"registry/churn/history?before={lines[-1]['number']}").json()["data"]
    assert [one["action"] for one in older][:3] == ["canary", "approve", "attach"]


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("churn/versions/1/promote", {}, 400, "The version is verified, so 'promote' is not possible"),
        ("churn/versions/1/approve", {}, 400, "Possible is validate or reject"),
        ("churn/versions/1/reject", {}, 400, "needs a reason"),
        ("churn/versions/1/validate", {"reason": "a\nb"}, 400, "write one line"),
        ("churn/versions/1/validate", {"force": True}, 400, "force"),
        ("churn/versions/1/fly", {}, 405, "does not allow POST"),
        ("churn/versions/beta/validate", {}, 404, "no version, alias or stage 'beta'"),
        ("none/versions/1/validate", {}, 404, "The registry has no model 'none'"),
        ("churn/versions/1/evidence", {"kind": "digest", "passed": True, "report": {}}, 400, "digest"),
        ("churn/versions/1/evidence", {"kind": "golden", "report": {}}, 400, "passed"),
        ("churn/versions/1/evidence", {"kind": "golden", "passed": True, "report": []}, 400, "report"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(
    server: Running, path: str, body: dict[str, object], status: int, part: str
) -> None:
    refused = ask(server, "POST", f"registry/{path}", json=body)
    assert (refused.status_code, part in refused.text) == (status, True), refused.text
    assert ask(server, "GET", "registry/churn/versions/1").json()["record"]["stage"] == "verified"


def test_without_permission_nothing_is_shown_or_changed(server: Running) -> None:
    for key in ("user", "nobody"):
        for path in ("registry", "registry/churn", "registry/churn/history", "registry/churn/versions/1"):
            assert ask(server, "GET", path, key).status_code in (401, 403), path
    before = ask(server, "GET", "registry/churn/history").json()
    for action in ("verify", "validate", "approve", "canary", "promote", "withdraw", "archive", "reject"):
        path = f"registry/churn/versions/1/{action}"
        for key in ("user", "nobody"):
            assert ask(server, "POST", path, key, json={"reason": "so"}).status_code in (401, 403), action
        assert ask(server, "POST", path, "narrow", json={"reason": "so"}).status_code == 404, action
    assert ask(server, "GET", "registry/churn/history").json() == before
    assert ask(server, "GET", "registry/churn/versions/1").json()["record"]["stage"] == "verified"


def test_the_audit_log_has_the_head_of_the_history_after_each_action(tmp_path: Path) -> None:
    trail = AuditTrail(tmp_path, lambda event: None)
    with running(FakeRouter("tiny"), door=FakeDoor(KEYS), control=FakeControl(), audit=trail) as server:
        assert ask(server, "POST", "registry/tiny/versions/1/approve").status_code == 200
        report = {"kind": "golden", "passed": True, "report": {}}
        assert ask(server, "POST", "registry/tiny/versions/1/evidence", json=report).status_code == 200
    trail.close()
    assert [(one.action, one.target, one.outcome, one.detail) for one in reversed(AuditLog(tmp_path).entries())] == [
        ("registry_approve", "tiny/versions/1", "begun", ""),
        ("registry_approve", "tiny/versions/1", "done", f"registry line 1:{'0' * 64}"),
        ("registry_attach", "tiny/versions/1", "begun", ""),
        ("registry_attach", "tiny/versions/1", "done", f"registry line 1:{'0' * 64}"),
    ]


def test_files_are_registered_verified_and_named_over_http(server: Running, tmp_path: Path) -> None:
    file = tmp_path / "digits.onnx"
    file.write_bytes((models.path("demo-digits") / "model.onnx").read_bytes())
    asked = {"source": str(file), "tags": {"auc": "0.9"}, "run_id": "5d1e"}
    made = ask(server, "POST", "registry/team/digits/versions", json=asked)
    assert made.status_code == 200, made.text
    version = made.json()["version"]
    assert (version["version"], version["record"]["stage"]) == (1, "verified")
    assert (version["tags"], version["run_id"], version["record"]["registrant"]) == ({"auc": "0.9"}, "5d1e", "key:boss")
    assert [one["name"] for one in version["contract"]["inputs"]] == ["pixels"]
    assert ask(server, "POST", "registry/team/digits/versions", json=asked).json()["error"]["param"] == "digest"
    named = ask(server, "POST", "registry/team/digits/aliases/champion", json={"version": 1}).json()["version"]
    assert named["aliases"] == ["champion"]
    assert ask(server, "GET", "registry/team/digits/versions/champion").json()["version"] == 1
    assert ask(server, "DELETE", "registry/team/digits/aliases/champion").json()["version"]["aliases"] == []
    assert ask(server, "DELETE", "registry/team/digits/aliases/champion").status_code == 404
    assert ask(server, "POST", "registry/team/digits/versions/1/verify").status_code == 200
    file.write_bytes(file.read_bytes() + b"\0")
    found = ask(server, "POST", "registry/team/digits/versions/1/verify").json()["version"]["record"]["evidence"]
    assert [(one["kind"], one["passed"]) for one in found] == [("digest", False)]
    file.unlink()
    assert ask(server, "POST", "registry/team/digits/versions/1/verify").status_code == 400
    lines = ask(server, "GET", "registry/team/digits/history").json()["data"]
    assert [one["action"] for one in lines] == ["attach", "attach", "unalias", "alias", "verify", "attach", "register"]


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("churn/versions", {"source": "digits.onnx"}, 400, "source must be an absolute path"),
        ("churn/versions", {"source": "/nowhere/digits.onnx"}, 400, "/nowhere/digits.onnx"),
        ("churn/versions", {"path": "/x"}, 400, "path"),
        ("a b/versions", {"source": "/nowhere"}, 400, "cannot name a model"),
        ("churn/aliases/production", {"version": 1}, 400, "cannot be an alias"),
        ("churn/aliases/champion", {"version": 9}, 404, "no version, alias or stage '9'"),
        ("churn/aliases/champion", {"version": "1"}, 400, "version"),
        ("churn/versions/9/verify", {}, 404, "no version, alias or stage '9'"),
    ],
)
def test_what_cannot_be_registered_or_named_is_refused_with_its_field(
    server: Running, path: str, body: dict[str, object], status: int, part: str
) -> None:
    refused = ask(server, "POST", f"registry/{path}", json=body)
    assert (refused.status_code, part in refused.text) == (status, True), refused.text
    assert len(ask(server, "GET", "registry/churn").json()["data"]) == 2


def test_a_key_of_some_models_registers_and_names_no_others(server: Running) -> None:
    for path in ("churn/versions", "churn/aliases/champion", "churn/versions/1/verify"):
        body = {"source": "/x"} if path.endswith("versions") else {"version": 1}
        assert ask(server, "POST", f"registry/{path}", "narrow", json=body).status_code == 404, path
        assert ask(server, "POST", f"registry/{path}", "user", json=body).status_code in (401, 403), path
    assert ask(server, "DELETE", "registry/churn/aliases/champion", "narrow").status_code == 404
