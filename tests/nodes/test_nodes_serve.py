"""Replicas on other machines: placed, served, killed, drained, and every request has its one end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.nodes.joined import Cluster, cluster, tiny
from tests.worker.tiny_backend import letters
from tests.worker.watching import ask, outputs_of, text_of, until

from inferd.config import NodesConfig, PlacementConfig
from inferd.events import LoadProgress, ReplicaChanged, Retried
from inferd.registry.identity import identity_of
from inferd.router.replicas.replica import LocalReplica
from inferd.router.stream import open_stream
from inferd.types import Output


async def answered(
    made: Cluster, prompt: str, count: int, max_tokens: int = 6, name: str = "r"
) -> list[asyncio.Task[list[Output]]]:
    """So many requests, each in flight or waiting."""
    loop = asyncio.get_running_loop()
    asked = [ask(prompt, name=f"{name}{number}", max_tokens=max_tokens) for number in range(count)]
    return [loop.create_task(outputs_of(open_stream(made.router, one))) for one in asked]


def in_flight(made: Cluster) -> list[int]:
    return [replica.num_in_flight for replica in made.router.replicas("tiny")]


def test_a_killed_node_loses_no_request_and_its_replicas_come_back_elsewhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = tmp_path / "gate"
        async with cluster(tmp_path, tiny(2), "one", "two") as made:
            await made.until_placed("one", "two")
            tasks = await answered(made, f"gate={gate}", 16)
            await until(lambda: min(in_flight(made)) > 0, "both nodes have requests")
            made.nodes[0].kill()
            await made.until_placed("two", "two")
            gate.touch()
            assert [text_of(await task) for task in tasks] == [letters(6)] * 16
            assert made.states("one") == ["ready", "gone"]
            lost = [e for e in made.witness.events if isinstance(e, ReplicaChanged) and e.state == "died"]
            assert "its node one is gone: its connection ended" in lost[0].reason

            # A node that comes back gets replicas again, and the replicas of the other one when that is gone.
            await made.join("one")
            made.nodes[1].kill()
            await made.until_placed("one", "one")
            (again,) = await answered(made, "hello", 1, name="again")
            assert text_of(await again) == letters(6)

    asyncio.run(scenario())


def test_a_stream_that_had_begun_on_a_killed_node_is_continued_token_by_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = tmp_path / "gate"
        placement = PlacementConfig()  # the first replica is here, the second on the node
        async with cluster(tmp_path, tiny(2, placement, resume_streams=True), "one") as made:
            await made.until_placed("", "one")
            tasks = await answered(made, f"pace=0.02 end={gate}", 4, max_tokens=1000)
            await until(lambda: min(in_flight(made)) > 0, "both machines have requests")
            replica = next(r for r in made.router.replicas("tiny") if isinstance(r, LocalReplica) and r.node == "one")
            tickets = list(replica._in_flight.values())
            await until(lambda: all(ticket.token_ids for ticket in tickets), "its streams have begun")
            made.nodes[0].kill()
            await made.until_placed("", "")
            gate.touch()
            texts = [text_of(await task) for task in tasks]
            assert all(letters(1000).startswith(text) and text for text in texts)
            continued = [e for e in made.witness.events if isinstance(e, Retried) and e.kind == "continuation"]
            assert len(continued) == len(tickets)

    asyncio.run(scenario())


def test_a_node_that_leaves_is_drained_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = tmp_path / "gate"
        async with cluster(tmp_path, tiny(1), "one") as made:
            await made.until_placed("one")
            (task,) = await answered(made, f"gate={gate}", 1)
            await until(lambda: in_flight(made) == [1], "the request is on the node")
            await made.join("two")
            made.nodes[0].process.send_signal(signal.SIGTERM)
            await until(lambda: "two" in made.places, "another replica is ready first")
            assert made.nodes[0].process.poll() is None
            gate.touch()
            assert text_of(await task) == letters(6)
            assert await made.nodes[0].ended() == 0
            await made.until_placed("two")
            await until(lambda: made.states("one") == ["ready", "leaving", "left"], "it left")
            assert not [event for event in made.witness.events if isinstance(event, Retried)]

    asyncio.run(scenario())


def test_a_worker_killed_on_a_node_is_told_by_its_signal_and_started_there_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, tiny(1), "one") as made:
            await made.until_placed("one")
            (task,) = await answered(made, f"die-once={tmp_path / 'died'}", 1)
            assert text_of(await task) == letters(6)
            (died,) = [e for e in made.witness.events if isinstance(e, ReplicaChanged) and e.state == "died"]
            assert died.reason.startswith("its process was killed by signal 9")
            assert died.reason.endswith("on the node one")
            assert made.places == ["one"]
            assert made.states("one") == ["ready"]

    asyncio.run(scenario())


def test_without_a_node_a_replica_waits_and_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        placement = PlacementConfig(nodes="only", labels={"zone": "a"})
        async with cluster(tmp_path, tiny(1, placement), "other") as made:
            await asyncio.wait_for(made.router.settled(), 20)  # the server's start does not wait for it
            (status,) = made.router.replica_statuses("tiny")
            assert (status.state, status.node) == ("starting", "")
            assert status.detail == "no node with zone=a has joined; it starts when one does"
            (task,) = await answered(made, "hello", 1)
            await made.join("one", "--label", "zone=a")
            assert text_of(await task) == letters(6)
            assert made.places == ["one"]

    asyncio.run(scenario())


def test_a_model_that_does_not_load_on_one_node_is_tried_on_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        liar = tmp_path / "liar"
        liar.mkdir()
        (liar / "bad").touch()
        # The first by its name is tried first.
        model, work_in = tiny(1, source="missing-if=bad"), {"a-liar": liar}
        async with cluster(tmp_path, model, "a-liar", "honest", work_in=work_in) as made:
            await made.until_placed("honest")
            assert not made.router.load_failures()

    asyncio.run(scenario())


def test_a_node_joins_a_server_that_was_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, tiny(1), "one") as made:
            await made.until_placed("one")
            (node,) = made.nodes
            made.nodes.clear()
            port = made.listener.address.rpartition(":")[2]
        settings = NodesConfig(listen=f"127.0.0.1:{port}")
        async with cluster(tmp_path, tiny(1), settings=settings) as made:
            made.nodes.append(node)
            await made.until_placed("one")
            # Its secret is another one than the token's, so revoked tokens do not part it from its server.
            made.listener.new_token(revoke=True)
            made.listener._links["one"].lose("a test wants it")
            await until(lambda: made.states("one")[-2:] == ["gone", "ready"], "it joined again")

    asyncio.run(scenario())


def test_a_node_without_the_model_gets_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        folder = tmp_path / "a model"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "weights.bin").write_bytes(os.urandom(3_000_000))
        monkeypatch.setenv("BLIND", "1")
        async with cluster(tmp_path, tiny(2, source=str(folder)), "one") as made:
            await made.until_placed("one", "one")
            (tree,) = (tmp_path / "cache-one" / "trees").iterdir()
            for file in folder.iterdir():
                assert (tree / file.relative_to("/")).read_bytes() == file.read_bytes()
            assert list((tmp_path / "cache-one" / "blobs").glob("*.part")) == []
            phases = {e.phase for e in made.witness.events if isinstance(e, LoadProgress)}
            assert "transfer" in phases
            (replica, _) = made.router.replicas("tiny")
            assert replica.info is not None
            assert replica.info.source == str(folder)
            assert replica.info.artifact == identity_of(made.router._pools["tiny"].config)
            (task,) = await answered(made, "hello", 1)
            assert text_of(await task) == letters(6)

    asyncio.run(scenario())
