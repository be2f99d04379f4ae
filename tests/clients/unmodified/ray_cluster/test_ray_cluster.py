"""Replicas on a real Ray cluster of three machines, as processes of one host: placed, lost, drained, without room.

Run by ``make test-clients ARGS=ray_cluster``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.nodes.joined import tiny
from tests.nodes.ray.placed import Placed, placed
from tests.nodes.test_nodes_serve import answered, in_flight
from tests.ports import free_port
from tests.worker.tiny_backend import letters
from tests.worker.watching import text_of, until, until_now

from inferd.config import ModelConfig, PlacementConfig, ScalingConfig

cluster_utils = pytest.importorskip(
    "ray.cluster_utils", reason="Ray is not installed; make test-clients ARGS=ray_cluster"
)

SCRIPT = Path(__file__).resolve().parent / "tiny_driver.py"
ON_RAY = PlacementConfig(nodes="ray")
PREEMPTION = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds", "60")
MEMORY = 80_000_000  # bytes of each machine's object store


class RayCluster:
    """A head without cores, and machines of one core each."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY}
        self.made: Any = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.machines: list[Any] = []

    def add(self, name: str) -> Any:
        node = self.made.add_node(num_cpus=1, object_store_memory=MEMORY, labels={"zone": name})
        self.machines.append(node)
        return node

    def kill(self, machine: Any) -> None:
        """As by the loss of its power: nothing is said."""
        self.machines.remove(machine)
        self.made.remove_node(machine, allow_graceful=False)

    def drain(self, machine: Any) -> None:
        """As by a notice that it will be preempted."""
        said = self._ray("drain-node", "--node-id", machine.node_id, "--reason-message", "a test", *PREEMPTION)
        assert said == "", said

    def alive(self) -> set[str]:
        """The identities of the machines."""
        return {node["NodeID"] for node in self.made.global_state.node_table() if node["Alive"]}

    def status(self) -> str:
        return self._ray("status")

    def _ray(self, command: str, *options: str) -> str:
        """What a command of Ray says."""
        whole = [sys.executable, "-m", "ray.scripts.scripts", command, "--address", self.made.address, *options]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + (done.stderr if done.returncode else "")

    def used(self, said: str) -> bool:
        return f" {said} CPU" in self.status()


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = RayCluster()
    try:
        for name in "abc":
            made.add(name)
        yield made
    finally:
        made.made.shutdown()


def on_ray(
    cluster: RayCluster, folder: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> AbstractAsyncContextManager[Placed]:
    return placed(folder, model, (sys.executable, str(SCRIPT)), cluster.made.address, monkeypatch)


def zone_of(made: Placed, name: str) -> str:
    link = made.listener.link(name)
    assert link is not None
    return link.labels["zone"]


def zones(made: Placed) -> list[str]:
    links = [made.listener.link(name) for name in made.places]
    return sorted(link.labels["zone"] for link in links if link is not None)


def machine_of(cluster: RayCluster, made: Placed, name: str) -> Any:
    link = made.listener.link(name)
    assert link is not None
    return next(one for one in cluster.machines if one.node_id == link.labels["ray.io/node-id"])


def actors() -> list[int]:
    """The processes of nodes."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            if file.read_bytes().startswith(b"ray::NodeActor"):
                found.append(int(file.parent.name))
    return found


def test_a_machine_and_an_actor_that_are_killed_lose_no_request(
    ray_cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        model = tiny(2, ON_RAY, scaling=ScalingConfig(min=2, max=3, spare=False))
        async with on_ray(ray_cluster, tmp_path, model, monkeypatch) as made:
            await until(lambda: len(set(zones(made))) == 2, "two machines have one replica each", 60)
            gate = tmp_path / "gate"
            tasks = await answered(made, f"gate={gate}", 8)
            await until(lambda: min(in_flight(made)) > 0, "both have requests")
            names = set(made.places)
            ray_cluster.kill(machine_of(ray_cluster, made, made.places[0]))
            await until(lambda: len(made.names) == 1, "the loss is noticed", 60)
            gate.touch()
            assert [text_of(await task) for task in tasks] == [letters(6)] * 8
            await until(lambda: len(made.places) == 2, "it is there again", 120)
            assert len(names & set(made.places)) == 1, "the other one stayed"
            assert len(set(zones(made))) == 2

            gate.unlink()
            tasks = await answered(made, f"gate={gate}", 8, name="again")
            await until(lambda: min(in_flight(made)) > 0, "both have requests")
            names = set(made.places)
            os.kill(actors()[0], signal.SIGKILL)
            await until(lambda: len(made.names) == 1, "the loss is noticed", 60)
            gate.touch()
            assert [text_of(await task) for task in tasks] == [letters(6)] * 8
            await until(lambda: len(made.places) == 2, "it is there again", 120)

    asyncio.run(scenario())


def test_replicas_without_room_wait_and_what_is_not_needed_is_given_back(
    ray_cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        model = tiny(1, ON_RAY, scaling=ScalingConfig(max=4, spare=False))
        async with on_ray(ray_cluster, tmp_path, model, monkeypatch) as made:
            await until(lambda: len(made.places) == 1, "the first one is there", 60)
            assert made.router._pools["tiny"].fleet.scale(4)
            short = "no room: a replica takes 1 CPU, and 0 CPU is free on the 4 machines of the Ray cluster; "
            await until(lambda: made.reasons == [f"{short}it starts when there is room"], "the shortage is told", 60)
            await until(lambda: zones(made) == ["a", "b", "c"], "the others serve", 60)
            ray_cluster.add("d")
            await until(lambda: zones(made) == ["a", "b", "c", "d"], "the last one has room", 60)
            assert made.router._pools["tiny"].fleet.scale(1)
            await until(lambda: len(made.names) == 1, "three are given back", 60)
            await until(lambda: ray_cluster.used("1.0/4.0"), "Ray knows it", 60)
            assert made.placer._driver is not None
            made.placer._driver.kill()
            await until(lambda: len(made.names) == 0, "Ray ends the actors of a driver that is gone", 60)
            await until(lambda: len(made.places) == 1, "another driver has asked again", 60)
        await until(lambda: ray_cluster.used("0.0/4.0"), "nothing is left in the cluster", 60)

    asyncio.run(scenario())


def test_what_runs_serves_while_the_head_is_away(
    ray_cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with on_ray(ray_cluster, tmp_path, tiny(2, ON_RAY), monkeypatch) as made:
            await until(lambda: len(made.places) == 2, "both are there", 60)
            ray_cluster.made.head_node.kill_gcs_server()
            for number in range(20):
                (task,) = await answered(made, "hello", 1, name=f"r{number}-")
                assert text_of(await task) == letters(6)
                await asyncio.sleep(0.25)
            assert len(made.places) == 2

    asyncio.run(scenario())


def test_a_server_that_is_killed_leaves_nothing_in_the_cluster(ray_cluster: RayCluster, tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "inferd.yaml"
    file.write_text(
        f"server: {{port: {port}}}\n"
        f"nodes: {{ray: '{ray_cluster.made.address}'}}\n"
        "models: {chat: {source: demo, replicas: 2, placement: {nodes: ray, labels: {zone: b}}}}\n"
    )
    environment = {**os.environ, "INFERD_STATE__DATA_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "inferd", "serve", str(file)], env=environment, stdout=log, stderr=log
        )

    def answers() -> bool:
        body = {"model": "chat", "prompt": "hello", "max_tokens": 4}
        try:
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    try:
        until_now(answers, "one replica serves, for which the labelled machine has room", 120)
        assert ray_cluster.used("1.0/3.0")
    finally:
        server.kill()
        server.wait()
    until_now(lambda: ray_cluster.used("0.0/3.0"), "nothing is left in the cluster", 60)
    until_now(lambda: not actors(), "no process is left", 60)


def test_a_machine_that_ray_drains_is_left_without_a_failed_request(
    ray_cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with on_ray(ray_cluster, tmp_path, tiny(2, ON_RAY), monkeypatch) as made:
            await until(lambda: len(set(zones(made))) == 2, "two machines have one replica each", 60)
            gate = tmp_path / "gate"
            tasks = await answered(made, f"gate={gate}", 8)
            await until(lambda: min(in_flight(made)) > 0, "both have requests")
            leaver = made.places[0]
            machine = machine_of(ray_cluster, made, leaver)
            zone = zone_of(made, leaver)
            await asyncio.to_thread(ray_cluster.drain, machine)
            await until(lambda: zones(made) == ["a", "b", "c"], "its successor is ready on the third machine", 60)
            for number in range(10):
                (task,) = await answered(made, "hello", 1, name=f"r{number}-")
                assert text_of(await task) == letters(6)
            gate.touch()
            assert [text_of(await task) for task in tasks] == [letters(6)] * 8
            await until(lambda: zones(made) == sorted({"a", "b", "c"} - {zone}), "the drained one is left", 60)
            await until(lambda: made.states(leaver) == ["ready", "leaving", "left"], "its node has ended", 60)
            await until(lambda: machine.node_id not in ray_cluster.alive(), "Ray ends the machine that is idle", 60)
            ray_cluster.machines.remove(machine)

    asyncio.run(scenario())


def test_an_address_where_no_cluster_is_is_refused_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that accepts connections and says nothing."""
    monkeypatch.setattr("inferd.nodes.ray.placer.CONNECT_S", 15.0)

    async def scenario() -> None:
        silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(3600), "0.0.0.0", 0)
        mute = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        command = (sys.executable, str(SCRIPT))
        for address, said in ((f"127.0.0.1:{free_port()}", "(Connection refused)"), (mute, "within 15 s")):
            async with placed(tmp_path, tiny(1, ON_RAY), command, address, monkeypatch) as made:
                await until(lambda: bool(made.reasons), "the reason is told", 30)
                assert said in made.reasons[0]
                assert made.reasons[0].endswith("and does its machine run?")
        silent.close()

    asyncio.run(scenario())
