"""Probes and small pages tell the truth."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.gateway.fakes import FakeRouter, running

READY = ["/health", "/health/ready", "/readyz", "/ping"]
LIVE = ["/health/live", "/healthz", "/livez"]


def test_the_gateway_never_imports_torch() -> None:
    code = "import sys, inferd.gateway.server, inferd.http.listener; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ready_needs_a_ready_replica_of_every_model() -> None:
    router = FakeRouter("a", "b")
    with running(router) as server:
        for path in READY + LIVE:
            assert server.http.get(server.url + path).status_code == 200, path
        router.statuses[1].replicas_ready = 0
        router.statuses[1].state = "loading"
        router.statuses[1].detail = "reading weights"
        for path in READY:
            reply = server.http.get(server.url + path)
            assert reply.status_code == 503
            assert reply.json() == {
                "status": "not_ready",
                "models": {
                    "a": {"state": "ready", "replicas_ready": 1, "replicas": 1, "detail": ""},
                    "b": {"state": "loading", "replicas_ready": 0, "replicas": 1, "detail": "reading weights"},
                },
            }
        for path in LIVE:
            assert server.http.get(server.url + path).status_code == 200


def test_a_model_that_is_loaded_when_asked_for_does_not_make_a_server_unready() -> None:
    router = FakeRouter("a", "b")
    router.statuses[1].replicas_ready, router.statuses[1].state, router.statuses[1].load = 0, "unloaded", "on_demand"
    with running(router) as server:
        assert all(server.http.get(server.url + path).status_code == 200 for path in READY)
        router.statuses[0].replicas_ready = 0
        assert all(server.http.get(server.url + path).status_code == 503 for path in READY)


def test_a_remote_server_that_is_away_takes_its_models_and_not_the_others_with_it() -> None:
    router = FakeRouter("here", "far")
    far = router.statuses[1]
    far.has_local, far.has_remote, far.replicas_ready, far.state = False, True, 0, "unavailable"
    with running(router) as server:
        assert server.http.get(server.url + "/health/ready").status_code == 200
        router.statuses[0].replicas_ready = 0
        assert server.http.get(server.url + "/health/ready").status_code == 503
        del router.statuses[0]
        assert server.http.get(server.url + "/health/ready").status_code == 503


def test_a_server_that_is_leaving_is_alive_and_not_ready() -> None:
    router = FakeRouter()
    router.draining = True
    with running(router) as server:
        assert all(server.http.get(server.url + path).json()["status"] == "draining" for path in READY)
        assert all(server.http.get(server.url + path).status_code == 503 for path in READY)
        assert all(server.http.get(server.url + path).status_code == 200 for path in LIVE)


def test_models_are_listed_with_vllms_fields() -> None:
    with running(FakeRouter("a", "b")) as server:
        listed = server.http.get(server.url + "/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["a", "b"]
    card = listed["data"][0]
    assert (card["object"], card["max_model_len"], card["root"], card["parent"]) == ("model", 128, "a", None)
    assert card["permission"][0]["object"] == "model_permission"


def test_load_counts_what_waits_and_what_runs() -> None:
    router = FakeRouter("a", "b")
    router.statuses[0].waiting, router.statuses[1].in_flight = 2, 3
    with running(router) as server:
        assert server.http.get(server.url + "/load").json() == {"server_load": 5}


def test_small_answers_have_their_types() -> None:
    with running() as server:
        assert server.http.get(server.url + "/metrics").text == "# metrics\n"
        assert server.http.get(server.url + "/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
        assert set(server.http.get(server.url + "/version").json()) == {"version"}
        for path in ("/", "/docs"):
            page = server.http.get(server.url + path)
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            assert "http://" not in page.text
            assert "https://" not in page.text
        assert [server.served().status for _ in range(5)] == [200] * 5


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", 'a"b'])
def test_a_models_name_cannot_inject_markup(name: str) -> None:
    with running(FakeRouter(name)) as server:
        assert name not in server.http.get(server.url + "/").text.replace("&quot;", "&#34;")
