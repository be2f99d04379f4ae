"""A request's key is known before anything is made of its body, on every way into the gateway."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from tests.gateway.fakes import FakeDoor, FakeRouter, Running, post, running

from inferd.config import Config, ModelConfig, ServerConfig
from inferd.gateway.openai import relay
from inferd.gateway.route import Route
from inferd.gateway.routes import ROUTES
from inferd.tenancy.principal import Principal

CONFIG = Config(
    server=ServerConfig(port=0, grace_s=1), models={"far": ModelConfig(source="openai:http://127.0.0.1:9/v1")}
)
ASKING = [route for route in ROUTES if route.method == "POST" and route.scope != "public"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeRouter("far"), CONFIG, door=FakeDoor({"good": Principal(key_id="k")})) as started:
        yield started


def first_line(server: Running, asked: str) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(asked.encode())
        return connection.recv(65536).partition(b"\r\n")[0]


@pytest.mark.parametrize("route", ASKING, ids=lambda route: route.pattern)
def test_a_request_without_a_key_is_refused_before_its_body_comes(route: Route, server: Running) -> None:
    """Its headers promise a body of a megabyte, of which nothing comes."""
    path = route.pattern.replace("{model}", "tiny").replace("{version}", "1").replace("{id}", "1")
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n"
    assert b" 401 " in first_line(server, head + "\r\n")
    if route.scope == "infer":
        assert b" 401 " in first_line(server, head + "prefer: respond-async\r\nidempotency-key: 1\r\n\r\n")


class Unread:
    """In a decoder's place."""

    def __init__(self) -> None:
        self.num_read = 0

    def decode(self, body: bytes) -> object:
        self.num_read += 1
        raise AssertionError("it is not to be read")


def test_a_relayed_request_without_a_key_is_not_decoded(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    unread = Unread()
    monkeypatch.setattr(relay, "chat_decoder", unread)
    monkeypatch.setattr(relay, "text_decoder", unread)
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert post(server, path, {"model": "far"}).status_code == 401
        assert post(server, path, {"model": "far"}, authorization="Bearer bad").status_code == 401
    assert not unread.num_read
