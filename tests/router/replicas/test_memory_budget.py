"""``server.memory_bytes`` holds for what was planned, for what a worker was found to take, and for what is on its way in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.worker.tiny_backend import letters
from tests.worker.watching import Bytes, Witness, ask, outputs_of, routing, text_of, until

from inferd.config import Config, ModelConfig, ServerConfig
from inferd.errors import Overloaded
from inferd.events import ModelUnloaded, ReplicaChanged
from inferd.router.replicas.loading import Plan
from inferd.router.stream import open_stream

TINY = ModelConfig(source="tiny")
ON_DEMAND = msgspec.structs.replace(TINY, load="on_demand")
MB = 1_000_000


def planning(**sizes: int) -> Plan:
    """Bytes of a replica by the model's name; no plan for the others."""

    def plan(name: str, config: ModelConfig, *, free_bytes: int | None = None) -> Bytes | None:
        return Bytes(sizes[name]) if name in sizes else None

    return plan


def moves(witness: Witness) -> list[str]:
    """Models that begin to load or left, in order."""
    found = []
    for event in witness.events:
        if isinstance(event, ReplicaChanged) and event.state == "starting":
            found.append(f"+{event.model}")
        elif isinstance(event, ModelUnloaded):
            found.append(f"-{event.model} {event.reason}")
    return found


def test_a_model_that_was_there_from_the_start_takes_what_its_worker_was_found_to_take() -> None:
    async def scenario() -> None:
        config = Config(models={"there": TINY, "new": ON_DEMAND}, server=ServerConfig(memory_bytes=2 * MB))
        async with routing(config, plan=planning(new=MB)) as (router, _):
            await until(lambda: router.models()[0].memory_bytes > MB, "the worker has told its size")
            with pytest.raises(Overloaded, match=r"there .* or raise server\.memory_bytes") as refused:
                await router.load("new")
            assert refused.value.code == "insufficient_memory"
            assert text_of(await outputs_of(open_stream(router, ask(model="there")))) == letters(4)

    asyncio.run(scenario())


@pytest.mark.parametrize(("replicas", "free"), [(1, 600 * MB), (3, 200 * MB)])
def test_the_replicas_of_a_model_are_planned_to_share_the_budget(replicas: int, free: int) -> None:
    asked: list[int | None] = []

    def plan(name: str, config: ModelConfig, *, free_bytes: int | None = None) -> Bytes | None:
        asked.append(free_bytes)
        return Bytes(MB)

    async def scenario() -> None:
        model = msgspec.structs.replace(ON_DEMAND, replicas=replicas)
        config = Config(models={"new": model}, server=ServerConfig(memory_bytes=600 * MB))
        async with routing(config, plan=plan) as (router, _):
            await router.load("new")

    asyncio.run(scenario())
    assert set(asked) == {free}


def test_a_model_on_its_way_in_takes_what_was_planned_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = tmp_path / "gate"
        slow = msgspec.structs.replace(ON_DEMAND, source=f"gate={gate}")
        config = Config(models={"a": slow, "b": ON_DEMAND}, server=ServerConfig(memory_bytes=1_000 * MB))
        async with routing(config, plan=planning(a=600 * MB, b=600 * MB)) as (router, witness):
            first = open_stream(router, ask(name="first", model="a"))
            await until(lambda: moves(witness) == ["+a"], "the first model begins to load")
            second = open_stream(router, ask(name="second", model="b"))
            await asyncio.sleep(0.3)
            assert moves(witness) == ["+a"]
            gate.touch()
            assert text_of(await outputs_of(first)) == letters(4)
            assert text_of(await outputs_of(second)) == letters(4)
            assert moves(witness) == ["+a", "-a evicted", "+b"]

    asyncio.run(scenario())


def test_a_plan_counts_for_every_replica(tmp_path: Path) -> None:
    async def scenario() -> None:
        pair = msgspec.structs.replace(ON_DEMAND, replicas=2)
        config = Config(models={"pair": pair}, server=ServerConfig(memory_bytes=1_000 * MB))
        async with routing(config, plan=planning(pair=600 * MB)) as (router, _):
            with pytest.raises(Overloaded) as refused:
                await router.load("pair")
            assert refused.value.code == "insufficient_memory"
        async with routing(config, plan=planning(pair=500 * MB)) as (router, _):
            assert (await router.load("pair")).state in ("ready", "degraded")

    asyncio.run(scenario())


def test_a_model_with_work_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = tmp_path / "gate"
        models = {"a": ON_DEMAND, "b": ON_DEMAND}
        config = Config(models=models, server=ServerConfig(memory_bytes=1_000 * MB))
        async with routing(config, plan=planning(a=600 * MB, b=600 * MB)) as (router, witness):
            busy = open_stream(router, ask(f"gate={gate}", name="busy", model="a"))
            await until(lambda: router.models()[0].in_flight == 1, "the first model has work")
            second = open_stream(router, ask(name="second", model="b"))
            await asyncio.sleep(0.3)
            assert moves(witness) == ["+a"]
            gate.touch()
            assert text_of(await outputs_of(busy)) == letters(4)
            assert text_of(await outputs_of(second)) == letters(4)
            assert moves(witness) == ["+a", "-a evicted", "+b"]
            assert [status.residency for status in router.models()] == ["absent", "resident"]

    asyncio.run(scenario())
