"""Models behind remote servers are reached through the same door as those that run here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from tests.gateway.fakes import FakeDoor, FakeRouter, Running, post, running, sse

from inferd.cache.memory import MemoryCache
from inferd.config import CacheConfig, Config, ModelCacheConfig, ModelConfig, RemoteConfig, ServerConfig
from inferd.tenancy.idempotency import IdempotencyStore
from inferd.tenancy.principal import Principal
from inferd.types import TOLD, End, Relay, Relayed, RelayHead, Request, Usage

KEYS = {
    "sk-a": Principal(key_id="a", tenant="a", priority=-1, region="eu"),
    "sk-x": Principal(key_id="x", tenant="x", models=("mixed",)),
}
CHAT = {"model": "far", "messages": [{"role": "user", "content": "hi"}]}
CONFIG = Config(
    models={
        "far": ModelConfig(source="openai:http://127.0.0.1:9/v1"),
        "kept": ModelConfig(source="openai:http://127.0.0.1:9/v1", cache=ModelCacheConfig(enabled=True)),
        "mixed": ModelConfig(source="tiny", remotes=(RemoteConfig(url="http://127.0.0.1:9/v1"),)),
        "mixed and kept": ModelConfig(
            source="tiny",
            remotes=(RemoteConfig(url="http://127.0.0.1:9/v1"),),
            cache=ModelCacheConfig(enabled=True),
        ),
    },
    server=ServerConfig(port=0, grace_s=1),
)


def elsewhere(request: Request, relay: Relay) -> list[Relayed]:
    """A remote server that counts nothing and repeats what it was sent."""
    end = End("done", Usage(5, 7))
    if relay.stream:
        head = RelayHead(200, b"text/event-stream; charset=utf-8")
        pieces = [b'data: {"far": 1}\n\n', b"data: [DONE]\n\n"]
        return [
            Relayed(request.id, head, pieces[0]),
            Relayed(request.id, None, pieces[1]),
            Relayed(request.id, None, b"", end),
        ]
    return [Relayed(request.id, RelayHead(200, b"application/json"), b'{"far": ' + relay.body + b"}", end)]


@pytest.fixture
def door() -> FakeDoor:
    return FakeDoor(KEYS)


@pytest.fixture
def server(door: FakeDoor) -> Iterator[Running]:
    router = FakeRouter(*CONFIG.models)
    for status in router.statuses:
        status.has_remote = True
    router.statuses[0].info = router.statuses[1].info = None
    router.relay_script = elsewhere
    with running(
        router, CONFIG, door=door, cache=MemoryCache(CacheConfig()), idempotency=IdempotencyStore(60)
    ) as started:
        yield started


def ask(server: Running, body: dict[str, Any], key: str = "sk-a", **headers: str) -> httpx.Response:
    return post(server, "/v1/chat/completions", body, authorization=f"Bearer {key}", **headers)


@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "k"}], ids=["without a task", "the general path"])
@pytest.mark.parametrize("model", ["far", "mixed"])
def test_a_relayed_answer_is_admitted_charged_and_logged(
    server: Running, door: FakeDoor, model: str, headers: dict[str, str]
) -> None:
    reply = ask(server, {**CHAT, "model": model, "max_tokens": 9, "timeout": 5}, **headers)
    assert reply.status_code == 200, reply.text
    assert reply.json()["far"]["model"] == model
    assert reply.headers["x-ratelimit-limit-requests"] == "10"
    (permit,) = door.permits
    assert permit.over.wait(10)
    assert permit.settled == [(Usage(5, 7), "done")]
    assert permit.reserved[1] == 9
    request = server.router.streams[0].given
    assert (request.tenant, request.region, request.deadline_s) == ("a", "eu", 5.0)
    event = server.served()
    assert (event.model, event.tenant, event.key_id, event.usage) == (model, "a", "a", Usage(5, 7))


@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "k"}])
@pytest.mark.parametrize("model", ["far", "mixed"])
def test_a_relayed_stream_is_passed_on(server: Running, model: str, headers: dict[str, str]) -> None:
    reply = ask(server, {**CHAT, "model": model, "stream": True}, **headers)
    assert sse(reply.text) == [{"far": 1}, "data: [DONE]"]
    assert reply.headers["content-type"].startswith("text/event-stream")


def test_an_unknown_key_is_refused_without_asking_the_router(server: Running) -> None:
    for headers in ({}, {"idempotency-key": "k"}):
        assert ask(server, CHAT, "wrong", **headers).status_code == 401
        hidden, missing = (ask(server, {**CHAT, "model": name}, "sk-x", **headers) for name in ("far", "none"))
        assert (hidden.status_code, missing.status_code) == (404, 404)
        assert hidden.text.replace("far", "none") == missing.text
        assert ask(server, CHAT, "sk-a", host="evil.example", **headers).status_code == 403
        assert ask(server, CHAT, "sk-a", origin="https://evil.example", **headers).status_code == 403
    assert not server.router.streams


@pytest.mark.parametrize("model", ["far", "kept"])
@pytest.mark.parametrize("text", [
    '{"model": "MODEL", "model": "MODEL", "messages": [{"role": "user", "content": "hi"}]}',
    '{"model": "MODEL", "messages": [{"role": "user", "role": "system", "content": "hi"}]}',
    '{"model": "MODEL", "messages": [{"role": "user", "content": "a: b"}], "user": {"id": {"a": 1, "\\u0061": 2}}}',
])  # fmt: skip
def test_a_repeated_key_is_refused_as_for_models_that_run_here(server: Running, model: str, text: str) -> None:
    reply = post(server, "/v1/chat/completions", text.replace("MODEL", model).encode(), authorization="Bearer sk-a")
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "duplicate_key")
    assert server.router.streams == []


def test_a_relayed_answer_is_repeated_for_its_key(server: Running) -> None:
    for stream in (False, True):
        first, again = (ask(server, {**CHAT, "stream": stream}, **{"idempotency-key": f"k{stream}"}) for _ in range(2))
        assert first.content == again.content
        assert again.headers["idempotent-replayed"] == "true"
    assert len(server.router.streams) == 2


def test_a_relayed_answer_is_kept_where_the_model_says_so(server: Running) -> None:
    body = {**CHAT, "model": "kept", "temperature": 0}
    assert [ask(server, body).headers["x-inferd-cache"] for _ in range(2)] == ["miss", "hit"]
    streamed = {**body, "stream": True}
    first, again = (ask(server, streamed) for _ in range(2))
    assert [reply.headers["x-inferd-cache"] for reply in (first, again)] == ["miss", "hit"]
    assert first.content == again.content
    assert "x-inferd-cache" not in ask(server, {**body, "temperature": 1}).headers
    assert "x-inferd-cache" not in ask(server, {**CHAT, "temperature": 0}).headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model", "headers"), [("kept", {}), ("mixed and kept", {}), ("far", {"idempotency-key": "k"})]
)
def test_a_repeated_answer_tells_what_the_remote_server_told(
    server: Running, model: str, headers: dict[str, str], stream: bool
) -> None:
    """What this server ignores may have an effect there."""

    def telling(request: Request, relay: Relay) -> list[Relayed]:
        first, *rest = elsewhere(request, relay)
        assert first.head is not None
        names = (b"user" if b'"user":' in relay.body else b"", b"tools[0].parameters", b"kgw")
        told = tuple([header for header in zip(TOLD, names, strict=True) if header[1]])
        return [msgspec.structs.replace(first, head=msgspec.structs.replace(first.head, headers=told)), *rest]

    server.router.relay_script = telling
    body = {**CHAT, "model": model, "temperature": 0, "stream": stream}
    for sent, names in (({"user": "u", "verbosity": "low"}, "user"), ({}, None)):
        more = {name: f"{value}{sent}" for name, value in headers.items()}
        first, again = (ask(server, {**body, **sent}, **more) for _ in range(2))
        assert again.headers.get("x-inferd-cache", "hit") == "hit"
        assert again.content == first.content
        for name in TOLD:
            assert again.headers.get(name.decode()) == first.headers.get(name.decode())
        assert again.headers.get("x-inferd-ignored-params") == names
        assert again.headers["x-inferd-watermark"] == "kgw"
    assert len(server.router.streams) == 2


def test_a_model_that_runs_here_and_elsewhere_may_be_answered_here(server: Running) -> None:
    server.router.relay_script = None
    for stream in (False, True):
        reply = ask(server, {**CHAT, "model": "mixed", "stream": stream})
        assert "Hello" in reply.text
    assert [relay is not None for relay in server.router.relays] == [True, True]
    assert server.router.last.sampling.n == 1
    post(server, "/v1/completions", {"model": "mixed", "prompt": ["a", "b"]}, authorization="Bearer sk-a")
    assert server.router.relays[2:] == [None, None]


def test_what_goes_along_to_a_remote_server_is_named(server: Running) -> None:
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    for model in ("far", "mixed"):
        headers = {"traceparent": trace, "x-request-id": "r1", "cookie": "secret", "x-forwarded-for": "1.2.3.4"}
        assert ask(server, {**CHAT, "model": model}, **headers).status_code == 200
        relay = server.router.relays[-1]
        assert relay is not None
        assert relay.headers == ((b"x-request-id", b"r1"), (b"traceparent", trace.encode()))
        assert relay.path == "/chat/completions"
    ask(server, CHAT, traceparent="rubbish")
    relay = server.router.relays[-1]
    assert relay is not None
    assert [name for name, _ in relay.headers] == [b"x-request-id"]


@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "k"}], ids=["without a task", "the general path"])
@pytest.mark.parametrize(
    ("prompt", "times"), [("a", 1), ([1, 2, 3], 1), ([], 1), (["a", "b", "c"], 3), ([[1, 2], [3]], 2)]
)
def test_each_prompt_is_taken_from_the_quota(
    server: Running, door: FakeDoor, prompt: Any, times: int, headers: dict[str, str]
) -> None:
    body = {"model": "far", "prompt": prompt, "max_tokens": 9, "n": 2}
    reply = post(server, "/v1/completions", body, authorization="Bearer sk-a", **headers)
    assert reply.status_code == 200, reply.text
    assert [permit.reserved[1] for permit in door.permits] == [9 * 2 * times]


def test_the_larger_of_two_limits_is_taken_from_the_quota(server: Running, door: FakeDoor) -> None:
    """Some servers go by the one, some by the other."""
    ask(server, {**CHAT, "max_tokens": 90, "max_completion_tokens": 1})
    ask(server, {**CHAT, "max_tokens": 1, "max_completion_tokens": 80})
    assert [permit.reserved[1] for permit in door.permits] == [90, 80]


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("more", [{}, {"idempotency-key": "k"}], ids=["straight", "ordinary"])
def test_no_browser_guesses_what_another_server_said(server: Running, status: int, more: dict[str, str]) -> None:
    page = b"<script>alert(1)</script>"
    server.router.relay_script = lambda request, relay: [
        Relayed(request.id, RelayHead(status, b"text/plain"), page, End("done", Usage(5, 7)))
    ]
    reply = ask(server, CHAT, **more)
    assert (reply.status_code, reply.content) == (status, page)
    assert reply.headers["x-content-type-options"] == "nosniff"
