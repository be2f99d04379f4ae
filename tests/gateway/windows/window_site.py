"""A server with two small models for streams of windows: one with a state, one without."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from tests.predict.test_sequences import STATES, write_sum
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from inferd.config import Config, ModelConfig, SequenceConfig, ServerConfig
from inferd.events import Event, HttpServed, ignore
from inferd.gateway.server import create_app
from inferd.http.listener import HttpServer
from inferd.observe.payloads.log import PayloadLog
from inferd.router.router import Router
from inferd.tenancy.principal import Door

SUM = "window=1&inputs.scale=1"


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def write_peak(path: Path) -> Path:
    """The loudest sample of each row: a model without a state."""
    graph = helper.make_graph(
        [helper.make_node("ReduceMax", ["x"], ["peak"], axes=[1], keepdims=0)],
        "peak",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "samples"])],
        [helper.make_tensor_value_info("peak", TensorProto.FLOAT, ["n"])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


class Site:
    """Workers that stay, behind a gateway that each test begins anew."""

    def __init__(self, folder: Path) -> None:
        stateful = SequenceConfig(states=STATES, idle_s=20, max_sequences=8)
        models = {
            "sum": ModelConfig(source=str(write_sum(folder / "sum.onnx", layers=1)), sequence=stateful),
            "peak": ModelConfig(source=str(write_peak(folder / "peak.onnx")), sequence=SequenceConfig(idle_s=0.2)),
        }
        self.config = Config(server=ServerConfig(port=0, grace_s=5), models=models)
        self.events: list[Event] = []
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.router: Router
        self.gateway: HttpServer
        self.run(self._start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    async def _start(self) -> None:
        self.router = Router(self.config, ignore)
        await self.router.start()
        await asyncio.wait_for(self.router.settled(), 30)
        assert not self.router.load_failures()

    def stop(self) -> None:
        self.run(self.router.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    def talk(
        self,
        then: Callable[[], Coroutine[Any, Any, None]],
        door: Door | None = None,
        payloads: PayloadLog | None = None,
        **server: Any,
    ) -> None:
        """Runs a test's coroutine beside a gateway."""
        self.events.clear()
        config = ServerConfig(port=0, grace_s=5, **server)

        async def main() -> None:
            both = Config(server=config, models=self.config.models)
            app = create_app(self.router, both, self.events.append, door=door, payloads=payloads)
            self.gateway = HttpServer(app, config)
            async with asyncio.timeout(30), self.gateway.running():
                await then()

        self.run(main())

    def url(self, query: str = SUM, model: str = "sum") -> str:
        return f"ws://127.0.0.1:{self.gateway.port}/v2/models/{model}/stream?{query}"

    @contextlib.asynccontextmanager
    async def connected(self, query: str = SUM, model: str = "sum", **options: Any) -> AsyncIterator[ClientConnection]:
        async with connect(self.url(query, model), proxy=None, **options) as client:
            yield client

    async def refused(self, query: str = SUM, model: str = "sum", **options: Any) -> tuple[int, str]:
        with pytest.raises(InvalidStatus) as refusal:
            async with self.connected(query, model, **options):
                pass
        body = refusal.value.response.body
        return refusal.value.response.status_code, json.loads(body or b"{}")["error"]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                await asyncio.sleep(0.005)

    def states(self) -> list[tuple[str, str]]:
        """Sequences that a worker keeps, by tenant and name, as far as the router knows."""
        return list(self.router._pools["sum"].placement.sequence_replicas._replicas)

    def windows(self) -> list[HttpServed]:
        return [event for event in self.events if isinstance(event, HttpServed) and event.stream]
