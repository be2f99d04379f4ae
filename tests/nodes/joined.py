"""A router with real nodes on loopback: processes that join it, around the tiny backend."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from bench.namespaces import Host
from tests.worker.watching import IMPATIENT, TINY_WORKER, Witness, no_plan, until

from inferd.config import Config, ModelConfig, NodesConfig, PlacementConfig
from inferd.events import NodeChanged
from inferd.nodes.listener import NodesListener, bound_socket, open_nodes
from inferd.router.replicas.replica import LocalReplica
from inferd.router.router import Router
from inferd.worker.supervisor import Patience

SCRIPT = Path(__file__).resolve().parent / "tiny_node.py"
ON_NODES = PlacementConfig(nodes="only")


class Node:
    """A node's process."""

    def __init__(
        self,
        listener: NodesListener,
        folder: Path,
        name: str,
        *options: str,
        token: str = "",
        works_in: Path | None = None,
        on: Host | None = None,
        leader: str | None = None,
    ) -> None:
        token = token or listener.new_token().token
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "INFERD_NODE_TOKEN": token}
        if leader is not None:
            environment["LWS_LEADER_ADDRESS"] = leader
        address = f"{'127.0.0.1' if on is None else on.here}:{listener.address.rpartition(':')[2]}"
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *([] if on is None else on.prefix),
                    *(sys.executable, str(SCRIPT), "--name", name),
                    *([] if leader is not None else ["--join", address]),
                    *("--cache", str(folder / f"cache-{name}"), "--memory", "1GiB", *options),
                ],
                stderr=log,
                env=environment,
                cwd=works_in,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    async def ended(self) -> int:
        """The exit code, when it has ended by itself."""
        await until(lambda: self.process.poll() is not None, f"{self.name} has ended")
        return self.process.returncode

    @property
    def said(self) -> str:
        return self.log.read_text()


class Cluster:
    """A router, the port of its nodes, and what it told."""

    def __init__(self, router: Router, listener: NodesListener, witness: Witness, folder: Path) -> None:
        self.router = router
        self.listener = listener
        self.witness = witness
        self.folder = folder
        self.nodes: list[Node] = []

    def start(
        self,
        name: str,
        *options: str,
        token: str = "",
        works_in: Path | None = None,
        on: Host | None = None,
        leader: str | None = None,
    ) -> Node:
        """Start a node's process, in a folder of its own or on a host where one is named. ``leader``: as in a pod of a
        LeaderWorkerSet whose first pod has this address."""
        made = Node(self.listener, self.folder, name, *options, token=token, works_in=works_in, on=on, leader=leader)
        self.nodes.append(made)
        return made

    async def join(self, name: str, *options: str, on: Host | None = None) -> Node:
        """A node that has joined."""
        node = self.start(name, *options, on=on)
        await until(lambda: name in self.names, f"{name} has joined")
        return node

    @property
    def names(self) -> list[str]:
        return [report.name for report in self.listener.reports()]

    def states(self, name: str) -> list[str]:
        """The states of a node, one after the other."""
        return [e.state for e in self.witness.events if isinstance(e, NodeChanged) and e.node == name]

    @property
    def places(self) -> list[str]:
        """Where the ready replicas of the model are, by their numbers; empty: on the server's machine."""
        replicas = [replica for replica in self.router.replicas("tiny") if isinstance(replica, LocalReplica)]
        return [replica.node for replica in replicas if replica.is_ready]

    async def until_placed(self, *places: str) -> None:
        await until(lambda: sorted(self.places) == sorted(places), f"replicas are on {places}, not {self.places}", 60)


@asynccontextmanager
async def cluster(
    folder: Path,
    model: ModelConfig,
    *nodes: str,
    patience: Patience = IMPATIENT,
    settings: NodesConfig = NodesConfig(listen="127.0.0.1:0"),
    work_in: Mapping[str, Path] = {},
    command: Sequence[str] = TINY_WORKER,
) -> AsyncIterator[Cluster]:
    """A server's router with nodes of these names; at the end no process is left. ``command`` starts workers here."""
    witness = Witness()
    router = Router(Config(models={"tiny": model}), witness, command=command, patience=patience, plan=no_plan)
    assert settings.listen is not None
    listener = open_nodes(settings, folder / "nodes", router.machines, router.vacate, witness)
    await listener.start(bound_socket(settings.listen))
    made = Cluster(router, listener, witness, folder)
    try:
        for name in nodes:
            made.start(name, works_in=work_in.get(name))
        await until(lambda: len(made.names) == len(nodes), "all nodes have joined")
        await router.start()
        yield made
    finally:
        await router.stop()
        await listener.stop()
        for node in made.nodes:
            node.kill()
        identities = [event.request_id for event in witness.ended()]
        assert len(identities) == len(set(identities)), "a request ended twice"


def tiny(replicas: int = 1, placement: PlacementConfig = ON_NODES, **settings: object) -> ModelConfig:
    config = ModelConfig(source="tiny", replicas=replicas, placement=placement)
    return msgspec.structs.replace(config, **settings)
