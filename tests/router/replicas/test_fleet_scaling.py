"""Replicas that are added and removed while requests run, with real workers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest
from tests.worker.watching import Bytes, ask, outputs_of, routing, text_of, until, worker

from inferd.config import Config, ModelConfig, ScalingConfig
from inferd.router.router import Router
from inferd.router.stream import open_stream
from inferd.types import StepStats

MIB = 1 << 20


def scaled(most: int, *, budget: int | None = None) -> Config:
    model = ModelConfig(source="tiny", scaling=ScalingConfig(min=1, max=most), hang_timeout_s=60.0, drain_s=0.0)
    config = Config(models={"tiny": model})
    return msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, memory_bytes=budget))


def ready(router: Router) -> int:
    return router.demands()["tiny"].ready


def planned(name: str, config: ModelConfig, *, free_bytes: int | None = None) -> Bytes | None:
    return Bytes(400 * MIB)


def test_a_replica_leaves_when_its_requests_have_ended_however_long_they_take(tmp_path: Path) -> None:
    async def run() -> None:
        async with routing(scaled(3), plan=planned) as (router, witness):
            assert await router.scale("tiny", 3) == 3
            await until(lambda: ready(router) == 3, "three are ready", 60.0)
            gates = [
                tmp_path / f"gate{number}" for number in range(12)
            ]  # the less loaded of two drawn at random: a replica without one is as good as impossible
            streams = [open_stream(router, ask(f"gate={gate}", name=f"r{number}")) for number, gate in enumerate(gates)]
            tasks = [asyncio.create_task(outputs_of(stream)) for stream in streams]
            await until(lambda: router.demands()["tiny"].busy == 3, "each replica has a request")
            worker(router).worker_outputs([], StepStats(step_sequences=1, step_s=1e6, utilization=0.25))
            worker(router, 1).worker_outputs([], StepStats(step_s=1e6, utilization=0.5))  # a turn that computed nothing
            assert router.demands()["tiny"].busy == 2.25
            assert await router.scale("tiny", 1) == 1
            demand = router.demands()["tiny"]
            assert (demand.ready, demand.leaving) == (1, 2)
            for gate in gates:
                gate.touch()
            answers = await asyncio.gather(*tasks)
            assert [text_of(outputs) for outputs in answers] == ["abcd"] * 12
            await until(lambda: router.demands()["tiny"].leaving == 0, "both have stopped")
            assert [end.outcome for end in witness.ended()] == ["done"] * 12

    asyncio.run(run())


def test_a_starting_replica_leaves_before_one_that_works() -> None:
    async def run() -> None:
        async with routing(scaled(3), plan=planned) as (router, _):
            await router.scale("tiny", 3)
            assert router.demands()["tiny"].starting == 2
            await router.scale("tiny", 1)
            await until(lambda: router.demands()["tiny"].leaving == 0, "both have stopped")
            assert (ready(router), [replica.index for replica in router.replicas("tiny")]) == (1, [0])

    asyncio.run(run())


def test_the_number_is_never_above_the_memory_plan() -> None:
    async def run() -> None:
        async with routing(scaled(4, budget=900 * MIB), plan=planned) as (router, _):
            assert await router.scale("tiny", 4) == 2
            await until(lambda: ready(router) == 2, "two are ready", 60.0)
            assert await router.scale("tiny", 3) == 2
            assert await router.scale("tiny", 1) == 1
            await until(lambda: router.demands()["tiny"].leaving == 0, "one has stopped")
            assert await router.scale("tiny", 2) == 2

    asyncio.run(run())


def test_another_configuration_keeps_the_number_within_its_bounds() -> None:
    async def run() -> None:
        config = scaled(3)
        async with routing(config, plan=planned) as (router, _):
            await router.scale("tiny", 3)
            await until(lambda: ready(router) == 3, "three are ready", 60.0)
            model = config.models["tiny"]
            for scaling, count in ((ScalingConfig(min=1, max=5), 3), (ScalingConfig(min=1, max=2), 2), (None, 1)):
                changed = msgspec.structs.replace(model, scaling=scaling)
                applied = await router.apply(msgspec.structs.replace(config, models={"tiny": changed}))
                assert not applied.failed
                assert len(router.replicas("tiny")) == count

    asyncio.run(run())


@pytest.mark.parametrize("killed", [0, 1])
def test_a_worker_that_is_killed_while_the_number_grows_is_started_again(killed: int) -> None:
    async def run() -> None:
        async with routing(scaled(2), plan=planned) as (router, witness):
            await router.scale("tiny", 2)
            await until(lambda: worker(router, killed).pid is not None, "its process exists")
            pid = worker(router, killed).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            streams = [open_stream(router, ask("pace=0.01", name=f"r{number}")) for number in range(8)]
            answers = await asyncio.gather(*(outputs_of(stream) for stream in streams))
            assert [text_of(outputs) for outputs in answers] == ["abcd"] * 8
            await until(lambda: ready(router) == 2, "both are ready", 60.0)
            assert {end.outcome for end in witness.ended()} == {"done"}

    asyncio.run(run())
