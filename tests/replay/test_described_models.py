"""What a server says of a model, by the status and the body of its answer."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inferd.benchmark.load import Connection, Exchange
from inferd.errors import Unauthenticated, Unavailable
from inferd.replay.server import AskedServer, ServedModel

UNKNOWN = ServedModel("", False, ())


class Answering:
    """A connection whose server gives one answer to the question about a model."""

    def __init__(self, path: str, status: int, body: bytes) -> None:
        self._path = path
        self._found = cast(Exchange, SimpleNamespace(status=status, body=body))
        self.num_closed = 0

    async def exchange(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Exchange:
        assert (method, path, body) == ("GET", self._path, b"")
        return self._found

    def close(self) -> None:
        self.num_closed += 1


def described(name: str, status: int, said: Any) -> ServedModel:
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    connection = Answering(f"/v2/models/{name}", status, body)
    server = AskedServer("the server", lambda limit_s: cast(Connection, connection), timeout_s=1.0, patience_s=0.0)
    try:
        return asyncio.run(server.model(name))
    finally:
        assert connection.num_closed == 1


@pytest.mark.parametrize(
    ("name", "status", "said", "model"),
    [
        ("m", 503, {"error": "not loaded"}, UNKNOWN),  # its first request loads it
        ("m", 200, b"of another server", UNKNOWN),
        ("m", 200, {}, UNKNOWN),
        (
            "m",
            200,
            {"versions": ["1"], "parameters": {"fingerprint": "f", "batch_invariant": True, "tasks": "chat,embed"}},
            ServedModel("f", True, ("chat", "embed")),
        ),
        ("m", 200, {"versions": ["1", "2"], "parameters": {"fingerprint": "f"}}, UNKNOWN),  # of which one is not known
        ("m@2", 200, {"versions": ["1", "2"], "parameters": {"fingerprint": "f"}}, ServedModel("f", False, ())),
    ],
)
def test_a_model_is_what_its_server_says(name: str, status: int, said: Any, model: ServedModel) -> None:
    assert described(name, status, said) == model


@pytest.mark.parametrize(
    ("name", "status", "error", "words"),
    [
        ("m", 404, Unavailable, "does not have the model 'm': gone"),
        ("m", 401, Unauthenticated, "asks for an API key"),
        ("m", 403, Unauthenticated, "asks for an API key"),
        ("m", 500, Unavailable, "does not describe the model 'm': gone"),
        ("m", 504, Unavailable, "does not describe the model 'm': gone"),
        ("", 503, Unavailable, "does not describe the model '': gone"),  # a server of one model has none to load
    ],
)
def test_what_a_server_does_not_describe_is_an_error(
    name: str, status: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        described(name, status, {"error": {"message": "gone"}})
