"""Predictions over gRPC: each call gets its answer when requests fail, workers die or clients disconnect.

A real worker with a small Python class, as in ``test_predictions_served`` over REST.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from tests.gateway.grpc.messages import asking, message_type
from tests.gateway.grpc.running import SERVICE
from tests.gateway.test_predictions_served import Held, Narrow, told
from tests.gateway.twice import MODEL
from tests.worker.watching import until

from inferd.cache.memory import MemoryCache
from inferd.config import Config, ModelCacheConfig, ModelConfig, ServerConfig
from inferd.events import Event, HttpServed, RequestEnded
from inferd.gateway.grpc.server import GrpcServer
from inferd.gateway.server import create_app
from inferd.http.listener import reserve
from inferd.router.router import Router
from inferd.tenancy.principal import OpenDoor


class Site:
    def __init__(self, server: GrpcServer, router: Router, events: list[Event], channel: grpc.aio.Channel) -> None:
        self.server = server
        self.router = router
        self.events = events
        self._method: Any = channel.unary_unary(f"/{SERVICE}/ModelInfer")

    @property
    def outcomes(self) -> list[str]:
        return [event.outcome for event in self.events if isinstance(event, RequestEnded)]

    def call(self, message: Any, **call: Any) -> Any:
        body = message if isinstance(message, bytes) else message.SerializeToString()
        return self._method(body, **{"timeout": 20, **call})

    async def ask(self, message: Any, **call: Any) -> tuple[StatusCode, str, bytes, dict[str, str]]:
        """Status, details, answer, and the trailing metadata but for the request's id."""
        under_way = self.call(message, **call)
        try:
            answer: bytes = await under_way
        except grpc.RpcError:
            answer = b""
        trailers = dict(await under_way.trailing_metadata())
        trailers.pop("x-request-id")
        return await under_way.code(), await under_way.details(), answer, trailers

    async def served(self, number: int) -> list[HttpServed]:
        async with asyncio.timeout(10):
            while len(found := [event for event in self.events if isinstance(event, HttpServed)]) < number:
                await asyncio.sleep(0.01)
        return found

    @property
    def is_idle(self) -> bool:
        return self.router._pools["twice"].is_idle


@contextlib.asynccontextmanager
async def site(folder: Path, door: OpenDoor | None, cached: bool) -> AsyncIterator[Site]:
    file = folder / "twice.py"
    file.write_text(MODEL)
    model = ModelConfig(source=f"{file}:Model", allow_code=True, cache=ModelCacheConfig(enabled=cached))
    config = Config(server=ServerConfig(port=0, grpc_port=0, grace_s=5), models={"twice": model})
    events: list[Event] = []
    router = Router(config, events.append)
    await router.start()
    try:
        await asyncio.wait_for(router.settled(), 30)
        assert not router.load_failures()
        reserved = reserve(config.server)
        assert reserved is not None
        server = GrpcServer(
            create_app(router, config, events.append, door=door, cache=MemoryCache(config.cache)),
            config.server,
            reserved,
        )
        await server.start()
        serving = asyncio.create_task(server.serve())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield Site(server, router, events, channel)
        server.stop()
        await serving
    finally:
        await router.stop()


def through(
    folder: Path, then: Callable[[Site], Awaitable[None]], door: OpenDoor | None = None, *, cached: bool = False
) -> None:
    async def main() -> None:
        async with site(folder, door, cached) as made:
            await then(made)

    asyncio.run(main())


ASKED: list[tuple[Any, dict[str, Any]]] = [
    (asking(), {}),
    (asking(3, 4, 5, 6), {}),
    (asking(id="mine"), {}),
    (asking(model_version="1"), {}),
    (asking(model_version="2"), {}),
    (asking(parameters={"answer": 42}), {}),
    (asking(*range(600)), {}),
    (asking(name="z"), {}),
    (message_type("ModelInferRequest")(model_name="twice"), {}),
    (asking(model="thrice"), {}),
    (asking(66, 0), {}),
    (asking(parameters={"timeout": 5_000_000}), {}),
    (asking(parameters={"priority": 1}), {}),
    (asking(parameters={"priority": -1}), {}),
    (asking(parameters={"batching": False}), {}),
    (asking(parameters={"batching": "off"}), {}),
    (asking(), {"metadata": (("x-inferd-priority", "batch"),)}),
    (asking(), {"metadata": (("authorization", "Bearer EMPTY"),)}),
    (asking(), {"timeout": None}),
    (b"\xff", {}),
]


ANSWERS = [
    *[StatusCode.OK] * 4,
    StatusCode.NOT_FOUND,
    *[StatusCode.OK] * 2,
    *[StatusCode.INVALID_ARGUMENT] * 2,
    StatusCode.NOT_FOUND,
    StatusCode.INTERNAL,
    *[StatusCode.OK] * 2,
    StatusCode.INVALID_ARGUMENT,
    StatusCode.OK,
    StatusCode.INVALID_ARGUMENT,
    *[StatusCode.OK] * 3,
    StatusCode.INVALID_ARGUMENT,
]


def test_what_is_asked_is_answered_as_often_as_it_is_asked(tmp_path: Path) -> None:
    """The protocol's parameters included, by which a request is not batched, is more urgent or has less time."""

    async def asked(made: Site) -> tuple[list[Any], list[Any]]:
        made.events.clear()
        found = [await made.ask(what, **call) for what, call in ASKED]
        await made.served(len(found))
        assert made.is_idle
        return found, told(made.events)

    async def then(made: Site) -> None:
        first = await asked(made)
        assert await asked(made) == first
        assert [status for status, *_ in first[0]] == ANSWERS

    through(tmp_path, then)


def test_a_worker_that_dies_costs_no_request_its_answer(tmp_path: Path) -> None:
    async def then(made: Site) -> None:
        for values in ((1, 2), (99, 1), (1, 2)):
            status, details, answer, _ = await made.ask(asking(*values))
            assert status is StatusCode.OK, details
            read: Any = message_type("ModelInferResponse").FromString(answer)
            assert read.outputs[0].name == "y"
        assert made.outcomes == ["done"] * 3

    through(tmp_path, then)


def test_a_client_that_leaves_is_not_computed_for(tmp_path: Path, dispatched: list[str], cancelled: list[str]) -> None:
    held = Held(tmp_path)

    async def then(made: Site) -> None:
        busy = made.call(asking(13, 0))
        await held.is_computing()
        leaving = made.call(asking())
        await until(lambda: len(dispatched) >= 2, "it is on its way")
        leaving.cancel()
        await until(lambda: cancelled == dispatched[1:], "the worker is told")
        held.let_go()
        assert await busy
        assert await made.call(asking())
        served = await made.served(3)
        assert sorted(event.status for event in served) == [200, 200, 499]
        assert sorted(made.outcomes) == ["cancelled", "done", "done"]
        assert made.is_idle

    through(tmp_path, then)


def test_a_call_whose_client_left_while_it_waited_is_never_begun(tmp_path: Path) -> None:
    async def then(made: Site) -> None:
        pool = made.router._pools["twice"]
        replica = pool.ready_replica()
        capacity, replica.capacity = replica.capacity, 0
        leaving = made.call(asking())
        await until(lambda: len(pool._queue) == 1, "it waits")
        leaving.cancel()
        await until(lambda: not len(pool._queue), "it waits no more")
        replica.capacity = capacity
        assert await made.call(asking())
        await made.served(2)
        assert made.outcomes == ["cancelled", "done"]

    through(tmp_path, then)


def test_a_deadline_is_kept(tmp_path: Path, dispatched: list[str], cancelled: list[str]) -> None:
    held = Held(tmp_path)

    async def then(made: Site) -> None:
        busy = made.call(asking(13, 0))
        await held.is_computing()
        late = made.call(asking(), timeout=0.5)
        with pytest.raises(grpc.RpcError):
            await late
        assert await late.code() is StatusCode.DEADLINE_EXCEEDED
        await until(lambda: cancelled == dispatched[1:], "the worker is told")
        held.let_go()
        assert await busy
        await made.served(2)
        assert made.is_idle

    through(tmp_path, then)


def test_a_quota_is_kept(tmp_path: Path) -> None:
    door = Narrow()

    async def then(made: Site) -> None:
        door.left = 1
        statuses = [(await made.ask(asking()))[:2] for _ in range(3)]
        assert statuses == [(StatusCode.OK, ""), *[(StatusCode.RESOURCE_EXHAUSTED, "enough")] * 2]
        door.left = 10
        assert (await made.ask(asking()))[0] is StatusCode.OK

    through(tmp_path, then, door)


def test_an_answer_that_is_kept_is_given_again(tmp_path: Path) -> None:
    async def then(made: Site) -> None:
        told = [(await made.ask(asking()))[3]["x-inferd-cache"] for _ in range(2)]
        assert told == ["miss", "hit"]

    through(tmp_path, then, cached=True)
