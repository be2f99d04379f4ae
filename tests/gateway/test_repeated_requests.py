"""Asked twice, computed once: Idempotency-Key, and the cache of deterministic answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
from tests.gateway.fakes import FakeDoor, FakeRouter, Running, info, post, running, words
from tests.http.test_connections import connect, request

from inferd.cache.memory import MemoryCache
from inferd.config import CacheConfig, Config, ModelCacheConfig, ModelConfig, ServerConfig
from inferd.errors import Overloaded, WorkerDied
from inferd.events import CacheLooked
from inferd.tenancy.idempotency import IdempotencyStore
from inferd.tenancy.principal import Principal
from inferd.types import Delta, End, GenerateRequest, Output, PromptReport, Usage

KEYS = {
    "sk-a": Principal(key_id="a", tenant="a"),
    "sk-a2": Principal(key_id="a2", tenant="a"),
    "sk-b": Principal(key_id="b", tenant="b"),
}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
GREEDY = {"prompt": "once upon", "temperature": 0}


def config(**cache: Any) -> Config:
    model = ModelConfig(source="tiny", cache=ModelCacheConfig(enabled=True, **cache))
    return Config(
        models={"tiny": model}, server=ServerConfig(port=0, grace_s=1), cache=CacheConfig(max_entry_bytes=4096)
    )


@pytest.fixture
def door() -> FakeDoor:
    return FakeDoor(KEYS)


@pytest.fixture
def server(door: FakeDoor) -> Iterator[Running]:
    settings = config()
    with running(
        config=settings, door=door, cache=MemoryCache(settings.cache), idempotency=IdempotencyStore(60)
    ) as started:
        yield started


def ask(
    server: Running, body: dict[str, Any], path: str = "/v1/completions", key: str = "sk-a", **headers: str
) -> httpx.Response:
    return post(server, path, body, authorization=f"Bearer {key}", **headers)


def looks(server: Running) -> list[str]:
    return [event.result for event in server.events if isinstance(event, CacheLooked)]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.005)


def say_and_end(server: Running, number: int = 0) -> None:
    stream = server.router.streams[number]
    output = Output(
        stream.request.id, (Delta(0, "done", (1,), None, "stop"),), PromptReport(3), End("done", Usage(3, 1))
    )
    server.put(stream, output)


# -- Idempotency-Key -----------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("stream", [False, True])
def test_the_same_request_again_gets_the_same_bytes(
    server: Running, door: FakeDoor, path: str, body: dict[str, Any], stream: bool
) -> None:
    first = ask(server, {**body, "stream": stream}, path, **{"idempotency-key": "k"})
    again = ask(server, {**body, "stream": stream}, path, key="sk-a2", **{"idempotency-key": "k"})
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.content == first.content
    assert again.headers["content-type"] == first.headers["content-type"]
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert len(server.router.streams) == 1
    first_permit, second_permit = door.permits
    assert first_permit.settled[0][0] == Usage(3, 3, 1)
    assert (second_permit.reserved, second_permit.settled) == ((0, 0), [(None, "done")])


@pytest.mark.parametrize("stream", [False, True])
def test_a_repetition_names_the_fields_without_effect_as_the_first_answer_does(server: Running, stream: bool) -> None:
    body = {"prompt": "x", "user": "u", "stream": stream}
    first, again = (ask(server, body, **{"idempotency-key": "k"}) for _ in range(2))
    assert again.headers["idempotent-replayed"] == "true"
    assert [reply.headers["x-inferd-ignored-params"] for reply in (first, again)] == ["user", "user"]


def test_another_body_under_the_same_key_is_refused(server: Running) -> None:
    assert ask(server, {"prompt": "x"}, **{"idempotency-key": "k"}).status_code == 200
    reply = ask(server, {"prompt": "y"}, **{"idempotency-key": "k"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert ask(server, CHAT, "/v1/chat/completions", **{"idempotency-key": "k"}).status_code == 422
    assert len(server.router.streams) == 1


def test_keys_are_a_tenants_own(server: Running) -> None:
    assert ask(server, {"prompt": "x"}, **{"idempotency-key": "k"}).status_code == 200
    other = ask(server, {"prompt": "y"}, key="sk-b", **{"idempotency-key": "k"})
    assert (other.status_code, other.headers.get("idempotent-replayed")) == (200, None)


@pytest.mark.parametrize("stream", [False, True])
def test_twenty_at_once_are_one_execution(server: Running, stream: bool) -> None:
    server.router.script = None
    with ThreadPoolExecutor(20) as pool:
        replies = [
            pool.submit(ask, server, {"prompt": "x", "stream": stream}, **{"idempotency-key": "k"}) for _ in range(20)
        ]
        assert server.router.submitted.acquire(timeout=10)
        say_and_end(server)
        bodies = {reply.result().content for reply in replies}
    assert len(bodies) == 1
    assert len(server.router.streams) == 1
    assert sum("idempotent-replayed" in reply.result().headers for reply in replies) == 19


def test_what_failed_is_tried_again(server: Running) -> None:
    server.router.refusal = Overloaded("Full.")
    assert ask(server, {"prompt": "x"}, **{"idempotency-key": "k"}).status_code == 503
    server.router.refusal = None
    script, server.router.script = server.router.script, lambda request: [WorkerDied("Dead.")]
    assert ask(server, {"prompt": "x"}, **{"idempotency-key": "k"}).status_code == 503
    server.router.script = lambda request: [
        Output(request.id, (Delta(0, "a", (1,)),), PromptReport(1)),
        WorkerDied("Dead."),
    ]
    broken = ask(server, {"prompt": "x", "stream": True}, **{"idempotency-key": "s"})
    assert "Dead." in broken.text
    server.router.script = script
    for key, body in (("k", {"prompt": "x"}), ("s", {"prompt": "x", "stream": True})):
        reply = ask(server, body, **{"idempotency-key": key})
        assert (reply.status_code, reply.headers.get("idempotent-replayed")) == (200, None)
        assert "Dead." not in reply.text


def test_a_client_that_leaves_leaves_the_key_to_the_next(server: Running) -> None:
    server.router.script = lambda request: [Output(request.id, (Delta(0, "a", (1,)),), PromptReport(1))]
    with server.http.stream(
        "POST",
        server.url + "/v1/completions",
        json={"prompt": "x", "stream": True},
        headers={"authorization": "Bearer sk-a", "idempotency-key": "k"},
    ) as reply:
        assert next(reply.iter_raw())
    assert server.router.streams[0].closed.wait(10)
    server.put(server.router.streams[0], Output("x", (), None, End("cancelled")))
    server.router.script = words("whole")
    again = ask(server, {"prompt": "x", "stream": True}, **{"idempotency-key": "k"})
    assert "whole" in again.text
    assert len(server.router.streams) == 2


# -- the cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", GREEDY), ("/v1/chat/completions", {**CHAT, "seed": 1})])
@pytest.mark.parametrize("stream", [False, True])
def test_a_hit_is_the_same_bytes_and_costs_no_tokens(
    server: Running, door: FakeDoor, path: str, body: dict[str, Any], stream: bool
) -> None:
    first, again = (ask(server, {**body, "stream": stream}, path) for _ in range(2))
    assert (first.headers["x-inferd-cache"], again.headers["x-inferd-cache"]) == ("miss", "hit")
    assert again.content == first.content
    assert again.headers["content-type"] == first.headers["content-type"]
    assert len(server.router.streams) == 1
    assert looks(server) == ["miss", "store", "hit"]
    assert [permit.reserved == (0, 0) for permit in door.permits] == [False, True]
    assert door.permits[1].settled == [(None, "done")]


def test_requests_that_ask_the_same_are_the_same(server: Running) -> None:
    same = [
        {"prompt": "x", "temperature": 0},
        {"temperature": 0.0, "prompt": "x", "model": "tiny"},
        {
            "prompt": "x",
            "temperature": 0,
            "user": "u",
            "metadata": {"a": "b"},
            "request_id": "r",
            "timeout": 9,
            "priority": 1,
        },
        {"prompt": "x", "temperature": 0, "n": None},
    ]
    replies = [ask(server, body) for body in same]
    assert [reply.headers["x-inferd-cache"] for reply in replies] == ["miss", "hit", "hit", "hit"]
    assert replies[2].headers["x-inferd-ignored-params"] == "user,metadata"


def test_requests_that_ask_something_else_are_not(server: Running) -> None:
    bodies: list[dict[str, Any]] = [
        GREEDY, {**GREEDY, "prompt": "once upom"}, {**GREEDY, "max_tokens": 3}, {**GREEDY, "seed": 3}, {**GREEDY, "stop": "x"},
        {**GREEDY, "cache_salt": "s"}, {**GREEDY, "n": 2}, {**GREEDY, "stream": True}, {**GREEDY, "logprobs": 1},
        {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}, {**GREEDY, "echo": True},
    ]  # fmt: skip
    assert [ask(server, body).headers["x-inferd-cache"] for body in bodies] == ["miss"] * len(bodies)
    server.router.statuses[0].info = msgspec.structs.replace(info("tiny"), fingerprint="fp_new")
    assert ask(server, GREEDY).headers["x-inferd-cache"] == "miss"


def test_tenants_do_not_see_each_others_answers(server: Running) -> None:
    assert ask(server, GREEDY).headers["x-inferd-cache"] == "miss"
    assert ask(server, GREEDY, key="sk-a2").headers["x-inferd-cache"] == "hit"
    assert ask(server, GREEDY, key="sk-b").headers["x-inferd-cache"] == "miss"


def test_what_is_drawn_at_random_is_computed_anew(server: Running) -> None:
    for body in ({"prompt": "x"}, {"prompt": "x", "temperature": 0.1}):
        assert all("x-inferd-cache" not in ask(server, body).headers for _ in range(2))
    server.app.configure(config(any_temperature=True))
    assert [ask(server, {"prompt": "x"}).headers["x-inferd-cache"] for _ in range(2)] == ["miss", "hit"]


def test_a_client_may_do_without_the_cache(server: Running) -> None:
    assert "x-inferd-cache" not in ask(server, GREEDY, **{"cache-control": "no-store"}).headers
    assert looks(server) == []
    first = ask(server, GREEDY)
    fresh = ask(server, GREEDY, **{"cache-control": "max-age=0, No-Cache"})
    assert fresh.headers["x-inferd-cache"] == "miss"
    assert fresh.content != first.content
    assert ask(server, GREEDY).content == fresh.content


def test_nothing_is_cached_where_no_model_says_so(door: FakeDoor) -> None:
    plain = Config(models={"tiny": ModelConfig(source="tiny")}, server=ServerConfig(port=0))
    with running(config=plain, door=door, cache=MemoryCache(CacheConfig())) as server:
        assert all("x-inferd-cache" not in ask(server, GREEDY).headers for _ in range(2))
        assert len(server.router.streams) == 2
        assert looks(server) == []


def test_a_model_whose_weights_are_not_known_yet_is_not_looked_up(server: Running) -> None:
    server.router.statuses[0].info = None
    replies = [ask(server, GREEDY) for _ in range(2)]
    assert [(reply.status_code, "x-inferd-cache" in reply.headers) for reply in replies] == [(200, False)] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_equal_requests_at_the_same_time_are_computed_once(server: Running, stream: bool) -> None:
    server.router.script = None
    body = {**GREEDY, "stream": stream}
    with ThreadPoolExecutor(10) as pool:
        replies = [pool.submit(ask, server, body) for _ in range(10)]
        assert server.router.submitted.acquire(timeout=10)
        say_and_end(server)
        results = [reply.result() for reply in replies]
    assert len({reply.content for reply in results}) == 1
    assert len(server.router.streams) == 1
    assert sorted(reply.headers["x-inferd-cache"] for reply in results) == ["hit"] * 9 + ["miss"]


def test_requests_that_waited_for_a_failed_answer_are_computed(server: Running) -> None:
    server.router.script = None
    with ThreadPoolExecutor(3) as pool:
        leader = pool.submit(ask, server, GREEDY)
        assert server.router.submitted.acquire(timeout=10)
        others = [pool.submit(ask, server, GREEDY) for _ in range(2)]
        server.router.script = words("fine")
        server.put(server.router.streams[0], WorkerDied("Dead."))
        assert leader.result().status_code == 503
        assert [reply.result().status_code for reply in others] == [200, 200]
    assert len(server.router.streams) == 2


def test_a_request_that_waits_for_an_equal_one_keeps_its_own_deadline(server: Running) -> None:
    server.router.script = None
    with ThreadPoolExecutor(1) as pool:
        leader = pool.submit(ask, server, GREEDY)
        assert server.router.submitted.acquire(timeout=10)
        reply = ask(server, {**GREEDY, "timeout": 0.05})
        assert (reply.status_code, reply.json()["error"]["code"]) == (408, "deadline_exceeded")
        say_and_end(server)
        assert leader.result().status_code == 200


def test_a_broken_stream_and_a_long_answer_are_not_kept(server: Running) -> None:
    def broken(request: GenerateRequest) -> list[Any]:
        return [Output(request.id, (Delta(0, "a", (1,)),), PromptReport(1)), WorkerDied("Dead.")]

    server.router.script = broken
    assert "Dead." in ask(server, {**GREEDY, "stream": True}).text
    server.router.script = words("x" * 5000)
    for stream in (True, False):
        replies = [ask(server, {**GREEDY, "stream": stream}) for _ in range(2)]
        assert [reply.headers["x-inferd-cache"] for reply in replies] == ["miss", "miss"]
        assert all("x" * 5000 in reply.text for reply in replies)
    assert "store" not in looks(server)


def test_a_client_that_leaves_does_not_end_the_waiting_requests(server: Running) -> None:
    server.router.script = None
    body = {**GREEDY, "stream": True}
    with ThreadPoolExecutor(1) as pool:
        with connect(server) as leader:
            leader.sendall(request("/v1/completions", json.dumps(body).encode(), "authorization: Bearer sk-a"))
            assert server.router.submitted.acquire(timeout=10)
            waiting = pool.submit(ask, server, body)
            (flight,) = server.app.context.flights.values()
            wait_for(lambda: bool(flight._callbacks))  # a request waits for it
        assert server.router.streams[0].closed.wait(10)
        server.put(server.router.streams[0], Output("x", (), None, End("cancelled")))
        assert server.router.submitted.acquire(timeout=10)
        say_and_end(server, 1)
        assert waiting.result().status_code == 200


def test_a_hit_needs_a_key_that_may_use_the_model() -> None:
    settings = config()
    keys = {"sk-a": KEYS["sk-a"], "sk-x": Principal(key_id="x", tenant="a", models=("other",))}
    with running(
        FakeRouter("tiny", "other"), config=settings, door=FakeDoor(keys), cache=MemoryCache(settings.cache)
    ) as server:
        body = {**GREEDY, "model": "tiny"}
        assert ask(server, body).status_code == 200
        assert ask(server, body, key="sk-x").status_code == 404


def test_a_cached_answer_is_shaped_like_any_other(server: Running) -> None:
    ask(server, GREEDY)
    reply = ask(server, GREEDY)
    assert json.loads(reply.content)["usage"]["completion_tokens"] == 3
    event = server.served()
    assert (event.usage, event.status) == (None, 200)
