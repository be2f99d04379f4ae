"""The adapters of one model: what replicas are told to have, what an operator is told of it, and when they go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import msgspec
import pytest
from tests.router.virtual_loop import VirtualLoop

from inferd.config import ModelConfig
from inferd.errors import InvalidRequest, Unavailable
from inferd.router.adapters import PoolAdapters
from inferd.router.replicas.fleet import Fleet
from inferd.router.replicas.replica import LocalReplica
from inferd.router.status import Applied, ModelStatus
from inferd.types import AdapterState, Failure, GenerateRequest, ModelInfo, PredictRequest, TextPrompt

NO_FILES = AdapterState(source="/broken", failure=Failure("model_load_failed", "It has no files."))
INFO = ModelInfo(
    name="m",
    source="/m",
    architecture="llama",
    dtype="float32",
    max_model_len=8,
    vocab_size=8,
    num_parameters=8,
    num_blocks=8,
    block_size=8,
    max_num_seqs=8,
    fingerprint="fp_base",
)
STATUS = ModelStatus(
    name="m",
    state="ready",
    info=INFO,
    replicas=2,
    replicas_ready=2,
    detail="",
    created=0.0,
    waiting=3,
    in_flight=4,
    waiting_tokens=5,
    has_remote=True,
    memory_bytes=1000,
)


class Replicas:
    """A fleet whose replicas load what they are told at once, but for ``/broken``."""

    def __init__(self, count: int) -> None:
        self.locals = [
            SimpleNamespace(replica=mock.Mock(spec=LocalReplica, is_ready=True, adapters={})) for _ in range(count)
        ]
        self.wanted: list[Mapping[str, str]] = []
        self.num_using: dict[str, int] = {}
        self._changed = asyncio.Event()

    async def set_adapters(self, wanted: Mapping[str, str]) -> None:
        self.wanted.append(dict(wanted))
        for member in self.locals:
            self.tell(member.replica, **{name: loaded(source) for name, source in wanted.items()})

    def tell(self, replica: Any, **states: AdapterState) -> None:
        replica.adapters = states

    def end_requests(self, adapter: str) -> None:
        del self.num_using[adapter]
        self._changed.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


def loaded(source: str) -> AdapterState:
    return NO_FILES if source == "/broken" else AdapterState(source=source, identity=f"id of {source}", num_bytes=10)


def having(adapters: Mapping[str, str]) -> ModelConfig:
    return ModelConfig(source="/m", adapters=dict(adapters), drain_s=30.0)


def run(scenario: Callable[[Replicas, PoolAdapters], Coroutine[Any, Any, None]], count: int = 1) -> None:
    async def whole() -> None:
        replicas = Replicas(count)
        adapters = PoolAdapters(having({}), cast("Fleet", replicas), lambda name: replicas.num_using.get(name, 0))
        await scenario(replicas, adapters)
        adapters.halt()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(whole())


def test_what_was_loaded_is_told_once_and_what_fails_every_time() -> None:
    async def scenario(replicas: Replicas, adapters: PoolAdapters) -> None:
        async def applied(wanted: Mapping[str, str]) -> Applied:
            return await adapters.configure("m", having(wanted))

        both = {"one": "/one", "bad": "/broken"}
        failed = ["m: adapter bad: It has no files."]
        assert await applied(both) == Applied(done=["m: adapter one loaded"], failed=failed)
        assert await applied(both) == Applied(done=[], failed=failed)
        moved = both | {"one": "/elsewhere"}
        assert await applied(moved) == Applied(done=["m: adapter one loaded"], failed=failed)
        assert adapters.names == ("one", "bad")
        assert await applied({"one": "/elsewhere"}) == Applied(done=["m: adapter bad unloaded"], failed=[])

    run(scenario)


def test_an_adapter_that_leaves_is_unloaded_when_its_last_request_has_ended() -> None:
    async def scenario(replicas: Replicas, adapters: PoolAdapters) -> None:
        await adapters.configure("m", having({"one": "/one", "two": "/two"}))
        replicas.num_using["one"] = 1
        await adapters.configure("m", having({"two": "/two"}))
        assert adapters.names == ("two",), "no new request gets it"
        await asyncio.sleep(20.0)
        assert replicas.wanted[-1] == {"one": "/one", "two": "/two"}
        replicas.end_requests("one")
        await asyncio.sleep(0.1)
        assert replicas.wanted[-1] == {"two": "/two"}
        await adapters.configure("m", having({}))
        await asyncio.sleep(0.1)
        assert replicas.wanted[-1] == {}, "and never again"

    run(scenario)


def test_requests_that_do_not_end_keep_an_adapter_for_the_grace_period_alone() -> None:
    async def scenario(replicas: Replicas, adapters: PoolAdapters) -> None:
        await adapters.configure("m", having({"one": "/one"}))
        replicas.num_using["one"] = 1
        await adapters.configure("m", having({}))
        await asyncio.sleep(29.9)
        assert replicas.wanted[-1] == {"one": "/one"}
        await asyncio.sleep(0.2)
        assert replicas.wanted[-1] == {}

    run(scenario)


def test_an_adapter_is_loaded_when_any_ready_replica_has_it_and_its_failure_is_told_all_the_same() -> None:
    async def scenario(replicas: Replicas, adapters: PoolAdapters) -> None:
        request = GenerateRequest(id="r", model="m", prompt=TextPrompt(text="hello"))
        first, second = (member.replica for member in replicas.locals)
        assert adapters.bound(request, "one") == msgspec.structs.replace(request, adapter="one"), "none was asked yet"
        assert adapters.info(INFO, "one") is None
        replicas.tell(first, one=NO_FILES)
        replicas.tell(second, one=loaded("/one"))
        expected = msgspec.structs.replace(request, adapter="one", adapter_identity="id of /one")
        assert adapters.bound(request, "one") == expected
        with pytest.raises(InvalidRequest):
            adapters.bound(PredictRequest(id="r", model="m", dialect="v2", body=b"{}"), "one")
        replicas.num_using["one"] = 7
        assert adapters.status(STATUS, "one") == msgspec.structs.replace(
            STATUS,
            name="one",
            parent="m",
            info=adapters.info(INFO, "one"),
            detail="It has no files.",
            has_remote=False,
            waiting=0,
            waiting_tokens=0,
            in_flight=7,
            memory_bytes=10,
        )
        info = adapters.info(INFO, "one")
        assert info is not None
        assert (info.name, info.source) == ("one", "/one")
        assert info.fingerprint not in ("", INFO.fingerprint)
        second.is_ready = False
        assert adapters.failure("one") == "It has no files."
        with pytest.raises(Unavailable):
            adapters.bound(request, "one")
        status = adapters.status(STATUS, "one")
        assert (status.state, status.replicas_ready, status.memory_bytes) == ("failed", 0, 0)

    run(scenario, count=2)
