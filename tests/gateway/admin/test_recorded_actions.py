"""Every admin action has its lines in the audit log before it is answered, and none happens without the first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.fakes import FakeAuditor, FakeControl, FakeDoor, FakeRouter, Running, running
from tests.worker.watching import until_now

from inferd.app import refused_access
from inferd.app.audit import AuditTrail
from inferd.events import AdminActed, Event
from inferd.gateway.routes import ROUTES
from inferd.state.audit import AuditLog
from inferd.tenancy.principal import OPERATOR, Principal, Scope

ADMIN: frozenset[Scope] = frozenset(("admin",))
KEYS = {
    "ops": Principal(key_id="ops", scopes=ADMIN),
    "boss": Principal(key_id="boss", tenant="team-a", scopes=ADMIN),
    "user": Principal(key_id="user", tenant="team-a", scopes=frozenset(("infer", "models"))),
}


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def trail(tmp_path: Path, events: list[Event]) -> Iterator[AuditTrail]:
    made = AuditTrail(tmp_path, events.append)
    yield made
    made.close()


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def server(control: FakeControl, trail: AuditTrail) -> Iterator[Running]:
    with running(FakeRouter("a"), door=FakeDoor(KEYS), control=control, audit=trail) as started:
        yield started


def ask(server: Running, method: str, path: str, key: str = "ops", **arguments: Any) -> httpx.Response:
    headers = {"x-api-key": key, "x-request-id": "req-1"}
    return server.http.request(method, server.url + path, headers=headers, **arguments)


def lines(folder: Path) -> list[tuple[str, str, str, str, str]]:
    entries = reversed(AuditLog(folder).entries())
    return [(one.actor, one.tenant, one.action, one.target, one.outcome) for one in entries]


def test_an_action_has_two_lines_with_who_asked_and_what_came_of_it(
    server: Running, tmp_path: Path, events: list[Event]
) -> None:
    assert ask(server, "POST", "/admin/models/a/load", "boss").status_code == 200
    assert lines(tmp_path) == [
        ("key:boss", "team-a", "load", "a", "begun"),
        ("key:boss", "team-a", "load", "a", "done"),
    ]
    end, begin = AuditLog(tmp_path).entries()
    assert (end.of, end.request_id, begin.request_id) == (begin.seq, "req-1", "req-1")
    assert AuditLog(tmp_path).verify().problem == ""
    acted = [event for event in events if isinstance(event, AdminActed)]
    assert [event.seq for event in acted] == [1, 2]
    assert acted[-1].hash == AuditLog(tmp_path).head().hash


def test_a_new_keys_id_is_recorded_and_its_secret_is_not(server: Running, tmp_path: Path) -> None:
    made = ask(server, "POST", "/admin/keys", json={"tenant": "t"}).json()
    assert AuditLog(tmp_path).entries()[0].detail == f"new key {made['info']['id']}"
    assert all(made["key"] not in path.read_text() for path in (tmp_path / "audit").iterdir())


def test_a_refused_action_is_recorded_with_its_reason(server: Running, tmp_path: Path) -> None:
    assert ask(server, "POST", "/admin/models/z/load").status_code == 404
    end = AuditLog(tmp_path).entries()[0]
    assert (end.outcome, end.target, end.detail) == ("refused", "z", "model_not_found")


def test_reading_is_not_recorded(server: Running, tmp_path: Path) -> None:
    assert ask(server, "GET", "/admin/status").status_code == 200
    assert ask(server, "GET", "/v1/models", "user").status_code == 200
    assert ask(server, "GET", "/v1/models", "wrong").status_code == 401
    assert lines(tmp_path) == []


@pytest.mark.parametrize(
    ("key", "status", "expected"),
    [
        ("wrong", 401, ("address:127.0.0.1", "", "authenticate", "/admin/drain", "refused")),
        ("user", 403, ("key:user", "team-a", "authenticate", "/admin/drain", "refused")),
    ],
)
def test_a_refused_request_for_administration_is_recorded(
    server: Running, control: FakeControl, tmp_path: Path, key: str, status: int, expected: tuple[str, ...]
) -> None:
    assert ask(server, "POST", "/admin/drain", key).status_code == status
    until_now(lambda: lines(tmp_path) == [expected], "the refusal has its line")
    (entry,) = AuditLog(tmp_path).entries()
    assert entry.request_id == "req-1"
    assert (
        entry.detail
        == {
            "wrong": "invalid_api_key",
            "user": "insufficient_permissions from 127.0.0.1",
        }[key]
    )
    assert control.asked == []


def test_a_failed_sign_in_is_recorded_without_the_key(server: Running, tmp_path: Path) -> None:
    answer = server.http.post(server.url + "/console/session", json={"key": "sk-inf-secret"})
    assert answer.status_code == 401
    until_now(lambda: bool(lines(tmp_path)), "the refusal has its line")
    assert lines(tmp_path) == [("address:127.0.0.1", "", "sign_in", "/console/session", "refused")]
    assert all("secret" not in path.read_text() for path in (tmp_path / "audit").iterdir())


def test_a_flood_of_refusals_is_a_line_at_once_and_one_at_the_end(tmp_path: Path, events: list[Event]) -> None:
    trail = AuditTrail(tmp_path, events.append)
    with running(FakeRouter("a"), door=FakeDoor(KEYS), control=FakeControl(), audit=trail) as server:
        for number in range(100):
            headers = {"x-api-key": f"guess-{number}"}
            assert server.http.get(server.url + "/admin/keys", headers=headers).status_code == 401
        for _ in range(30):
            server.http.post(server.url + "/console/session", json={"key": "guess"})
        until_now(lambda: len(lines(tmp_path)) == 1, "the first refusal has its line")
    trail.close()
    details = [(entry.action, entry.detail) for entry in AuditLog(tmp_path).entries()]
    assert details == [
        ("sign_in", "invalid_api_key, 10 times within 60 s"),
        ("sign_in", "too_many_sign_ins, 20 times within 60 s"),
        ("authenticate", "invalid_api_key, 99 times within 60 s"),
        ("authenticate", "invalid_api_key"),
    ]
    assert AuditLog(tmp_path).verify().problem == ""
    assert [event.seq for event in events if isinstance(event, AdminActed)] == [1, 2, 3, 4]


def test_a_window_of_refusals_ends_while_the_server_runs(
    tmp_path: Path, trail: AuditTrail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused_access, "FIRST_WINDOW_S", 0.05)
    with running(FakeRouter("a"), door=FakeDoor(KEYS), control=FakeControl(), audit=trail) as server:

        def asked_until_summed_up() -> bool:
            ask(server, "GET", "/admin/keys", "wrong")
            return any(" times within" in entry.detail for entry in AuditLog(tmp_path).entries())

        until_now(asked_until_summed_up, "the window has its line")


def test_refusals_do_not_wait_for_the_disk(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("a file where the folder should be")
    trail = AuditTrail(tmp_path, lambda event: None)
    with running(FakeRouter("a"), door=FakeDoor(KEYS), control=FakeControl(), audit=trail) as server:
        for _ in range(3):
            assert ask(server, "GET", "/admin/keys", "wrong").status_code == 401
            assert ask(server, "GET", "/admin/status").status_code == 200
    trail.close()


@pytest.mark.parametrize(
    "route", [route for route in ROUTES if route.scope == "admin" and route.method != "GET"], ids=lambda r: r.pattern
)
def test_no_action_happens_without_its_line(control: FakeControl, route: Any) -> None:
    with running(FakeRouter("a"), control=control, principal=OPERATOR, audit=FakeAuditor(room=0)) as server:
        path = route.pattern.replace("{model}", "a").replace("{id}", "key0")
        refused = server.http.request(route.method, server.url + path, json={"tenant": "t"})
    assert refused.status_code == 503
    assert "No space left" in refused.text
    assert control.asked == []
    if route.errors.wire.__name__ == "ErrorBody":
        assert refused.json()["error"]["code"] == "audit_unavailable"


def test_a_disk_that_fills_up_during_an_action_is_told(control: FakeControl) -> None:
    with running(FakeRouter("a"), control=control, principal=OPERATOR, audit=FakeAuditor(room=1)) as server:
        answer = server.http.post(server.url + "/admin/models/a/load")
    assert answer.status_code == 503
    assert "The action was begun, with the outcome 'done'" in answer.json()["error"]["message"]
    assert control.asked == ["load a"]


def test_the_operator_reads_the_log_and_a_tenant_does_not(server: Running) -> None:
    for _ in range(3):
        ask(server, "POST", "/admin/models/a/load")
    found = ask(server, "GET", "/admin/audit?limit=2").json()["data"]
    assert [entry["seq"] for entry in found] == [6, 5]
    assert [entry["seq"] for entry in ask(server, "GET", "/admin/audit?before=3").json()["data"]] == [2, 1]
    assert ask(server, "GET", "/admin/audit", "boss").status_code == 403
    for query in ("limit=0", "limit=1001", "limit=x", "before=-1", "before=" + "9" * 5000):
        assert ask(server, "GET", "/admin/audit?" + query).status_code == 400, query


def test_a_disk_that_hangs_refuses_in_bounded_time(control: FakeControl, tmp_path: Path) -> None:
    import threading

    trail, hung = AuditTrail(tmp_path, lambda event: None, wait_s=0.1), threading.Event()

    def hang() -> None:
        hung.wait(30)

    trail._jobs.put(hang)
    with running(FakeRouter("a"), control=control, principal=OPERATOR, audit=trail) as server:
        refused = server.http.post(server.url + "/admin/models/a/load")
        served = server.http.get(server.url + "/health/live")
    hung.set()
    trail.close()
    assert (refused.status_code, served.status_code) == (503, 200)
    assert refused.json()["error"]["code"] == "audit_unavailable"
    assert control.asked == []


def test_a_sign_in_to_the_console_is_recorded(server: Running, tmp_path: Path) -> None:
    answer = server.http.post(server.url + "/console/session", json={"key": "boss"})
    assert answer.status_code == 204
    assert lines(tmp_path) == [("key:boss", "team-a", "sign_in", "", "done")]


def test_a_reload_is_recorded_with_what_changed(server: Running, tmp_path: Path) -> None:
    told = ask(server, "POST", "/admin/reload").json()["details"]
    assert AuditLog(tmp_path).entries()[0].detail == " ".join(told)
