"""A router whose replicas a Ray cluster places, the scripted one or a real one."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.nodes.joined import Cluster
from tests.worker.watching import IMPATIENT, TINY_WORKER, Witness, no_plan

from inferd.config import Config, ModelConfig, NodesConfig
from inferd.nodes.listener import bound_socket, open_nodes
from inferd.nodes.ray.placer import Placer
from inferd.router.replicas.replica import LocalReplica
from inferd.router.router import Router


class Placed(Cluster):
    """A router, its nodes, and the driver."""

    placer: Placer

    @property
    def reasons(self) -> list[str]:
        """Why replicas have no machine."""
        replicas = [replica for replica in self.router.replicas("tiny") if isinstance(replica, LocalReplica)]
        return [replica.reason for replica in replicas if not replica.is_ready and replica.is_unplaced]

    @property
    def machines(self) -> list[str]:
        """The machines of the Ray cluster on which the ready replicas are."""
        links = [self.listener.link(name) for name in self.places]
        return sorted(link.labels["ray.io/node-id"] for link in links if link is not None)


@asynccontextmanager
async def placed(
    folder: Path, model: ModelConfig, command: Sequence[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Placed]:
    """A server's router beside a cluster; ``command`` starts the driver."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    witness = Witness()
    settings = NodesConfig(listen="127.0.0.1:0", ray=address)
    config = Config(models={"tiny": model}, nodes=settings)
    router = Router(config, witness, command=TINY_WORKER, patience=IMPATIENT, plan=no_plan)
    listener = open_nodes(settings, folder / "nodes", router.machines, router.vacate, witness)
    await listener.start(bound_socket("127.0.0.1:0"))
    made = Placed(router, listener, witness, folder)
    made.placer = router.machines.reserver = Placer(address, listener, router.machines, command)
    made.placer.start()
    try:
        await router.start()
        yield made
    finally:
        await router.stop()
        await made.placer.stop()
        await listener.stop()
        identities = [event.request_id for event in witness.ended()]
        assert len(identities) == len(set(identities)), "a request ended twice"
