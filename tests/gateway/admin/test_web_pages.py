"""A browser that shows a foreign page gets nothing here, whatever name it calls this server by."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.fakes import FakeControl, FakeDoor, Running, running

from inferd.config import ServerConfig
from inferd.tenancy.principal import OPERATOR, Principal

BODY = b'{"prompt": "x"}'


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(control=FakeControl()) as started:
        yield started


@pytest.fixture(scope="module")
def open_server() -> Iterator[Running]:
    config = ServerConfig(
        port=0, cors_origins=("https://app.example",), allowed_hosts=("api.example", "*.inner.example"), grace_s=1
    )
    with running(config=config, control=FakeControl()) as started:
        yield started


def status(server: Running, host: bytes | None, version: bytes = b"1.1", path: bytes = b"/v1/models") -> int:
    head = b"GET %b HTTP/%b\r\n" % (path, version)
    if host is not None:
        head += b"host: %b\r\n" % host
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head + b"connection: close\r\n\r\n")
        reply = connection.makefile("rb").readline()
    return int(reply.split()[1])


@pytest.mark.parametrize(
    "host",
    [
        b"localhost", b"localhost:80", b"LOCALHOST:1", b"localhost.", b"a.localhost", b"127.0.0.1:8000", b"[::1]:8000", b"[::1]", b"10.1.2.3",
        b"192.168.0.7:1", b"[fe80::1%25eth0]:1",
    ],
)  # fmt: skip
def test_this_machines_names_and_addresses_are_answered(server: Running, host: bytes) -> None:
    assert status(server, host) == 200


@pytest.mark.parametrize(
    "host",
    [b"evil.example", b"localhost.evil.example", b"127.0.0.1.evil.example", b"notlocalhost", b"1"],
)
def test_a_foreign_name_is_refused_though_it_points_here(server: Running, host: bytes) -> None:
    assert status(server, host) == 403
    assert status(server, host, path=b"/") == 403
    assert status(server, host, path=b"/health") == 200


@pytest.mark.parametrize(
    "host",
    [
        b"", b"a b", b"localhost/..", b"localhost#x", b"localhost?x", b"localhost@evil", b"http://localhost", b"localhost:", b"localhost:x",
        b"localhost:99999", b"[::1", b"::1", b"-a", b"\xff", b"a,b", b"localhost:80:80", b"x" * 300, b"[zz]", b"localhost\tb",
    ],
)  # fmt: skip
def test_a_host_header_that_is_none_is_refused(server: Running, host: bytes) -> None:
    assert status(server, host) in (400, 403)


def test_http_1_1_needs_a_host_and_1_0_does_not(server: Running) -> None:
    assert status(server, None) == 400
    assert status(server, None, b"1.0") == 200


def test_two_hosts_are_refused(server: Running) -> None:
    assert status(server, b"localhost\r\nhost: localhost") == 400


@given(st.binary(max_size=40).filter(lambda host: not set(host) & set(b"\r\n")))
def test_no_host_makes_the_server_fail(server: Running, host: bytes) -> None:
    assert status(server, host) in (200, 400, 403)


def test_named_hosts_are_answered_and_no_others(open_server: Running) -> None:
    for host in (b"api.example", b"API.example:443", b"x.inner.example", b"127.0.0.1"):
        assert status(open_server, host) == 200, host
    for host in (b"localhost", b"inner.example", b"evilinner.example", b"api.example.evil"):
        assert status(open_server, host) == 403, host


def test_a_listener_for_others_answers_to_any_name_unless_told_otherwise() -> None:
    with running(config=ServerConfig(host="0.0.0.0", port=0, grace_s=1)) as server:
        assert status(server, b"anything.example") == 200
        assert status(server, b"a b") == 400


def test_a_foreign_page_changes_nothing(server: Running) -> None:
    server.reset()
    for origin in ("https://evil.example", "null", "http://localhost:1", "x", server.url + ".evil.example"):
        reply = server.http.post(server.url + "/v1/completions", content=BODY, headers={"origin": origin})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "origin_not_allowed"), origin
        assert "access-control-allow-origin" not in reply.headers
        asked = {"origin": origin, "access-control-request-method": "POST"}
        reply = server.http.options(server.url + "/v1/completions", headers=asked)
        assert not [name for name in reply.headers if name.startswith("access-control-")]
        reply = server.http.get(server.url + "/v1/models", headers={"origin": origin})
        assert "access-control-allow-origin" not in reply.headers
    assert not server.router.streams


def test_the_servers_own_page_may_call_it(server: Running) -> None:
    reply = server.http.post(server.url + "/v1/completions", content=BODY, headers={"origin": server.url})
    assert reply.status_code == 200


def test_a_page_of_an_allowed_origin_may_call_it(open_server: Running) -> None:
    server, origin = open_server, "https://app.example"
    asked = {"origin": origin, "access-control-request-method": "POST"}
    preflight = server.http.options(server.url + "/v1/completions", headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == origin
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for content in (BODY, b"{}"):
        reply = server.http.post(server.url + "/v1/completions", content=content, headers={"origin": origin})
        assert (reply.headers["access-control-allow-origin"], reply.headers["vary"]) == (origin, "origin")
        assert "retry-after" in reply.headers["access-control-expose-headers"]
    other = server.http.get(server.url + "/v1/models", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    assert server.http.get(server.url + "/v1/models").headers["vary"] == "origin"


def test_no_page_of_any_origin_administrates() -> None:
    door = FakeDoor({"sk-admin": Principal(key_id="a", tenant="ops", scopes=frozenset(("admin",)))})
    with running(
        config=ServerConfig(port=0, cors_origins=("*",), grace_s=1), door=door, control=FakeControl()
    ) as server:
        page, key = {"origin": "https://any.example"}, {"authorization": "Bearer sk-admin"}
        refused = server.http.get(server.url + "/v1/models", headers=page)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")
        reply = server.http.get(server.url + "/v1/models", headers={**page, **key})
        assert reply.headers["access-control-allow-origin"] == "*"
        asked = {**page, "access-control-request-method": "POST"}
        reply = server.http.options(server.url + "/admin/drain", headers=asked)
        assert reply.status_code == 401
        assert not [name for name in reply.headers if name.startswith("access-control-")]
        reply = server.http.get(server.url + "/admin/status", headers={**page, **key})
        assert reply.status_code == 200
        assert not [name for name in reply.headers if name.startswith("access-control-")]
        reply = server.http.post(server.url + "/admin/drain", headers={**page, **key})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "origin_not_allowed")


def test_the_control_socket_asks_for_neither() -> None:
    with running(principal=OPERATOR) as server:
        assert status(server, b"inferd") == 200


def test_the_document_of_the_api_is_compressed_for_browsers(server: Running) -> None:
    plain = server.http.get(server.url + "/openapi.json", headers={"accept-encoding": "identity"})
    small = server.http.get(server.url + "/openapi.json", headers={"accept-encoding": "gzip"})
    assert small.headers["content-encoding"] == "gzip"
    assert small.json() == plain.json()
    assert int(small.headers["content-length"]) < int(plain.headers["content-length"]) / 4
