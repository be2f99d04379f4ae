"""Every route is closed unless it says otherwise; what is decided about a key is decided before the body."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tests.gateway.fakes import FakeAuditor, FakeControl, FakeDoor, FakeRouter, Running, post, running

from inferd.config import ServerConfig
from inferd.gateway.errors import OPENAI_ERRORS
from inferd.gateway.route import Route
from inferd.gateway.routes import ROUTES
from inferd.observe import MetricsPage
from inferd.tenancy.principal import OPERATOR, Principal, Scope

NOTHING: frozenset[Scope] = frozenset()
KEYS = {
    "sk-user": Principal(key_id="user", tenant="team", scopes=frozenset(("infer", "models"))),
    "sk-metrics": Principal(key_id="metrics", tenant="ops", scopes=frozenset(("metrics",))),
    "sk-admin": Principal(key_id="admin", tenant="ops", scopes=frozenset(("admin",))),
    "sk-nothing": Principal(key_id="nothing", tenant="team", scopes=NOTHING),
    "sk-narrow": Principal(key_id="narrow", tenant="team", models=("b", "team-*")),
}
# Expired and revoked keys are unknown to the door, like those that never were; it says the same of all.
BAD = ["sk-never-was", "sk-user2", "SK-USER", "sk-usér", "a" * 5000]
CLOSED = [route for route in ROUTES if route.scope != "public"]
OPEN_ONES = {"/health", "/health/ready", "/health/live", "/readyz", "/livez", "/healthz", "/ping"}
OPEN_ONES |= {"/v2/health/live", "/v2/health/ready", "/api/hello"}
DOCS = {"/docs"}  # a page without data: it reads the document with the key of its viewer
SIGN_IN = {"/console", "/console/", "/console/assets/{file}", "/console/session"}  # before there is a key
SIGNED = {"/admin/mlflow/webhook"}  # a signature of the body stands for the key
OPERATORS = {
    "/admin/audit",
    "/admin/nodes",
    "/admin/nodes/token",
}  # no tenant's key may read them, also not with the scope admin
BY_SCOPE = {"infer": "sk-user", "models": "sk-user", "metrics": "sk-metrics", "admin": "sk-admin"}


def name(route: Route) -> str:
    return f"{route.method} {route.pattern}"


def path(route: Route) -> str:
    return route.pattern.replace("{model}", "a").replace("{id}", "key0").replace("{version}", "1")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(
        FakeRouter("a", "b", "team-x"), door=FakeDoor(KEYS), control=FakeControl(), audit=FakeAuditor()
    ) as started:
        yield started


def ask(server: Running, method: str, path: str, key: str | None, **headers: Any) -> Any:
    if key is not None:
        headers["authorization"] = b"Bearer " + key.encode("latin-1")
    return server.http.request(method, server.url + path, headers=headers)


def without_id(answer: Any) -> str:
    """The body, without the request's id that some dialects have there."""
    text: str = answer.text
    return text.replace(answer.headers["x-request-id"], "ID")


def test_only_the_probes_are_open() -> None:
    assert {route.pattern for route in ROUTES if route.scope == "public"} == OPEN_ONES | SIGN_IN | DOCS | SIGNED


@pytest.mark.parametrize("route", CLOSED, ids=name)
def test_a_route_wants_a_key_that_has_its_scope(server: Running, route: Route) -> None:
    refused = ask(server, route.method, path(route), None)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    for key in BAD:
        again = ask(server, route.method, path(route), key)
        assert (again.status_code, without_id(again)) == (401, without_id(refused)), key
        assert again.headers["www-authenticate"] == "Bearer"
    for key, principal in KEYS.items():
        reply = ask(server, route.method, path(route), key)
        if principal.may(route.scope) and not (principal.tenant and route.pattern in OPERATORS):
            assert reply.status_code not in (401, 403), (key, reply.text)
        else:
            assert reply.status_code == 403, key
            if route.errors is OPENAI_ERRORS:
                assert reply.json()["error"]["code"] == "insufficient_permissions"
    for method in ("OPTIONS", "PUT", "PATCH", "TRACE", "GET", "POST", "DELETE"):
        assert ask(server, method, path(route), None).status_code == 401, method
    assert ask(server, "HEAD", path(route), None).status_code == 401
    assert ask(server, "OPTIONS", path(route), BY_SCOPE[route.scope]).status_code == 204
    assert ask(server, "PUT", path(route), BY_SCOPE[route.scope]).status_code == 405


def test_probes_need_no_key_and_name_models_only_for_keys_that_may_list_them(server: Running) -> None:
    for route in ROUTES:
        if route.pattern in OPEN_ONES:
            assert ask(server, "GET", route.pattern, None).status_code == 200
            assert ask(server, "GET", route.pattern, "sk-wrong").status_code == 200
    assert ask(server, "GET", "/health", None).json() == {"status": "ready", "models": {}}
    assert ask(server, "GET", "/health", "sk-wrong").json()["models"] == {}
    assert ask(server, "GET", "/health", "sk-metrics").json()["models"] == {}
    assert set(ask(server, "GET", "/health", "sk-user").json()["models"]) == {"a", "b", "team-x"}
    assert set(ask(server, "GET", "/health", "sk-narrow").json()["models"]) == {"b", "team-x"}


def test_what_does_not_exist_is_not_found_with_and_without_a_key(server: Running) -> None:
    for key in (None, "sk-wrong", "sk-user"):
        for where in ("/nothing", "/v1", "/v1/chat", "/admin/", "/v1/chat/completions/", "//v1/models", "/V1/models"):
            assert ask(server, "GET", where, key).status_code == 404, where


def test_a_wrong_key_is_answered_before_the_body_is_read(server: Running) -> None:
    server.reset()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer wrong\r\n"
            b"content-type: application/json\r\ncontent-length: 1000000\r\nexpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")
    assert server.served().request_bytes == 0
    assert not server.router.streams


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "bearer sk-user"},
        {"authorization": "BEARER   sk-user"},
        {"x-api-key": "sk-user"},
        {"authorization": "Basic Zm9vOmJhcg==", "x-api-key": "sk-user"},
    ],
)
def test_a_key_comes_as_a_bearer_token_or_as_x_api_key(server: Running, headers: dict[str, str]) -> None:
    assert server.http.get(server.url + "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Basic sk-user")],
        [("authorization", "sk-user")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer sk-wrong"), ("x-api-key", "sk-user")],
        [("authorization", "Bearer sk-user"), ("authorization", "Bearer sk-admin")],
        [("x-api-key", "sk-user"), ("x-api-key", "sk-admin")],
        [("cookie", "key=sk-user")],
        [("x-inferd-internal", "1"), ("x-inferd-tenant", "team"), ("x-forwarded-user", "admin")],
    ],
)
def test_nothing_else_is_a_key(server: Running, headers: list[tuple[str, str]]) -> None:
    assert server.http.get(server.url + "/v1/models", headers=headers).status_code == 401
    assert server.http.get(server.url + "/v1/models?api_key=sk-user", headers=headers).status_code == 401


def test_a_model_that_a_key_may_not_use_is_like_one_that_does_not_exist(server: Running) -> None:
    key = {"authorization": "Bearer sk-narrow"}
    listed = server.http.get(server.url + "/v1/models", headers=key).json()
    assert [card["id"] for card in listed["data"]] == ["b", "team-x"]
    bodies = []
    for model in ("a", "z"):
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [1]}),
        ]
        for where, body in asked:
            reply = post(server, where, {"model": model, **body}, **key)
            assert reply.status_code == 404, (model, where)
            bodies.append(reply.text.replace(f'\\"{model}\\"', "M"))
        reply = server.http.get(f"{server.url}/v1/models/{model}", headers=key)
        assert reply.status_code == 404
        bodies.append(reply.text.replace(f'\\"{model}\\"', "M"))
    assert len(set(bodies)) == 1, bodies
    assert post(server, "/v1/completions", {"model": "b", "prompt": "x"}, **key).status_code == 200


def test_the_log_names_the_tenant_and_the_key(server: Running) -> None:
    server.reset()
    ask(server, "GET", "/v1/models", "sk-narrow")
    event = server.served()
    assert (event.tenant, event.key_id) == ("team", "narrow")
    ask(server, "GET", "/v1/models", "sk-wrong")
    event = server.served()
    assert (event.tenant, event.key_id, event.status) == ("", "", 401)


def test_metrics_may_be_opened_and_nothing_else_with_them() -> None:
    with running(config=ServerConfig(port=0, public_metrics=True), door=FakeDoor(KEYS)) as server:
        assert ask(server, "GET", "/metrics", None).text == "# metrics\n"
        assert ask(server, "GET", "/load", None).status_code == 401


@pytest.mark.parametrize("path", ["/metrics", "/load"])
def test_numbers_are_the_whole_server_s_for_each_key_that_may_read_them(path: str) -> None:
    """A key's tenant and models take nothing away from the page, so its scope alone decides."""
    scopes: dict[str, Scope] = {"sk-metrics": "metrics", "sk-admin": "admin", "sk-user": "infer", "sk-lister": "models"}
    keys = {
        key: Principal(key_id=key, tenant=key, scopes=frozenset((scope,)), models=("a",))
        for key, scope in scopes.items()
    }

    async def metrics(accept: str) -> MetricsPage:
        return MetricsPage(b'x{model="a"} 1\nx{model="b"} 2\n', "text/plain")

    with running(FakeRouter("a", "b"), door=FakeDoor(keys), metrics=metrics) as server:
        pages = {key: ask(server, "GET", path, key) for key in keys}
    assert {key: page.status_code for key, page in pages.items()} == {
        "sk-metrics": 200,
        "sk-admin": 200,
        "sk-user": 403,
        "sk-lister": 403,
    }
    assert pages["sk-metrics"].content == pages["sk-admin"].content
    assert path != "/metrics" or 'model="b"' in pages["sk-admin"].text


def test_without_keys_people_on_this_machine_may_do_everything_but_administrate() -> None:
    with running() as server:
        for route in CLOSED:
            status = ask(server, route.method, path(route), None).status_code
            assert (status == 403) == (route.scope == "admin"), name(route)


def test_every_request_over_the_control_socket_is_the_operators() -> None:
    with running(door=FakeDoor({}), principal=OPERATOR) as server:
        for route in CLOSED:
            assert ask(server, route.method, path(route), None).status_code not in (401, 403), name(route)
