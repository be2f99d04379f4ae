"""Sequences through the whole server: one replica has a sequence's state, and what dies with it is said."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.predict.test_sequences import STATES, write_sum
from tests.remote.test_relays import Client

from inferd.config import Config, ModelConfig, SequenceConfig, ServerConfig
from inferd.events import ignore
from inferd.gateway.server import create_app
from inferd.http.listener import HttpServer
from inferd.router.replicas.replica import LocalReplica
from inferd.router.router import Router

PATH = "/v2/models/sum/infer"


def body(sequence: object, value: float, **parameters: object) -> dict[str, Any]:
    return {
        "parameters": {"sequence_id": sequence, **parameters},
        "inputs": [
            {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [value]},
            {"name": "scale", "shape": [], "datatype": "FP32", "data": [1]},
        ],
    }


class Site:
    def __init__(self, port: int, router: Router) -> None:
        self._port = port
        self.router = router

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()


async def ask(client: Client, sequence: object, value: float, **parameters: object) -> float:
    reply = await client.ask(body(sequence, value, **parameters), PATH)
    assert reply.status == 200, reply.body
    answer: float = json.loads(reply.body)["outputs"][0]["data"][0]
    return answer


def through(folder: Path, then: Callable[[Site], Awaitable[None]], replicas: int) -> None:
    path = write_sum(folder / "sum.onnx", layers=1)

    async def main() -> None:
        model = ModelConfig(source=str(path), replicas=replicas, sequence=SequenceConfig(states=STATES))
        config = Config(server=ServerConfig(port=0, grace_s=5), models={"sum": model})
        router = Router(config, ignore)
        await router.start()
        await asyncio.wait_for(router.settled(), 30)
        assert not router.load_failures()
        gateway = HttpServer(create_app(router, config, ignore), config.server)
        try:
            async with gateway.running():
                await then(Site(gateway.port, router))
        finally:
            await router.stop()

    asyncio.run(main())


def test_every_sequence_stays_with_the_replica_that_has_its_state(tmp_path: Path) -> None:
    async def one(site: Site, name: object) -> list[float]:
        async with site.client() as client:
            found = [await ask(client, name, 1, sequence_start=True)]
            found += [await ask(client, name, value) for value in range(2, 8)]
            return [*found, await ask(client, name, 8, sequence_end=True)]

    async def then(site: Site) -> None:
        answers = await asyncio.gather(*[one(site, name) for name in (*range(1, 9), *"abcdefgh")])
        assert answers == [[1, 3, 6, 10, 15, 21, 28, 36]] * 16
        async with site.client() as client:
            reply = await client.ask(body(1, 1), PATH)
            assert (reply.status, "sequence_start" in json.loads(reply.body)["error"]) == (400, True)

    through(tmp_path, then, replicas=2)


def test_a_state_that_died_with_its_worker_is_missed_and_not_invented(tmp_path: Path) -> None:
    async def then(site: Site) -> None:
        (replica,) = site.router.replicas("sum")
        assert isinstance(replica, LocalReplica)
        async with site.client() as client:
            assert await ask(client, "s", 1, sequence_start=True) == 1
            pid = replica.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(20):
                while replica.pid in (pid, None) or not replica.is_ready:
                    await asyncio.sleep(0.02)
            reply = await client.ask(body("s", 1), PATH)
            assert (reply.status, "has no state here" in json.loads(reply.body)["error"]) == (400, True)
            assert await ask(client, "s", 1, sequence_start=True) == 1

    through(tmp_path, then, replicas=1)
