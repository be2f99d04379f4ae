"""The spare worker: the next worker starts in it, it ends where it is not needed, and its memory counts."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest
from tests.worker.watching import Bytes, ask, outputs_of, routing, text_of, until

from inferd.config import Config, ModelConfig, NodesConfig, PlacementConfig, ScalingConfig
from inferd.router.replicas.fleet import Fleet
from inferd.router.router import Router
from inferd.router.stream import open_stream

MIB = 1 << 20


def scaled(
    *, spare: bool | None = True, least: int = 1, environment: tuple[str, ...] = (), spare_memory: bool = False
) -> Config:
    scaling = ScalingConfig(min=least, max=2, spare=spare, spare_memory=spare_memory)
    model = ModelConfig(source="tiny", scaling=scaling, hang_timeout_s=60.0, drain_s=0.0, environment=environment)
    return Config(models={"tiny": model})


def planned(name: str, config: ModelConfig, *, free_bytes: int | None = None) -> Bytes | None:
    return Bytes(400 * MIB)


def fleet_of(router: Router) -> Fleet:
    return router._pools["tiny"].fleet


async def spare_of(router: Router) -> int:
    """The process of the spare worker, when there is one."""
    await until(lambda: fleet_of(router).spare_pid is not None, "there is a spare worker", 60.0)
    pid = fleet_of(router).spare_pid
    assert pid is not None
    return pid


def pids(router: Router) -> list[int | None]:
    return [status.pid for status in router.replica_statuses("tiny")]


def test_the_next_replica_starts_in_the_spare_worker_and_one_that_left_makes_another() -> None:
    async def run() -> None:
        async with routing(scaled(), plan=planned) as (router, _):
            first = await spare_of(router)
            await until(lambda: fleet_of(router).spare_bytes > 0, "its memory is known")
            assert first not in pids(router)
            assert await router.scale("tiny", 2) == 2
            assert first in pids(router)
            await until(lambda: router.demands()["tiny"].ready == 2, "both are ready", 60.0)
            outputs = await asyncio.gather(
                *(outputs_of(open_stream(router, ask(name=f"r{number}"))) for number in range(6))
            )
            assert [text_of(output) for output in outputs] == ["abcd"] * 6
            assert fleet_of(router).spare_pid is None, "there are as many replicas as may be"
            await router.scale("tiny", 1)
            assert await spare_of(router) not in pids(router)

    asyncio.run(run())


def test_the_memory_of_the_spare_worker_is_no_reason_against_the_replica_that_starts_in_it() -> None:
    async def run() -> None:
        tight = scaled()
        server = msgspec.structs.replace(tight.server, memory_bytes=801 * MIB)
        async with routing(msgspec.structs.replace(tight, server=server), plan=planned) as (router, _):
            await spare_of(router)
            assert await router.scale("tiny", 2) == 2

    asyncio.run(run())


def test_a_worker_that_was_killed_is_replaced_by_the_spare_one() -> None:
    async def run() -> None:
        async with routing(scaled(), plan=planned) as (router, _):
            spare, (pid,) = await spare_of(router), pids(router)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: pids(router) == [spare], "the spare worker took its place")
            await until(lambda: router.demands()["tiny"].ready == 1, "it is ready", 60.0)

    asyncio.run(run())


def test_a_spare_worker_that_died_or_has_another_environment_is_not_used() -> None:
    async def run() -> None:
        async with routing(scaled(), plan=planned) as (router, _):
            os.kill(await spare_of(router), signal.SIGKILL)
            await until(lambda: fleet_of(router).spare_bytes == 0, "it is gone")
            assert await router.scale("tiny", 2) == 2
            await until(lambda: router.demands()["tiny"].ready == 2, "both are ready", 60.0)
            await router.scale("tiny", 1)
            spare = await spare_of(router)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("NAME_OF_A_TEST", "1")
                await router.apply(scaled(environment=("NAME_OF_A_TEST",)))  # which starts the worker again
            assert spare not in pids(router)

    asyncio.run(run())


def test_a_spare_worker_with_the_memory_of_weights_takes_the_place_of_one_without() -> None:
    async def run() -> None:
        async with routing(scaled(), plan=planned) as (router, _):
            first = await spare_of(router)
            await router.apply(scaled(spare_memory=True))
            await until(lambda: fleet_of(router).spare_pid not in (None, first), "there is another one", 60.0)
            second = fleet_of(router).spare_pid
            assert await router.scale("tiny", 2) == 2
            assert second in pids(router)

    asyncio.run(run())


def test_the_memory_of_weights_is_that_of_the_model_as_it_is_configured() -> None:
    async def run() -> None:
        config = scaled(least=0, spare_memory=True)
        async with routing(config, plan=planned) as (router, _):
            first = await spare_of(router)
            model = msgspec.structs.replace(config.models["tiny"], dtype="float32")
            await router.apply(Config(models={"tiny": model}))
            await until(lambda: fleet_of(router).spare_pid not in (None, first), "there is another one", 60.0)

    asyncio.run(run())


def test_there_is_one_by_default_while_the_model_has_a_replica_and_may_get_another() -> None:
    async def run() -> None:
        async with routing(scaled(spare=None), plan=planned) as (router, _):
            await spare_of(router)
            assert await router.scale("tiny", 2) == 2
            assert fleet_of(router).spare_pid is None
            await router.scale("tiny", 1)
            await spare_of(router)
            await router.apply(scaled(spare=None, least=0))
            await router.unload("tiny")
            assert fleet_of(router).spare_pid is None
            assert fleet_of(router)._spare_timer is None, "and none will be started"

    asyncio.run(run())


def test_there_is_none_on_this_machine_where_replicas_run_elsewhere() -> None:
    async def run() -> None:
        config = scaled()
        model = msgspec.structs.replace(config.models["tiny"], placement=PlacementConfig(nodes="only"))
        config = Config(models={"tiny": model}, nodes=NodesConfig(listen="127.0.0.1:0"))
        async with routing(config, plan=planned, until_ready=False) as (router, _):
            assert fleet_of(router)._spare_timer is None

    asyncio.run(run())


def test_there_is_none_without_the_setting_and_memory_that_another_model_needs_ends_it() -> None:
    async def run() -> None:
        async with routing(scaled(), plan=planned) as (router, _):
            await spare_of(router)
            await router.apply(scaled(spare=False))
            assert fleet_of(router).spare_pid is None
        tight = scaled()
        other = ModelConfig(source="tiny", load="on_demand", hang_timeout_s=60.0)
        server = msgspec.structs.replace(tight.server, memory_bytes=1300 * MIB)
        tight = msgspec.structs.replace(tight, models={**tight.models, "other": other}, server=server)
        async with routing(tight, plan=planned) as (router, _):
            await spare_of(router)
            fleet = fleet_of(router)
            held, needed = fleet.rss_bytes, fleet.spare_bytes
            assert held > 0
            assert needed > 0
            loading = router._loading
            loading.configure(held + needed + 400 * MIB - 1)  # with the spare worker one byte is missing
            await router.load("other")
            assert fleet.spare_pid is None

    asyncio.run(run())
