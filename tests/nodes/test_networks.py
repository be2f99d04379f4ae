"""Nodes behind real networks: cut off, slow and lossy links, processors that are all busy. Needs root and ip netns."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench.namespaces import can_make_hosts, host
from tests.nodes.joined import cluster, tiny
from tests.nodes.test_nodes_serve import answered, in_flight
from tests.worker.tiny_backend import letters
from tests.worker.watching import text_of, until

from inferd import clock
from inferd.config import NodesConfig
from inferd.events import NodeChanged

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root, ip and tun"),
]
EVERYWHERE = NodesConfig(listen="0.0.0.0:0")
LONG_S = 30.0


def test_a_node_that_is_cut_off_loses_no_request_and_joins_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = tmp_path / "gate"
        with host(1) as near, host(2) as far:
            async with cluster(tmp_path, tiny(2), settings=EVERYWHERE) as made:
                await made.join("near", on=near)
                await made.join("far", on=far)
                await made.until_placed("near", "near")  # both waited for the first
                await made.router.restart("tiny")
                await made.until_placed("far", "near")
                tasks = await answered(made, f"gate={gate}", 16)
                await until(lambda: min(in_flight(made)) > 0, "both nodes have requests")
                far.cut()
                await until(lambda: "far" not in made.names, "it is noticed")
                await made.until_placed("near", "near")
                gate.touch()
                assert [text_of(await task) for task in tasks] == [letters(6)] * 16
                (gone,) = [e for e in made.witness.events if isinstance(e, NodeChanged) and e.state == "gone"]
                assert gone.reason.endswith("and its machine acknowledges nothing")
                far.mend()
                await until(lambda: made.states("far")[-1] == "ready", "it joined again", 60)

    asyncio.run(scenario())


@pytest.mark.parametrize(("delay_ms", "loss_percent"), [(50.0, 0.0), (20.0, 2.0)])
def test_a_slow_and_lossy_link_is_no_death(tmp_path: Path, delay_ms: float, loss_percent: float) -> None:
    async def scenario() -> None:
        with host(3, delay_ms=delay_ms, loss_percent=loss_percent) as far:
            async with cluster(tmp_path, tiny(1), settings=EVERYWHERE) as made:
                await made.join("far", on=far)
                await made.until_placed("far")
                begun, number = clock.now(), 0
                while clock.now() - begun < LONG_S:
                    number += 1
                    tasks = await answered(made, "hello", 8, name=f"r{number}-")
                    assert [text_of(await task) for task in tasks] == [letters(6)] * 8
                assert "gone" not in made.states("far")

    asyncio.run(scenario())


def test_a_process_that_is_stopped_for_a_while_is_late_and_not_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        with host(4) as far:
            async with cluster(tmp_path, tiny(1), settings=EVERYWHERE) as made:
                node = await made.join("far", on=far)
                await made.until_placed("far")
                node.process.send_signal(signal.SIGSTOP)
                await until(lambda: made.states("far") == ["ready", "late"], "no beat")
                await asyncio.sleep(2.0)
                node.process.send_signal(signal.SIGCONT)
                await until(lambda: made.states("far") == ["ready", "late", "ready"], "it is heard again")
                (task,) = await answered(made, "hello", 1)
                assert text_of(await task) == letters(6)

    asyncio.run(scenario())


@contextmanager
def busy_processors(count: int) -> Iterator[None]:
    burning = [multiprocessing.get_context("spawn").Process(target=_burn, daemon=True) for _ in range(count)]
    for process in burning:
        process.start()
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.join()


def _burn() -> None:
    while True:
        pass


def test_busy_processors_are_no_death(tmp_path: Path) -> None:
    async def scenario() -> None:
        with host(5) as far:
            async with cluster(tmp_path, tiny(1), settings=EVERYWHERE) as made:
                await made.join("far", on=far)
                await made.until_placed("far")
                with busy_processors(6):
                    begun, number = clock.now(), 0
                    while clock.now() - begun < LONG_S:
                        number += 1
                        tasks = await answered(made, "hello", 8, name=f"r{number}-")
                        assert [text_of(await task) for task in tasks] == [letters(6)] * 8
                assert "gone" not in made.states("far")

    asyncio.run(scenario())
