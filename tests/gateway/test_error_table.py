"""Every failure that has a name has a status, and no other failure says what it is."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gateway.fakes import Running, post, running

import inferd.errors as vocabulary
from inferd import gateway
from inferd.config import ServerConfig
from inferd.errors import InferdError, Overloaded
from inferd.gateway.errors import TABLE, error_body, error_headers, kind_of, shown
from inferd.types import End, Failure, GenerateRequest, Output

KINDS = {
    value.kind
    for value in vars(vocabulary).values()
    if isinstance(value, type) and issubclass(value, InferdError) and value is not InferdError
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(config=ServerConfig(port=0, grace_s=1)) as started:
        yield started


def test_every_kind_of_failure_has_a_row() -> None:
    assert set(TABLE) >= KINDS


def test_each_kind_is_the_word_of_one_class() -> None:
    for module in pkgutil.walk_packages(gateway.__path__, f"{gateway.__name__}."):
        importlib.import_module(module.name)
    found = list(_subclasses(InferdError))
    assert sorted(cls.kind for cls in found) == sorted({cls.kind for cls in found}), "a failure's kind finds its class"


def _subclasses(cls: type[InferdError]) -> Iterator[type[InferdError]]:
    for sub in cls.__subclasses__():
        if sub.__module__.startswith("inferd."):
            yield sub
        yield from _subclasses(sub)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_a_worker_is_answered_with_its_status(server: Running, kind: str, stream: bool) -> None:
    def script(request: GenerateRequest) -> list[Output]:
        return [Output(request.id, end=End("failed", failure=Failure(kind, "It did not work.", "prompt")))]

    server.router.script = script
    reply = post(server, "/v1/completions", {"prompt": "a", "stream": stream})
    assert reply.status_code == TABLE[kind].status
    assert reply.json()["error"]["type"] == TABLE[kind].type
    assert ("retry-after" in reply.headers) == (TABLE[kind].retry_after_s is not None)


def codes_of_remote_timeouts() -> list[str]:
    """As the code that talks to remote servers names them."""
    sources = Path(vocabulary.__file__).parent.glob("re*/*.py")
    return sorted({code for source in sources for code in re.findall(r'"(upstream_\w*timeout)"', source.read_text())})


def test_every_timeout_of_a_remote_server_is_a_504() -> None:
    codes = codes_of_remote_timeouts()
    assert codes
    for code in codes:
        assert kind_of(vocabulary.UpstreamFailed("Silence.", code=code)).status == 504, code
    assert kind_of(vocabulary.UpstreamFailed("Garbage.", code="upstream_bad_answer")).status == 502


def test_a_passed_deadline_is_a_408(server: Running) -> None:
    def script(request: GenerateRequest) -> list[Output]:
        assert request.deadline_s == 0.5
        return [Output(request.id, end=End("failed", failure=Failure("deadline_exceeded", "Too late.")))]

    server.router.script = script
    assert post(server, "/v1/completions", {"prompt": "a"}, **{"x-inferd-timeout": "0.5"}).status_code == 408


def test_a_failure_without_a_name_says_nothing() -> None:
    class Strange(InferdError):
        kind = "strange"

    error = Strange("/secret/path is gone")
    assert kind_of(error).status == 500
    assert b"secret" not in error_body(error)


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.1, b"1"), (2.2, b"3"), (1e308, b"86400"), (float("inf"), b"1"), (float("nan"), b"1")]
)
def test_an_overload_says_in_whole_seconds_when_to_come_back(seconds: float, header: bytes) -> None:
    assert error_headers(Overloaded("Full.", retry_after_s=seconds)) == ((b"retry-after", header),)


@pytest.mark.parametrize(
    "value",
    ["x" * 10_000, 10**4000, list(range(10_000)), {str(i): i for i in range(99)}, "\r\n\x1b", None, True, 1e308],
)
def test_a_shown_value_is_short_and_printable(value: object) -> None:
    assert len(shown(value)) < 80
    assert shown(value).isprintable()


def test_long_messages_are_cut() -> None:
    body = json.loads(error_body(vocabulary.InvalidRequest("x" * 100_000)))
    assert len(body["error"]["message"]) < 2100


def test_a_large_body_is_decoded_beside_the_event_loop(server: Running) -> None:
    server.router.script = None
    text = "x" * 2_000_000
    assert post(server, "/tokenize", {"prompt": text}).json()["count"] == len(text)
    assert post(server, "/tokenize", {"prompt": text, "promt": 1}).json()["error"]["param"] == "promt"
