"""The part of Ray that ``driver.py`` uses, without Ray, as a driver's script: ``scripted_ray.py PLAN ADDRESS``.

``PLAN`` is a JSON file with the machines of the cluster: ``{"a": {"CPU": 1, "labels": {"zone": "x"}}}``. A machine that
is taken out of it is gone, with its actors; one with ``"drains": true`` takes no more actors. An actor is a task of this
process around tiny workers.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import types
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from tests.tiny_server import TINY_WORKER

from inferd.nodes.ray import driver
from inferd.nodes.ray.reservations import NODE_ID

LOOK_S = 0.02

current: ContextVar[Handle] = ContextVar("current")
"""The actor that runs."""


class RayError(Exception):
    """The base of Ray's errors."""


class Handle:
    """An actor: pending until a machine has room for it."""

    def __init__(self, cluster: Cluster, made_of: type, options: Mapping[str, Any]) -> None:
        self.cluster = cluster
        self.made_of = made_of
        self.options = options
        self.node = ""
        self.killed = asyncio.Event()
        self.serve = self

    def remote(self, *arguments: object) -> asyncio.Future[str]:
        return asyncio.get_running_loop().create_task(self._run(arguments))

    async def _run(self, arguments: tuple[object, ...]) -> str:
        while not self.killed.is_set() and not (node := self.cluster.node_for(self.options)):
            await asyncio.sleep(LOOK_S)
        if self.killed.is_set():
            raise RayError("The actor died because it was killed by `ray.kill`.")
        self.node = node
        self.cluster.actors.append(self)
        current.set(self)  # of this task and of those that it starts
        serving = asyncio.get_running_loop().create_task(self.made_of().serve(*arguments))
        try:
            while not serving.done() and not self.killed.is_set() and self.node in self.cluster.machines:
                await asyncio.wait((serving,), timeout=LOOK_S)
            if not serving.done():
                raise RayError("The actor died unexpectedly before finishing this task.\nMore about it.")
            return str(serving.result())
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            self.cluster.actors.remove(self)


class Cluster:
    """The machines as the plan has them now."""

    def __init__(self, plan: Path) -> None:
        self.plan = plan
        self.actors: list[Handle] = []

    @property
    def machines(self) -> dict[str, dict[str, Any]]:
        return dict(json.loads(self.plan.read_text()))

    @property
    def taking(self) -> dict[str, dict[str, Any]]:
        """Those that do not drain."""
        return {name: machine for name, machine in self.machines.items() if not machine.get("drains")}

    def taken(self, node: str) -> float:
        return sum(float(actor.options["num_cpus"]) for actor in self.actors if actor.node == node)

    def node_for(self, options: Mapping[str, Any]) -> str:
        """The machine with room and fewest actors by the first selector that one fits; empty: none has room."""
        others = [one["label_selector"] for one in options["fallback_strategy"] or []]
        machines = sorted(self.taking.items(), key=lambda one: sum(actor.node == one[0] for actor in self.actors))
        for selector in (options["label_selector"] or {}, *others):
            for node, machine in machines:
                labels = {**machine.get("labels", {}), NODE_ID: node}
                if machine["CPU"] - self.taken(node) >= options["num_cpus"] and all(
                    _fits(labels, *one) for one in selector.items()
                ):
                    return node
        return ""

    # -- the module's functions -------------------------------------------------------------

    exceptions = types.SimpleNamespace(RayError=RayError)
    util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    @property
    def _private(self) -> Any:
        draining = dict.fromkeys(self.machines.keys() - self.taking.keys(), 0)
        state = types.SimpleNamespace(get_draining_nodes=lambda: draining)
        return types.SimpleNamespace(state=types.SimpleNamespace(state=state))

    def get_runtime_context(self) -> Any:
        node = current.get().node
        labels = {**self.machines.get(node, {}).get("labels", {}), NODE_ID: node}
        return types.SimpleNamespace(get_node_labels=lambda: labels)

    def get_gpu_ids(self) -> list[int]:
        return []

    def init(self, *, address: str, **options: object) -> Any:
        if address == "mute":
            time.sleep(1000)
        if address == "nowhere":
            raise ConnectionError("Could not find any running Ray instance.\nMore about it.")
        return types.SimpleNamespace(address_info={"gcs_address": address})

    def nodes(self) -> list[dict[str, object]]:
        return [
            {"NodeID": name, "Alive": True, "Resources": {"CPU": one["CPU"]}, "Labels": one.get("labels", {})}
            for name, one in self.machines.items()
        ]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": sum(machine["CPU"] - self.taken(node) for node, machine in self.taking.items())}

    def remote(self, made_of: type) -> Any:
        def options(**given: object) -> Any:
            return types.SimpleNamespace(remote=lambda: Handle(self, made_of, given))

        return types.SimpleNamespace(options=options)

    def kill(self, actor: Handle) -> None:
        actor.killed.set()

    def shutdown(self) -> None:
        pass


def _fits(labels: Mapping[str, str], name: str, wanted: str) -> bool:
    if wanted.startswith("!in("):
        return labels.get(name) not in wanted.removeprefix("!in(").removesuffix(")").split(",")
    return labels.get(name) == wanted


if __name__ == "__main__":
    plan = Path(sys.argv.pop(1))
    sys.modules["ray"] = Cluster(plan)  # type: ignore[assignment]
    sys.exit(driver.main((TINY_WORKER,)))
